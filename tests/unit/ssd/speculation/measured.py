"""Sources whose acceptances have been measured."""

import math
from collections.abc import Callable

from ssd.speculation.sources import Candidates, Sources
from ssd.types import TokenId

Tokens = tuple[TokenId, ...]
Row = tuple[Candidates, Tokens]
_ROUNDS = 400


def measure(sources: Sources, of_draft: float, of_backup: float, *, repeats: bool) -> None:
    """Add rounds in which so large a share of the tokens of both sources is accepted.

    The next round is no trial.
    """
    rows = [
        *_rows(of_draft, lambda tokens: Candidates(from_draft=tokens, repeats=repeats)),
        *_rows(of_backup, lambda tokens: Candidates(from_backup=tokens, repeats=repeats)),
    ]
    for _ in range(_ROUNDS):
        sources.add_round(rows)
    sources.num_rounds = 1


def _rows(share: float, candidates: Callable[[Tokens], Candidates]) -> list[Row]:
    """Rows of 100 tokens that are tested."""
    accepted = (1,) * math.ceil(100 * share)
    refused = candidates((1,)), (2,)
    return [(candidates(accepted), accepted), *[refused] * (100 - len(accepted))]
