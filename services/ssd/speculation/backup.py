"""What a row proposes after a miss, without a draft.

Decision: search the newest ``WINDOW_TOKENS`` tokens anew at each miss, with array operations.
Because: it takes tens of microseconds, only misses pay, and no state can go stale.
Not chosen: an index of n-grams kept along each sequence, which pays on every token and needs a
bound on its memory. Revisit when: misses are common in large batches.
"""

from collections.abc import Sequence

import numpy as np

from ssd.types import TokenId

WINDOW_TOKENS = 1024
"""Newest tokens that are searched."""
MAX_SUFFIX_TOKENS = 16
"""Longer matches are not told apart; the newest of them wins."""


def propose_ngram(
    tokens: Sequence[TokenId], max_tokens: int, *, min_suffix: int = 2
) -> tuple[TokenId, ...]:
    """Propose what followed the last time the text ended as it does now.

    Of all earlier places in the window whose tokens agree with the text's end, take the one that
    agrees longest, and of these the newest. A continuation that reaches the end of the text reads
    on in the proposal itself, so a periodic text is continued periodically.

    Args:
        tokens: the sequence's own text, prompt included.
        max_tokens: tokens to propose.
        min_suffix: tokens that must agree, >= 1; fewer are no match.

    Returns:
        ``max_tokens`` tokens, or none when nothing matches.
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
