"""A model on several ranks has the logits and the tokens of one rank, in float32."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engines import paged
from tests.ranks import on_ranks

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.execution import load_execution
from ssd.engine.parallel.group import RankGroup
from ssd.engine.parallel.shard import ids_of
from ssd.engine.rank_loop import SplitTarget, follow
from ssd.engine.runner import load_runner
from ssd.engine.sampling.keyed import NoiseKeys, choose_of_keys, packed
from ssd.engine.target_runner import TargetRunner
from ssd.errors import RankError
from ssd.testing.tiny_folder import VOCAB_SIZE, write_tiny_folder, write_tiny_qwen3

P = 4
ENGINE = EngineConfig(
    max_model_len=64, max_num_seqs=3, num_columns=P, prefill_chunk=16, kv_cache_bytes=1 << 20
)
BLOCKS = torch.tensor([[1, 2], [3, 4]])
NUM_ROUNDS = 12


def report(stage: str, fraction: float) -> None:
    """Progress of a load."""


def keys_of(slots_R: NDArray[np.int64], positions_R: NDArray[np.int64]) -> torch.Tensor:
    """Keys of two sequences at temperatures 0 and .8."""
    seed_R, choice_R = np.full(len(slots_R), 7, np.uint64), np.zeros_like(slots_R)
    return packed(seed_R, choice_R, positions_R, np.array([0.0, 0.8], np.float32)[slots_R])


def texts(runner: TargetRunner, model: ModelConfig) -> list[list[int]]:
    """Tokens of two sequences at temperatures 0 and .8, from rounds of P and of 1 columns."""
    prompt = [int(number) for number in torch.arange(11) * 37 % VOCAB_SIZE]
    sequences = [list(prompt), list(reversed(prompt))]
    for tokens, blocks_J in zip(sequences, BLOCKS, strict=True):
        assert runner.prefill(paged([(tokens[:-1], 0, blocks_J)], 16)) is None
    if isinstance(runner.execution, SplitTarget):
        runner.execution.send_keys_of(keys_of)
    for index in range(NUM_ROUNDS):
        columns = P if index % 2 else 1
        if columns not in runner.verify_columns:
            columns = P
        tokens_BP = torch.zeros((2, columns), dtype=torch.int64)
        tokens_BP[:, 0] = torch.tensor([tokens[-1] for tokens in sequences])
        first_B = torch.tensor([len(tokens) - 1 for tokens in sequences])
        slots_B = torch.arange(2) if index % 3 else None  # with and without the keys of a choice
        logits_BPV = runner.verify(
            runner.prepare(PagedBatch(tokens_BP, first_B, first_B * 0 + 1, BLOCKS, slots_B))
        )
        position_R = (first_B[:, None] + 1 + torch.arange(columns)).flatten().numpy()
        keys_4R = keys_of(np.arange(2).repeat(columns), position_R)
        logits_RV, execution = logits_BPV.flatten(0, 1), runner.execution
        if isinstance(execution, SplitTarget):
            chosen_R = execution.choose(logits_RV, keys_4R, is_warm=True)
            all_RV = execution.gather(logits_RV, torch.arange(len(logits_RV)))
            of_all_R = choose_of_keys(all_RV, NoiseKeys.unpacked(keys_4R), is_warm=True)
            assert torch.equal(of_all_R, chosen_R)
        else:
            chosen_R = choose_of_keys(logits_RV, NoiseKeys.unpacked(keys_4R), is_warm=True)
        for tokens, token in zip(sequences, chosen_R.view(2, columns)[:, 0].tolist(), strict=True):
            tokens.append(token)
    return sequences


def run_rank(group: RankGroup, folder: Path, engine: EngineConfig) -> list[list[int]]:
    """Texts of rank 0; the other ranks follow."""
    model = ModelConfig.from_folder(folder)
    if group.shard.rank:
        part = load_execution(folder, model, engine, lambda _fraction: None, group)
        with contextlib.suppress(RankError):
            follow(part, group, engine, ids_of(model, group.shard))
        return []
    runner = load_runner(TargetRunner, folder, engine, report, group)
    runner.warm_up(report)
    return texts(runner, model)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_several_ranks_choose_the_tokens_of_one(tmp_path: Path, family: str, size: int) -> None:
    write = {"llama": write_tiny_folder, "qwen3": write_tiny_qwen3}[family]
    folder = write(tmp_path / "model", seed=3, attention_gain=8)
    alone = load_runner(TargetRunner, folder, ENGINE, report)
    alone.warm_up(report)
    model = ModelConfig.from_folder(folder)
    expected = texts(alone, model)
    found = on_ranks(size, lambda group: run_rank(group, folder, ENGINE))
    assert found[0] == expected


def test_choices_are_warmed_up_in_the_mode_of_rounds_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch compiles a function once for inference mode and once without it."""
    choices: list[tuple[bool, bool]] = []

    def note(_logits_RV: torch.Tensor, keys_4R: torch.Tensor, *, is_warm: bool) -> None:
        assert torch.is_inference_mode_enabled()
        of_keys = NoiseKeys.unpacked(keys_4R).temperatures_R > 0
        choices.append((is_warm, bool(of_keys.any())))

    monkeypatch.setattr(SplitTarget, "choose", staticmethod(note))
    target = SplitTarget.__new__(SplitTarget)
    target._newest_RV = torch.zeros(2, VOCAB_SIZE)
    target.warm_up_choice()
    assert choices == [(False, False), (True, True)], "rank 0 has the flag, the others the keys"
