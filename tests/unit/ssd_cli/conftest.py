"""Each test begins without ``--debug``; the command ``generate`` without a target."""

import pytest

from ssd.rpc.codec import GenerateCall
from ssd_cli import app
from ssd_cli.commands import debug_of_app


@pytest.fixture(autouse=True)
def without_debug() -> None:
    """A command with ``--debug`` before its name sets it for its whole process."""
    debug_of_app.set(False)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[GenerateCall]:
    """Calls of ``ssd generate``, each of which ends with Ctrl-C before its first token."""
    calls: list[GenerateCall] = []

    async def generate(_options: object, call: GenerateCall, *_others: object) -> None:
        calls.append(call)
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "generate", generate)
    return calls
