"""``ssd``, or ``python -m ssd_cli``."""

from ssd_cli.extras import extra_of, how_to_install

try:
    from ssd_cli.app import run
except KeyboardInterrupt:
    # The import takes a second. Ctrl-C during it prints no stack trace.
    raise SystemExit(130) from None
except ModuleNotFoundError as error:
    name = (error.name or "").partition(".")[0]
    extra = extra_of(name)
    if not extra:
        raise
    raise SystemExit(f"error: {how_to_install(name, [extra])}") from None


def main() -> None:
    """Run the command line; the exit code is 0, 2 for bad input, 130 for Ctrl-C, 1 otherwise."""
    raise SystemExit(run())


if __name__ == "__main__":
    main()
