"""Which source proposes: the draft, or n-grams of the text (the backup). Pure.

The tokens of a round are what the target selects after each proposal, so they also show how many
tokens of a proposal that was not verified would have been accepted. A draft must have run for this.
Where n-grams make the draft idle or late, every ``TRIAL_ROUNDS``-th round is as in other texts.

Texts that repeat themselves have separate acceptances. Tokens kept of 5, in 48 texts of the
embedded pair at T = 0, after a match of

    2 tokens: 1.8 of n-grams, 2.9 of the draft
    5 to 9 tokens: 3.2 to 3.5 of n-grams, 3.1 to 3.4 of the draft
    16 tokens or more: 4.9 of n-grams, 4.1 of the draft

*Decision*: a match of 8 tokens divides the texts, not one for each length. *Because*: most long
matches have 16 tokens or more. *Not chosen*: a suffix tree of all texts of a server, which needs
memory and a bound on what requests learn about each other. *Revisit when* texts of several requests
repeat each other.
"""

from collections.abc import Iterable, Sequence
from operator import eq
from typing import NamedTuple

from ssd.speculation.estimates import Acceptance
from ssd.types import TokenId

TRIAL_ROUNDS = 32
"""Rounds from one trial of the draft to the next. In simulations without trials, one of ten servers
stayed with n-grams that were worse than its draft."""
_PRIOR_OF_DRAFT = 0.8
_PRIORS_OF_BACKUP = {False: 0.5, True: 0.75}
"""By whether the text repeats itself. A draft is tried first."""


class Candidates(NamedTuple):
    """What both sources propose for one round."""

    from_draft: tuple[TokenId, ...] = ()
    from_backup: tuple[TokenId, ...] = ()
    repeats: bool = False
    """Whether the text repeats itself, see ``BackupProposal``."""


NO_CANDIDATES = Candidates()


class Sources:
    """Acceptances of both sources, by whether a text repeats itself. Step thread only."""

    def __init__(self) -> None:
        self.num_rounds = 0
        """Rounds that were added."""
        self._of_draft = {repeats: Acceptance(_PRIOR_OF_DRAFT) for repeats in _PRIORS_OF_BACKUP}
        self._of_backup = {
            repeats: Acceptance(prior) for repeats, prior in _PRIORS_OF_BACKUP.items()
        }

    def add_round(self, rows: Iterable[tuple[Candidates, Sequence[TokenId]]]) -> None:
        """Add the candidates of each sequence, and the tokens that the target selected.

        Tokens after the first that is not accepted, or after the end of the round, are not tested.
        """
        self.num_rounds += 1
        sums: dict[Acceptance, tuple[int, int]] = {}
        for (from_draft, from_backup, repeats), selected in rows:
            for acceptance, tokens in (
                (self._of_draft[repeats], from_draft),
                (self._of_backup[repeats], from_backup),
            ):
                is_equal = [*map(eq, tokens, selected)]
                num_equal = (*is_equal, False).index(False)
                tested, accepted = sums.get(acceptance, (0, 0))
                num_tested = min(num_equal + 1, len(is_equal))
                sums[acceptance] = tested + num_tested, accepted + num_equal
        for acceptance, (tested, accepted) in sums.items():
            acceptance.add(tested, accepted)

    @property
    def is_trial(self) -> bool:
        """Whether the draft proposes in this round, also where the text repeats itself."""
        return self.num_rounds % TRIAL_ROUNDS == 0

    def acceptances(self, *, repeats: bool) -> tuple[float, float]:
        """Return two acceptances: of the draft, and of the backup."""
        return self._of_draft[repeats].rate, self._of_backup[repeats].rate

    def expected_tokens(self, num_draft: float, num_backup: float, *, repeats: bool) -> float:
        """Return the expected tokens of a round.

        Args:
            num_draft: first tokens of the proposal, which are from the draft.
            num_backup: the tokens after them, which are from the backup.
            repeats: whether the text repeats itself.
        """
        a, b = self.acceptances(repeats=repeats)
        after: float = a**num_draft * b * (1 - b**num_backup) / (1 - b)
        return float((1 - a ** (num_draft + 1)) / (1 - a)) + after
