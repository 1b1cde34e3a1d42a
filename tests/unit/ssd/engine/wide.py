"""A wide random model of one layer, whose products have the kernels of large models."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.engines import load, paged, store
from torch import Tensor

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.llama import shapes
from ssd.engine.openvino_engine import decoder
from ssd.engine.precision import has_bfloat16
from ssd.engine.target_runner import TargetRunner

P = 7
BLOCK_SIZE = 32
VOCAB = 1024
BLOCKS = 24
PADDING = torch.Generator().manual_seed(9)
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def write_wide_folder(folder: Path) -> None:
    """Write the model into an empty folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in shapes(ModelConfig.from_folder(folder)).items():
        drawn = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        weights[name] = (drawn if len(shape) > 1 else drawn + 1).bfloat16()
    save_file(weights, folder / "model.safetensors")


KEPT = "float32 with bfloat16 weights"
FUSED = "bfloat16 in two threads"
"""With AMX and two CPUs, each MLP is one operation of OpenVINO, as in large models."""
DTYPES = {KEPT: "float32", FUSED: "bfloat16"}
needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(), reason="this CPU has no bfloat16 arithmetic"
)


def load_wide(folder: Path, engine: str, dtype: str, **settings: Any) -> TargetRunner:
    settings.setdefault("max_model_len", BLOCKS * BLOCK_SIZE)
    settings.setdefault("threads", 2 if dtype == FUSED else 1)
    config = EngineConfig(
        num_columns=P,
        engine=engine,
        dtype=DTYPES.get(dtype, dtype),
        weights="bfloat16" if dtype == KEPT else "same",
        block_size=BLOCK_SIZE,
        **settings,
    )
    with pytest.MonkeyPatch.context() as patch:
        if dtype == FUSED:
            patch.setattr(decoder, "SMALL_MODEL", 0)
        return load(TargetRunner, folder, config)


def text(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def table(row: int) -> Tensor:
    return torch.arange(1 + row * BLOCKS, 1 + (row + 1) * BLOCKS)


def stack(rows: Sequence[tuple[Sequence[int], int, int]]) -> PagedBatch:
    """A batch of (columns, first position, which block table); what is padded is noise."""
    noise_BP = torch.randint(0, VOCAB, (len(rows), P), generator=PADDING)
    return paged([(tokens, first, table(row)) for tokens, first, row in rows], P, noise_BP)


def stored(runner: TargetRunner, *lengths: int) -> list[tuple[list[int], int, int]]:
    """Store texts of these lengths; the next columns of each, their first position and its row."""
    rows = []
    for row, length in enumerate(lengths):
        tokens = text(length + P)
        store(runner, tokens[:length], table(row))
        rows.append((tokens[length:], length, row))
    return rows


class Faulty:
    """The passes of a runner, with other bits in those of some shapes."""

    def __init__(
        self, runner: TargetRunner, is_faulty: Callable[[PagedBatch], bool], *, prefills: bool
    ) -> None:
        self._runner = runner
        self._is_faulty = is_faulty
        self._prefills = prefills
        self._is_stored_wrong = False
        self.model, self.engine = runner.model, runner.engine
        self.num_blocks = runner.num_blocks
        self.verify_columns, self.row_counts = runner.verify_columns, runner.row_counts

    def prefill(self, batch: PagedBatch) -> int | None:
        self._is_stored_wrong = self._prefills and self._is_faulty(batch)
        return self._runner.prefill(batch)

    def forward(self, batch: PagedBatch) -> Tensor:
        logits_BPV = self._runner.forward(batch)
        if self._is_stored_wrong or (not self._prefills and self._is_faulty(batch)):
            return torch.nextafter(logits_BPV, logits_BPV + 1)
        return logits_BPV
