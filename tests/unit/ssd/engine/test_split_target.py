"""A model on several ranks has the logits and the tokens of one rank, in float32."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engines import paged
from tests.ranks import on_ranks

from ssd.engine import rank_loop
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
Result = TypeVar("Result")


def report(stage: str, fraction: float) -> None:
    """Progress of a load."""


def keys_of(slots_R: NDArray[np.int64], positions_R: NDArray[np.int64]) -> torch.Tensor:
    """Keys of two sequences at temperatures 0 and .8."""
    seed_R = np.uint64(2**64 - 7) + slots_R.astype(np.uint64)
    return packed(seed_R, slots_R + 3, positions_R, np.array([0.0, 0.8], np.float32)[slots_R])


def texts(runner: TargetRunner) -> list[list[int]]:
    """Tokens of two sequences at temperatures 0 and .8, one from each round."""
    runner.warm_up(report)
    prompt = [int(number) for number in torch.arange(11) * 37 % VOCAB_SIZE]
    sequences = [prompt, prompt[:3:-1]]
    for tokens, blocks_J in zip(sequences, BLOCKS, strict=True):
        assert runner.prefill(paged([(tokens[:-1], 0, blocks_J)], 16)) is None
    if isinstance(runner.execution, SplitTarget):
        runner.execution.send_keys_of(keys_of)
    for _ in range(NUM_ROUNDS):
        tokens_BP = torch.zeros((2, P), dtype=torch.int64)
        tokens_BP[:, 0] = torch.tensor([tokens[-1] for tokens in sequences])
        first_B = torch.tensor([len(tokens) - 1 for tokens in sequences])
        logits_BPV = runner.verify(
            runner.prepare(PagedBatch(tokens_BP, first_B, first_B * 0 + 1, BLOCKS, torch.arange(2)))
        )
        position_R = (first_B[:, None] + 1 + torch.arange(P)).flatten().numpy()
        keys_4R = keys_of(np.arange(2).repeat(P), position_R)
        logits_RV, execution = logits_BPV.flatten(0, 1), runner.execution
        if isinstance(execution, SplitTarget):
            chosen_R = execution.choose(logits_RV, keys_4R, is_warm=True)
            all_RV = execution.gather(logits_RV, torch.arange(len(logits_RV)))
            of_all_R = choose_of_keys(all_RV, NoiseKeys.unpacked(keys_4R), is_warm=True)
            assert torch.equal(of_all_R, chosen_R)
        else:
            chosen_R = choose_of_keys(logits_RV, NoiseKeys.unpacked(keys_4R), is_warm=True)
        for tokens, token in zip(sequences, chosen_R.view(2, P)[:, 0].tolist(), strict=True):
            tokens.append(token)
    return sequences


def run_rank(
    group: RankGroup, folder: Path, run: Callable[[TargetRunner], Result]
) -> Result | None:
    """Result of rank 0; the other ranks follow."""
    model = ModelConfig.from_folder(folder)
    if group.shard.rank:
        part = load_execution(folder, model, ENGINE, lambda _fraction: None, group)
        with contextlib.suppress(RankError):
            follow(part, group, ENGINE, ids_of(model, group.shard))
        return None
    return run(load_runner(TargetRunner, folder, ENGINE, report, group))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_several_ranks_choose_the_tokens_of_one(tmp_path: Path, family: str, size: int) -> None:
    write = {"llama": write_tiny_folder, "qwen3": write_tiny_qwen3}[family]
    folder = write(tmp_path / "model", seed=3, attention_gain=8)
    expected = texts(load_runner(TargetRunner, folder, ENGINE, report))
    found = on_ranks(size, lambda group: run_rank(group, folder, texts))
    assert found[0] == expected


def test_choices_are_warmed_up_in_the_mode_of_rounds_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch compiles a function once for inference mode and once without it."""
    choices: list[tuple[bool, int]] = []

    def noted(_device: str, best_of_keys: Callable[..., Any]) -> Callable[..., Any]:
        def best(logits_RV: torch.Tensor, keys: NoiseKeys, *, is_warm: bool, **ids: int) -> Any:
            assert torch.is_inference_mode_enabled()
            choices.append((is_warm, len(logits_RV)))
            return best_of_keys(logits_RV, keys, is_warm=is_warm, **ids)

        return best

    def warm_up_choice(runner: TargetRunner) -> None:
        assert isinstance(runner.execution, SplitTarget)
        runner.execution.warm_up_choice()

    monkeypatch.setattr(rank_loop, "compiled_on", noted)
    folder = write_tiny_folder(tmp_path / "model")
    on_ranks(2, lambda group: run_rank(group, folder, warm_up_choice))
    assert sorted(choices) == [(False, P)] * 2 + [(True, P)] * 2
