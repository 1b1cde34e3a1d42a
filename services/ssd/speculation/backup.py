"""The backup: what a sequence proposes after a miss, without a draft.

Decision: search the newest ``WINDOW_TOKENS`` tokens again at each miss, with array operations.
Because: this takes tens of microseconds, only sequences without a complete table pay, and there is
no state to keep correct.
Not chosen: an index of n-grams for each sequence, which costs time for every token and needs a
bound on its memory. Revisit when: misses are common in large batches.
"""

from collections.abc import Callable, Sequence
from itertools import cycle, islice

import numpy as np

from ssd.types import TokenId

WINDOW_TOKENS = 1024
"""Newest tokens that are searched."""
MAX_SUFFIX_TOKENS = 16
"""Longer matches count as equally long; the newest of them is taken."""
_BACKWARDS_L = np.array([*range(MAX_SUFFIX_TOKENS - 2, -1, -1), 0])
"""Offsets of the tokens before an end, newest first, and one more, which never counts as equal."""

Backup = Callable[[Sequence[TokenId], int], tuple[TokenId, ...]]
"""Tokens of a sequence and the maximum number of proposed tokens to the proposal."""


def propose_nothing(_tokens: Sequence[TokenId], _max_tokens: int) -> tuple[TokenId, ...]:
    """Return no tokens."""
    return ()


def propose_ngram(
    tokens: Sequence[TokenId], max_tokens: int, *, min_suffix: int = 2
) -> tuple[TokenId, ...]:
    """Propose the tokens that followed the last earlier occurrence of the text's end.

    Of all earlier places in the window whose tokens match the end of the text, the longest match is
    taken, and of equally long ones the newest. A continuation that reaches the end of the text
    continues in the proposal itself, so a periodic text is continued periodically.

    Args:
        tokens: the sequence, prompt included.
        max_tokens: number of tokens to propose.
        min_suffix: number of tokens that must match, >= 1.

    Returns:
        ``max_tokens`` tokens, or none if nothing matches.
    """
    window, most = tokens[-WINDOW_TOKENS:], MAX_SUFFIX_TOKENS - 1
    num = len(window)
    if max_tokens < 1 or num <= min_suffix:
        return ()
    # What is before the window equals no token.
    padded_S = np.full(most + num, -1, dtype=np.int64)
    padded_S[most:] = window
    ends_C = np.flatnonzero(padded_S[most:-1] == padded_S[-1])
    if not ends_C.size:
        return ()
    is_same_CL = padded_S[ends_C[:, None] + _BACKWARDS_L] == padded_S[num - 1 + _BACKWARDS_L]
    is_same_CL[:, most] = False
    num_same_C = is_same_CL.argmin(axis=1)
    longest = len(ends_C) - 1 - int(num_same_C[::-1].argmax())
    if num_same_C[longest] + 1 < min_suffix:
        return ()
    start = int(ends_C[longest]) + 1
    period = window[start : start + max_tokens]
    return tuple(islice(cycle(period), max_tokens))


BACKUPS: dict[str, Backup] = {"none": propose_nothing, "ngram": propose_ngram}
"""The backups by the value of the setting ``backup``."""
