"""Links without a network, and sequences for their sessions."""

from typing import Any

from ssd.pool.link import DraftedSequence, DraftLink
from ssd.types import OpenSession, Welcome

LOOKAHEAD = 6


def link(name: str = "draft", max_sessions: int = 8, **fields: Any) -> DraftLink:
    welcome = Welcome(epoch=3, max_sessions=max_sessions, lookahead=LOOKAHEAD, branches=2, **fields)
    return DraftLink(name, welcome, lambda _message: None)


def sequence(num_tokens: int = 5, remaining: int = 100) -> DraftedSequence:
    """A sequence without a session."""
    max_len = num_tokens + remaining
    return DraftedSequence(
        OpenSession(
            token_ids=tuple(range(8, 8 + num_tokens)), max_len=max_len, seed=0, temperature=0.0
        )
    )
