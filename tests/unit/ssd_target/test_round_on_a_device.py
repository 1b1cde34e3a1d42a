"""A round on a GPU mixes no devices, and waits for the device once: to read the tokens."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.fake_gpu import MODEL, on_fake_gpu
from tests.sequences import make_sequence

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.engine.parallel.group import ALONE, RankGroup
from ssd.engine.parallel.shard import Shard
from ssd.engine.rank_loop import SplitTarget
from ssd.engine.target_runner import TargetRunner
from ssd.testing.fake_device import FakeDevice, fake_device
from ssd.text.grammar import Grammar, Words
from ssd.types import SamplingParams
from ssd_target.decoding.batch_builder import BatchBuilder
from ssd_target.decoding.sampler import KeyedSampler
from ssd_target.decoding.sequence import Sequence

ENGINE = EngineConfig(max_model_len=512, max_num_seqs=4, num_columns=7)


class AnyText:
    """A grammar that allows all tokens."""

    failure = None
    vocab_size = MODEL.vocab_size

    def allowed(self, _proposed: tuple[int, ...], _first: int, num_columns: int) -> Words:
        return np.full((num_columns, -(-self.vocab_size // 32)), -1, dtype=np.int32)


def sequences(count: int, temperature: float, **parameters: Any) -> list[Sequence]:
    sampling = SamplingParams(temperature=temperature, seed=2**64 - 1, **parameters)
    ends = frozenset({7})
    return [
        make_sequence((1, 2, 3), sampling, sequence_id=slot, slot=slot, eos_token_ids=ends)
        for slot in range(count)
    ]


def check_round(
    device: FakeDevice, runner: TargetRunner, sampler: KeyedSampler, rows: list[Sequence]
) -> int:
    """Run a round; return how often it reads the device, which is after the verify only."""
    builder = BatchBuilder(runner.engine, runner.verify_columns)
    for row in rows:
        builder.set_blocks(row.slot, [1, 2])
        sampler.admit(row)
    proposals = [(5, 6, 7), *[()] * (len(rows) - 1)]
    logits_BPV = runner.verify(runner.prepare(builder.round(rows, proposals)))
    assert device.num_reads == 0
    chosen = sampler.choose(rows, proposals, logits_BPV)
    assert list(map(len, chosen)) == [ENGINE.num_columns] * len(rows)
    return device.num_reads


class EqualRanks(RankGroup):
    """Rank 0 of a group whose other ranks have the same tensors."""

    def __init__(self, size: int) -> None:
        self.shard = Shard(0, size)
        self.num_messages = 0

    @property
    def deadline_seconds(self) -> float:
        return 5.0

    def gather(self, part_X: torch.Tensor) -> torch.Tensor:
        return part_X.expand(self.shard.size, *part_X.shape)

    def smallest(self, number: int) -> int:
        return number

    def send_step(self, step_W: torch.Tensor) -> None:
        assert step_W.device.type == "cpu", "ranks receive steps without their device"
        self.num_messages += 1


def split(device: FakeDevice, size: int) -> tuple[TargetRunner, KeyedSampler, EqualRanks | None]:
    """A target of some ranks, its sampler, and the group of more than one rank."""
    ranks = EqualRanks(size) if size > 1 else None
    runner = on_fake_gpu(TargetRunner, ENGINE, device, ranks or ALONE)
    assert isinstance(runner.execution, SplitTarget) is (ranks is not None)
    execution: Any = runner.execution if ranks else None
    return runner, KeyedSampler(runner.engine, runner.model.vocab_size, execution), ranks


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("count", [1, 3])
def test_a_round_reads_only_its_tokens_and_rank_0_sends_one_message(
    count: int, temperature: float, size: int
) -> None:
    with fake_device() as device:
        runner, sampler, ranks = split(device, size)
        assert check_round(device, runner, sampler, sequences(count, temperature)) == 1
        assert ranks is None or ranks.num_messages == 1


ALL_STEPS: Mapping[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.01,
    "logit_bias": ((5, 1.0), (9, -100.0)),
    "min_tokens": 4,
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize(("logprobs", "num_reads"), [(None, 1), (5, 2)])
def test_sampling_parameters_add_one_read_for_all_log_probabilities(
    logprobs: int | None, num_reads: int, size: int, *, has_grammar: bool
) -> None:
    with fake_device() as device:
        runner, sampler, ranks = split(device, size)
        rows = sequences(3, 0.7, logprobs=logprobs, **ALL_STEPS)
        rows[1] = sequences(2, 0.7)[1]
        if has_grammar:
            rows[2].grammar = cast("Grammar", AnyText())
        assert check_round(device, runner, sampler, rows) == num_reads
        if logprobs is not None:
            assert [len(sampler.logprobs(row)) for row in rows] == [4, 0, 1]
        assert ranks is None or ranks.num_messages == 2


def test_a_prefill_that_is_not_finite_reads_the_device_once() -> None:
    with fake_device() as device:
        runner = on_fake_gpu(TargetRunner, ENGINE, device)
        zero_B = torch.zeros(1, dtype=torch.int64)
        tokens_1P = torch.zeros((1, ENGINE.prefill_chunk), dtype=torch.int64)
        # What is read of this device is 0, so no column is finite.
        assert runner.prefill(PagedBatch(tokens_1P, zero_B, zero_B + 9, zero_B[:, None])) == 0
        assert device.num_reads == 1
