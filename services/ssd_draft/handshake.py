"""The handshake of a link: what a target must have in common with this draft."""

from ssd.errors import HandshakeError, SettingsError
from ssd.speculation.fan_out import make_policy
from ssd.types import Hello, LinkSettings, Welcome
from ssd_draft.setup import DraftSetup

_SHOWN_CHARACTERS = 12
_FIXES = dict.fromkeys(
    ("vocab_size", "tokenizer_fingerprint"), "; use a draft of the target's model family"
)
"""Fix for a field that differs, if its values do not show the fix."""


def welcome(hello: Hello, setup: DraftSetup) -> Welcome:
    """Return the answer to a valid Hello."""
    backend, refusal = "", ""
    if hello.backends and setup.settings.channel == "grpc":
        # A target may be hostile, and a backend lets it end this process.
        refusal = "the draft has channel grpc: set channel to collective on the draft too"
    elif hello.backends:
        # Without a collective channel, a link needs none of this.
        from ssd.transport.communicator import common_backend  # noqa: PLC0415

        backend, refusal = common_backend(hello.backends, setup.model.engine.device)
    return Welcome(
        epoch=hello.epoch,
        max_sessions=setup.settings.max_sessions,
        lookahead=setup.settings.lookahead,
        branches=setup.settings.branches,
        peer=setup.peer,
        max_len=setup.model.engine.max_model_len,
        backend=backend,
        backend_refusal=refusal,
        tokenizer_fingerprint=setup.model.tokenizer.fingerprint,
    )


def check_hello(hello: Hello, setup: DraftSetup) -> None:
    """Refuse a target that does not match this draft.

    Raises:
        HandshakeError: names the first field that differs.
    """
    fields = {
        "vocab_size": setup.model.num_token_ids,
        "tokenizer_fingerprint": setup.model.tokenizer.fingerprint,
        "lookahead": setup.settings.lookahead,
        "branches": setup.settings.branches,
    }
    for field, expected in fields.items():
        received = getattr(hello, field)
        if received != expected:
            raise HandshakeError(
                field,
                f"this draft has {_short(expected)}, the target has {_short(received)}"
                + _FIXES.get(field, ""),
            )


def check_settings(settings: LinkSettings) -> None:
    """Refuse a fan-out policy that this draft does not have.

    Raises:
        HandshakeError: the policy is unknown.
    """
    try:
        make_policy(settings.fan_out_policy)
    except SettingsError as error:
        raise HandshakeError("fan_out_policy", str(error)) from error


def _short(value: object) -> str:
    """Return a value as the text for a message; only the beginning of a fingerprint."""
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
