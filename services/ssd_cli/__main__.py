"""``ssd``, or ``python -m ssd_cli``."""

try:
    from ssd_cli.app import run
except KeyboardInterrupt:
    # The import takes a second. Ctrl-C during it prints no stack trace.
    raise SystemExit(130) from None


def main() -> None:
    """Run the command line; the exit code is 0, 2 for bad input, 130 for Ctrl-C, 1 otherwise."""
    raise SystemExit(run())


if __name__ == "__main__":
    main()
