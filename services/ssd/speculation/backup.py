"""The backup: what a sequence proposes without a draft.

Decision: search the newest ``WINDOW_TOKENS`` tokens again each time, with array operations.
Because: this takes 6 to 20 microseconds, and there is no state to keep correct.
Not chosen: an index of n-grams for each sequence, which costs time for every token and needs a
bound on its memory. Revisit when: the searches of large batches take a measurable part of a round.
"""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from ssd.types import TokenId

WINDOW_TOKENS = 1024
"""Newest tokens that are searched."""
MAX_SUFFIX_TOKENS = 16
"""Longer matches count as equally long; the newest of them is taken."""
_BACKWARDS_L = np.array([*range(MAX_SUFFIX_TOKENS - 2, -1, -1), 0])
"""Offsets of the tokens before an end, newest first, and one more, which never counts as equal."""

LONG_MATCH_TOKENS = 8
"""Equal tokens after which a text is assumed to repeat itself."""


class BackupProposal(NamedTuple):
    """A proposal of the backup."""

    tokens: tuple[TokenId, ...] = ()
    repeats: bool = False
    """Whether at least ``LONG_MATCH_TOKENS`` tokens before it are equal to earlier ones."""


Backup = Callable[[Sequence[TokenId], int], BackupProposal]
"""Tokens of a sequence and the maximum number of proposed tokens to the proposal."""


def propose_nothing(_tokens: Sequence[TokenId], _max_tokens: int) -> BackupProposal:
    """Return no tokens."""
    return BackupProposal()


def propose_ngram(
    tokens: Sequence[TokenId], max_tokens: int, *, min_suffix: int = 2
) -> BackupProposal:
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
        return BackupProposal()
    # What is before the window equals no token.
    padded_S = np.full(most + num, -1, dtype=np.int64)
    padded_S[most:] = window
    ends_C = np.flatnonzero(padded_S[most:-1] == padded_S[-1])
    if not ends_C.size:
        return BackupProposal()
    is_same_CL = padded_S[ends_C[:, None] + _BACKWARDS_L] == padded_S[num - 1 + _BACKWARDS_L]
    is_same_CL[:, most] = False
    num_same_C = is_same_CL.argmin(axis=1)
    longest = len(ends_C) - 1 - int(num_same_C[::-1].argmax())
    num_same = int(num_same_C[longest]) + 1
    if num_same < min_suffix:
        return BackupProposal()
    start = int(ends_C[longest]) + 1
    period = window[start : start + max_tokens]
    proposed = tuple(islice(cycle(period), max_tokens))
    return BackupProposal(proposed, num_same >= LONG_MATCH_TOKENS)


BACKUPS: dict[str, Backup] = {"none": propose_nothing, "ngram": propose_ngram}
"""The backups by the value of the setting ``backup``."""
