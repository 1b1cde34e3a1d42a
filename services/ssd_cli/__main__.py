"""``ssd``, or ``python -m ssd_cli``."""

from ssd_cli.app import app


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
