"""Sources whose acceptances have been measured."""

from ssd.speculation.sources import Candidates, Sources

_ROUNDS = 400


def measure(sources: Sources, of_draft: float, of_backup: float, *, repeats: bool) -> None:
    """Add rounds in which so large a share of the tokens of both sources is accepted.

    The next round is no trial.
    """
    rows = [
        (candidates, (1 if number < 100 * share else 2,))
        for number in range(100)
        for candidates, share in (
            (Candidates(from_draft=(1,), repeats=repeats), of_draft),
            (Candidates(from_backup=(1,), repeats=repeats), of_backup),
        )
    ]
    for _ in range(_ROUNDS):
        sources.add_round(rows)
    sources.num_rounds = 1
