"""A sequence without a KV cache, computed anew for each token: the reference for tables."""

from dataclasses import dataclass

import torch

from ssd.speculation.noise import gumbel_noise
from ssd.speculation.table import OutcomeTable
from ssd.testing.ledger_runner import law
from ssd.types import Commit, Outcome


@dataclass
class PlainText:
    """One sequence, and the table that a draft has to build for it."""

    lookahead: int
    vocab_size: int
    committed: list[int]
    temperature: float = 1.0
    seed: int = 0xFEDCBA9876543210
    proposal: tuple[int, ...] = ()

    def scores(self, tokens: list[int]) -> torch.Tensor:
        """Return the scores log q + T g of the token after these."""
        noise_V = torch.from_numpy(gumbel_noise(self.seed, [len(tokens)], self.vocab_size)[0])
        logits_V = law(torch.tensor(tokens), self.vocab_size)
        return torch.log_softmax(logits_V, -1) + self.temperature * noise_V

    def continuation(self, accepted: int, bonus: int) -> list[int]:
        """Return the tokens after an outcome."""
        tokens = [*self.committed, *self.proposal[:accepted], bonus]
        for _ in range(self.lookahead):
            tokens.append(int(self.scores(tokens).argmax()))
        return tokens[-self.lookahead :]

    def forks(self, accepted: int, count: int) -> list[int]:
        """Return the most likely bonus tokens after so many accepted tokens."""
        scores_V = self.scores([*self.committed, *self.proposal[:accepted]])
        if accepted < len(self.proposal):
            scores_V[self.proposal[accepted]] = -torch.inf
        return scores_V.topk(count).indices.tolist()

    def commit(self, accepted: int, bonus: int, proposal: tuple[int, ...] = ()) -> Commit:
        """Return the commit of a round for session 1."""
        outcome = Outcome(accepted, bonus)
        return Commit(1, len(self.committed), outcome, tokens=proposal)

    def move(self, accepted: int, bonus: int, proposal: tuple[int, ...]) -> None:
        """Apply an outcome."""
        self.committed += [*self.proposal[:accepted], bonus]
        self.proposal = proposal

    def check(self, table: OutcomeTable) -> None:
        """Assert that each branch of a table is correct, as far as it is there."""
        assert table.base_len == len(self.committed)
        accepted, bonus = table.accepted_N.tolist(), table.bonus_N.tolist()
        assert len(set(zip(accepted, bonus, strict=True))) == len(accepted)
        assert set(accepted) <= set(range(len(self.proposal) + 1))
        for k in set(accepted):
            mine = [t for length, t in zip(accepted, bonus, strict=True) if length == k]
            assert set(mine) == set(self.forks(k, len(mine)))
        for k, t, tokens in zip(accepted, bonus, table.tokens_NK.tolist(), strict=True):
            assert tokens[: table.depth] == self.continuation(k, t)[: table.depth]

    def hit(self, table: OutcomeTable, accepted: int, num_proposed: int) -> Commit:
        """Apply and return the commit of a branch with that accepted length."""
        index = table.accepted_N.tolist().index(accepted)
        bonus = int(table.bonus_N[index])
        proposal = table.proposal(index, num_proposed)
        commit = self.commit(accepted, bonus, proposal)
        self.move(accepted, bonus, proposal)
        return commit

    def miss(self, table: OutcomeTable | None, accepted: int, proposal: tuple[int, ...]) -> Commit:
        """Apply and return the commit of an outcome that is not in the table."""
        taken = (
            set() if table is None else set(table.bonus_N[table.accepted_N == accepted].tolist())
        )
        bonus = next(token for token in range(self.vocab_size) if token not in taken)
        commit = self.commit(accepted, bonus, proposal)
        self.move(accepted, bonus, proposal)
        return commit
