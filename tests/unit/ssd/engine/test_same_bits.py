"""A row's bits do not depend on its column, its batch mates, nor on how far they reach.

So plain decoding and verification of proposals give the same logits, bit for bit. The model is as
wide as a real small one: narrower matrices would not show what the kernels do.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.engine.layers import linear
from ssd.engine.runner import ModelRunner, load_runner

Store = Callable[[ModelRunner, Sequence[int], Tensor], None]

P = 7
VOCAB = 512
BLOCKS = 48
LENGTHS = (5, 40, 252, 300, 600)
MAX_LEN = 700


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ssd.testing.tiny_folder import write_random_llama

    return write_random_llama(tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((dtype, packed), id=f"{dtype}-{'packed' if packed else 'plain'}")
        for dtype in ("bfloat16", "float32")
        for packed in (True, False)
    ],
)
def runner(wide_folder: Path, request: pytest.FixtureRequest) -> ModelRunner:
    dtype, packed = request.param
    engine = EngineConfig(
        max_model_len=MAX_LEN, max_num_seqs=4, num_columns=P, dtype=dtype, deterministic=True
    )
    with pytest.MonkeyPatch.context() as patch:
        if not packed:
            patch.setattr(linear, "can_pack", lambda _weight: False)
        return load_runner(wide_folder, engine, lambda _stage, _fraction: None)
