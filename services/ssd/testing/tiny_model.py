"""A model whose next-token distribution is known exactly and depends on its whole context.

Its one layer attends evenly (all scores are 0), so attention returns the mean of the values that it
reads. The mean times the number of positions is a count of each token, which determines the
distribution. A surplus, missing or stale slot or a wrong position therefore changes it.
"""

import torch
from torch import Tensor

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.decoder import Attends
from ssd.engine.precision import DTYPES
from ssd.engine.runner import AnyRunner
from ssd.engine.torch_execution import make_execution

NUM_STATES = 7
"""Number of different distributions for each last token."""
MAX_LEN = {torch.bfloat16: 128, torch.float32: 4096}
"""Contexts up to this length are counted without error."""


class TinyModel:
    """Implements ``CausalModel``: logits are a fixed table of (last token, state of the counts)."""

    def __init__(
        self, vocab_size: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size, NUM_STATES, vocab_size)
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.table_VMV = torch.randn(shape, generator=generator) * 1.5
        self._weight_W = torch.randint(1, NUM_STATES, (2 * vocab_size,), generator=generator)

    def config(self) -> ModelConfig:
        """Return the model configuration that a runner needs."""
        width = 2 * self.vocab_size
        return ModelConfig(
            family="tiny",
            vocab_size=self.vocab_size,
            hidden_size=self.vocab_size,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_size=width,
            intermediate_size=width,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            rope_scaling=None,
            max_position_embeddings=MAX_LEN[self.dtype],
            tie_word_embeddings=True,
        )

    def prepare(self, max_len: int) -> None:
        """See ``CausalModel.prepare``."""
        assert max_len <= MAX_LEN[self.dtype], max_len

    def forward(self, tokens_R: Tensor, positions_R: Tensor, attention: Attends) -> Tensor:
        """See ``CausalModel.forward``; a hidden state is the row of the table itself."""
        values_RW = self._values(tokens_R, positions_R).to(self.dtype)
        nothing_R1W = torch.zeros_like(values_RW)[:, None]
        mean_RW = attention.attend(0, nothing_R1W, nothing_R1W, values_RW[:, None])
        counts_RW = (mean_RW.float() * (positions_R[:, None] + 1)).round().long()
        return self.table_VMV[tokens_R, self._state(counts_RW)]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See ``CausalModel.logits``."""
        return hidden_RD.clone()

    def law(self, tokens: list[int]) -> Tensor:
        """Return the exact fp32 logits [V] of what follows ``tokens``."""
        tokens_R = torch.tensor(tokens)
        counts_W = self._values(tokens_R, torch.arange(len(tokens))).sum(dim=0)
        return self.table_VMV[tokens[-1], self._state(counts_W)]

    def make_runner(self, kind: type[AnyRunner], engine: EngineConfig) -> AnyRunner:
        """Return a runner of this model; the engine must have the model's dtype."""
        assert DTYPES[engine.dtype] == self.dtype, engine.dtype
        config = self.config()
        return kind(make_execution(self, config, engine), config, engine)

    def _values(self, tokens_R: Tensor, positions_R: Tensor) -> Tensor:
        """Return the values of positions: the token, and the token weighted by its position."""
        token_RV = torch.nn.functional.one_hot(tokens_R, self.vocab_size)
        return torch.cat((token_RV, token_RV * (positions_R[:, None] % 3)), dim=1)

    def _state(self, counts_XW: Tensor) -> Tensor:
        return (counts_XW * self._weight_W).sum(dim=-1) % NUM_STATES
