"""The rounds of the sequences whose requests ask for them. Step thread."""

from collections.abc import Iterable, Mapping

from ssd.pool.rounds import Lookup
from ssd.types import LookupResult, Round, SequenceId, TokenId, TokenText
from ssd_target.decoding.round_result import RoundResult
from ssd_target.decoding.sequence import Sequence


class RoundReports:
    """Describes each round of the sequences that it was given."""

    def __init__(self) -> None:
        self._lookups: dict[SequenceId, LookupResult] = {}
        """Newest lookup of each sequence that is reported; others are absent."""

    def admit(self, sequence: Sequence) -> None:
        """Report a sequence if its request asks for it."""
        if sequence.arrival.request.report_rounds:
            self._lookups[sequence.sequence_id] = LookupResult.NONE

    def drop(self, sequence_id: SequenceId) -> None:
        """Forget a sequence that has ended. Idempotent."""
        self._lookups.pop(sequence_id, None)

    def rounds(
        self, results: Iterable[RoundResult], proposed: Mapping[SequenceId, tuple[TokenId, ...]]
    ) -> dict[SequenceId, tuple[Round]]:
        """Return the round of each sequence that is reported.

        Args:
            results: of the round.
            proposed: proposals that the round has verified; no entry is no proposal.
        """
        if not self._lookups:
            return {}
        return {
            result.sequence.sequence_id: (self._round(result, proposed),)
            for result in results
            if result.sequence.sequence_id in self._lookups
        }

    def note(self, results: Iterable[RoundResult], lookups: Iterable[Lookup]) -> None:
        """Keep the lookups, which select the proposals of the next round."""
        if not self._lookups:
            return
        for result, lookup in zip(results, lookups, strict=True):
            if result.sequence.sequence_id in self._lookups:
                self._lookups[result.sequence.sequence_id] = lookup.result

    def _round(
        self, result: RoundResult, proposed: Mapping[SequenceId, tuple[TokenId, ...]]
    ) -> Round:
        sequence_id, added = result.sequence.sequence_id, result.emission.token_ids
        return Round(
            proposed=tuple(map(TokenText, proposed.get(sequence_id, ())[: result.num_proposed])),
            accepted_tokens=min(result.outcome.accepted, len(added)),
            added=tuple(map(TokenText, added)),
            lookup=self._lookups[sequence_id],
        )
