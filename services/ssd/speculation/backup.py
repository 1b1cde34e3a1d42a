"""The backup: what a sequence proposes after a miss, without a draft.

Decision: search the newest ``WINDOW_TOKENS`` tokens again at each miss, with array operations.
Because: this takes tens of microseconds, only sequences without a complete table pay, and there is
no state to keep correct.
Not chosen: an index of n-grams for each sequence, which costs time for every token and needs a
bound on its memory. Revisit when: misses are common in large batches.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ssd.types import TokenId

WINDOW_TOKENS = 1024
"""Newest tokens that are searched."""
MAX_SUFFIX_TOKENS = 16
"""Longer matches count as equally long; the newest of them is taken."""

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
    window_S = np.array(tokens[-WINDOW_TOKENS:], dtype=np.int64)
    num = len(window_S)
    if max_tokens < 1 or num <= min_suffix:
        return ()
    ends_C = np.flatnonzero(window_S[:-1] == window_S[-1])
    ends_C = ends_C[ends_C >= min_suffix - 1]
    for length in range(1, min(MAX_SUFFIX_TOKENS, num - 1)):
        longer_C = ends_C[ends_C >= length]
        longer_C = longer_C[window_S[longer_C - length] == window_S[-1 - length]]
        if not longer_C.size:
            if length < min_suffix:
                return ()
            break
        ends_C = longer_C
    if not ends_C.size:
        return ()
    start = int(ends_C[-1]) + 1
    period_S = window_S[start:]
    return tuple(np.resize(period_S, max_tokens).tolist())


BACKUPS: dict[str, Backup] = {"none": propose_nothing, "ngram": propose_ngram}
"""The backups by the value of the setting ``backup``."""
