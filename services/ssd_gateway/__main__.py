"""``python -m ssd_gateway``: read settings, construct the gateway, run it."""

from ssd.runtime.sigterm import end_at_sigterm

if __name__ == "__main__":
    # Before the imports below, which take a moment.
    end_at_sigterm()

import sys
from collections.abc import Sequence

from ssd.ports import SystemClock
from ssd.runtime.process import run_process, run_until_signal
from ssd_gateway.api_keys import ApiKeys
from ssd_gateway.gateway import Gateway, credentials_of
from ssd_gateway.settings import GatewaySettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process and return its exit code."""
    return run_process("gateway", GatewaySettings, serve, check, argv)


async def serve(settings: GatewaySettings) -> int:
    """Construct the gateway and serve until a signal.

    Raises:
        SetupError: the process cannot start.
    """
    gateway = Gateway(settings, SystemClock())
    return await run_until_signal(gateway.run(), gateway.drain)


def check(settings: GatewaySettings) -> None:
    """Check the settings, the file of keys and the credentials.

    Raises:
        SetupError: the process would not start.
    """
    ApiKeys(settings.api_keys_file)
    credentials_of(settings)


if __name__ == "__main__":
    sys.exit(main())
