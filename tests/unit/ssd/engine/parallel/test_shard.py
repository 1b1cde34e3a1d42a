"""The parts of all ranks are the whole model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ssd.engine.config import FAMILIES, ModelConfig
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.models.llama import parts, shapes
from ssd.engine.models.weights import Checkpoint
from ssd.engine.parallel.shard import (
    IDS_OF_A_UNIT,
    Shard,
    check_shards,
    heads_of,
    ids_of,
    kv_heads_of,
    model_of,
)
from ssd.errors import SettingsError

MODEL = replace(
    KNOWN_SHAPES["llama-3.1-8b"],
    vocab_size=301,
    hidden_size=24,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_size=6,
    intermediate_size=50,
)
models = st.builds(
    lambda heads, group, ids, units, is_tied, family: replace(
        MODEL,
        num_heads=heads,
        num_kv_heads=heads // group,
        vocab_size=ids,
        intermediate_size=units,
        tie_word_embeddings=is_tied,
        family=family,
    ),
    heads=st.sampled_from((8, 16, 64)),
    group=st.sampled_from((1, 2, 4, 8)),
    ids=st.integers(32, 400),
    units=st.integers(8, 100),
    is_tied=st.booleans(),
    family=st.sampled_from(FAMILIES),
)
sizes = st.sampled_from((1, 2, 4, 8))


@given(model=models, size=sizes)
def test_the_parts_of_each_tensor_are_the_whole_tensor(model: ModelConfig, size: int) -> None:
    check_shards(model, size)
    of_rank = [parts(model, Shard(rank, size)) for rank in range(size)]
    copies = max(1, size // model.num_kv_heads)
    for name, shape in shapes(model).items():
        if not of_rank[0]:
            assert size == 1
            continue
        if len(shape) == 1:
            assert name not in of_rank[0], "norms are whole on every rank"
            continue
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        pieces = [whole[part[name]] for part in of_rank]
        if "k_proj" in name or "v_proj" in name:
            assert all(
                torch.equal(piece, pieces[i // copies * copies]) for i, piece in enumerate(pieces)
            )
            pieces = pieces[::copies]
        assert torch.equal(torch.cat(pieces, dim=len(of_rank[0][name]) - 1), whole), name


@given(model=models, size=sizes)
def test_a_rank_has_the_key_value_heads_of_its_query_heads(model: ModelConfig, size: int) -> None:
    group = model.num_heads // model.num_kv_heads
    for rank in range(size):
        shard = Shard(rank, size)
        needed = {head // group for head in heads_of(model, shard)}
        assert needed == set(kv_heads_of(model, shard))
        part = model_of(model, shard)
        assert part.num_heads % part.num_kv_heads == 0


@given(model=models, size=sizes)
def test_each_token_id_has_one_rank_and_counters_of_noise_are_not_divided(
    model: ModelConfig, size: int
) -> None:
    ids = [ids_of(model, Shard(rank, size)) for rank in range(size)]
    assert [each for some in ids for each in some] == list(range(model.vocab_size))
    assert all(len(some) > 0 and some.start % IDS_OF_A_UNIT == 0 for some in ids)


@given(model=models, size=sizes)
def test_a_rank_reads_the_shapes_of_its_own_model(model: ModelConfig, size: int) -> None:
    for rank in range(size):
        shard = Shard(rank, size)
        own = shapes(model_of(model, shard))
        for name, part in parts(model, shard).items():
            if name in own:
                assert part[-1].stop - part[-1].start == own[name][len(part) - 1]


@pytest.mark.parametrize(
    ("change", "size", "words"),
    [
        (
            {"num_heads": 6, "num_kv_heads": 2},
            4,
            "does not divide the 6 attention heads.*allows 1, 2",
        ),
        ({"num_heads": 24, "num_kv_heads": 3}, 8, "the 3 key/value heads.*allows 1"),
        ({"vocab_size": 28}, 8, "only 28 token ids.*allows 1, 2, 4"),
        ({"intermediate_size": 3}, 4, "only 3 units.*allows 1, 2"),
    ],
)
def test_a_size_that_a_model_does_not_allow_is_refused_with_those_that_it_allows(
    change: dict[str, int], size: int, words: str
) -> None:
    with pytest.raises(SettingsError, match=f"tensor_parallel_size {size}: .*{words}"):
        check_shards(replace(MODEL, **change), size)  # type: ignore[arg-type]


def test_a_checkpoint_returns_the_selected_parts(tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(10, 6)
    save_file(
        {"rows": whole, "columns": whole.clone(), "all": whole.clone()},
        tmp_path / "model.safetensors",
    )
    of_rank = parts(replace(MODEL, vocab_size=10), Shard(0, 2))
    down = of_rank["model.layers.0.mlp.down_proj.weight"]
    checkpoint = Checkpoint(
        tmp_path, {"rows": of_rank["lm_head.weight"], "columns": (*down[:-1], slice(2, 5))}
    )
    assert torch.equal(checkpoint.read("rows"), whole[:4])
    assert torch.equal(checkpoint.read("columns"), whole[:, 2:5])
    assert torch.equal(checkpoint.read("all"), whole)
