"""A runner without a model: it stores token ids in place of KV entries.

The logits are a fixed function of the tokens that attention would read through the block table. A
wrong position, block table or column count, or a row that was never stored, therefore changes the
logits, as it would with a model.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from itertools import count
from operator import mul

import torch

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig

_UNWRITTEN = -1
_MODULUS = 2_147_483_647


class LedgerRunner:
    """The part of ``TargetRunner`` that a decode loop uses. One thread."""

    def __init__(self, engine: EngineConfig, *, num_blocks: int, vocab_size: int) -> None:
        self.engine = engine
        self.verify_columns = engine.verify_columns
        self.nan_token: int | None = None
        """Rows of this token are not finite."""
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.num_forwards = 0
        self.num_padding = 0
        self.joined_rows = 0
        """Set by a test: see ``TargetRunner``."""
        self.joined: list[int] = []
        """Numbers of prompts of the verifies."""
        self.kept_rows: list[bool] = []
        """``keeps_rows`` of the verifies."""
        self.device_seconds: float | None = None
        """Set by a test: what a device would measure."""
        self.ledger = torch.full((num_blocks * engine.block_size,), _UNWRITTEN)

    def prefill(
        self, batch: PagedBatch, before_pass: Callable[[], None] = lambda: None
    ) -> int | None:
        """Store chunks of a prompt, in one pass."""
        assert len(batch.tokens_BP) == 1
        before_pass()
        (column,) = self._store_prompts(batch)
        return column

    def _store_prompts(self, prompts: PagedBatch) -> list[int | None]:
        assert prompts.tokens_BP.shape[1] % self.engine.prefill_chunk == 0
        assert not (prompts.first_positions_B % self.engine.prefill_chunk).any()
        self._store(prompts)
        return self.bad_columns(prompts)

    def bad_columns(self, prompts: PagedBatch) -> list[int | None]:
        """See ``TargetRunner``."""
        texts = zip(prompts.tokens_BP.tolist(), prompts.num_columns_B.tolist(), strict=True)
        return [
            tokens.index(self.nan_token) if self.nan_token in tokens[:count] else None
            for tokens, count in texts
        ]

    def prepare(self, batch: PagedBatch) -> PagedBatch:
        """There are no masks."""
        self.kept_rows.append(batch.keeps_rows)
        return batch

    def verify(self, prepared: PagedBatch) -> torch.Tensor:
        """See ``forward``."""
        return self.forward(prepared)

    def verify_seconds(self) -> float | None:
        """See ``TargetRunner``."""
        return self.device_seconds

    def forward(self, batch: PagedBatch) -> torch.Tensor:
        """Store the rows; return logits_BPV as ``TargetExecution.verify``, zero at padding."""
        self.num_forwards += 1
        assert batch.tokens_BP.shape[1] in self.engine.verify_columns
        self._store(batch)
        logits_BPV = self._logits(batch)
        prompts = batch.prompts
        self.joined.append(0 if prompts is None else len(prompts.tokens_BP))
        if prompts is None:
            return logits_BPV
        assert self.joined_rows
        self._store_prompts(prompts)
        ends_BPV = torch.zeros((len(prompts.tokens_BP), *logits_BPV.shape[1:]))
        last_B = prompts.num_columns_B - 1
        every_BPV = self._logits(prompts)
        ends_BPV[:, 0] = every_BPV[torch.arange(len(last_B)), last_B]
        return torch.cat([logits_BPV, ends_BPV])

    def _logits(self, batch: PagedBatch) -> torch.Tensor:
        num_rows, num_columns = batch.tokens_BP.shape
        logits_BPV = torch.zeros((num_rows, num_columns, self.vocab_size))
        for row in range(num_rows):
            entries_S = self._entries(batch.block_tables_BJ[row])
            for column in range(int(batch.num_columns_B[row])):
                last = int(batch.first_positions_B[row]) + column
                seen_S = self.ledger[entries_S[: last + 1]]
                assert int(seen_S.min()) >= 0, "attends to a position that was never stored"
                logits_BPV[row, column] = law(seen_S, self.vocab_size)
                if int(seen_S[-1]) == self.nan_token:
                    logits_BPV[row, column] = torch.nan
        return logits_BPV

    def _store(self, batch: PagedBatch) -> None:
        for row in range(batch.tokens_BP.shape[0]):
            entries_S = self._entries(batch.block_tables_BJ[row])
            first, count = int(batch.first_positions_B[row]), int(batch.num_columns_B[row])
            written_C = entries_S[first : first + count]
            assert written_C.numel() == count, "a position is outside the block table"
            lowest = int(written_C.min())
            assert lowest >= self.engine.block_size, "a real token in reserved block 0"
            self.ledger[written_C] = batch.tokens_BP[row, :count]

    def _entries(self, blocks_J: torch.Tensor) -> torch.Tensor:
        offsets_C = torch.arange(self.engine.block_size)
        return (blocks_J[:, None] * self.engine.block_size + offsets_C).flatten()


def law(tokens_S: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the logits after these tokens: a peaked, arbitrary function of all of them.

    They depend mostly on the last two tokens, so that n-gram proposals are sometimes accepted.
    """
    tokens = tokens_S.tolist()
    recent = 0
    for token in tokens[-2:]:
        recent = (recent * 1_000_003 + token + 7) % _MODULUS
    everything = sum(map(mul, tokens, count(1))) % 97
    return _of_recent(recent, vocab_size) + _of_everything(everything, vocab_size)


@lru_cache(2**16)
def _of_recent(recent: int, vocab_size: int) -> torch.Tensor:
    ids_V = torch.arange(vocab_size, dtype=torch.int64)
    mixed_V = (ids_V * 48_271 + recent * 69_621 + 11) % _MODULUS * 16_807 % _MODULUS
    return mixed_V.float() / _MODULUS * 4.0


@cache
def _of_everything(everything: int, vocab_size: int) -> torch.Tensor:
    wobble_V = (torch.arange(vocab_size) * 31 + everything * 17) % 23
    return wobble_V.float() / 23.0
