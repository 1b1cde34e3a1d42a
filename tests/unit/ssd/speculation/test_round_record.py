"""What one round did, from the results of its lookups."""

from ssd.speculation.round_record import RoundRecord
from ssd.types import LookupResult


def test_sequences_with_an_open_session_are_answered_also_if_the_backup_proposes() -> None:
    subject = RoundRecord()
    for result in LookupResult:
        subject.add_lookup(result)
    unanswered = {LookupResult.NO_DRAFT, LookupResult.NONE}
    assert subject.num_answered == len(LookupResult) - len(unanswered)
