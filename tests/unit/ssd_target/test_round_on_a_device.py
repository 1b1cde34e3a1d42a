"""A round on a GPU mixes no devices, and waits for the device once: to read the tokens."""

import numpy as np
import pytest
import torch
from tests.fake_gpu import on_fake_gpu

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.engine.parallel.group import RankGroup
from ssd.engine.parallel.rank_loop import SplitTarget
from ssd.engine.parallel.shard import Shard
from ssd.engine.target_runner import TargetRunner
from ssd.testing.fake_device import FakeDevice, fake_device
from ssd.testing.sink import ListSink
from ssd.types import Request, SamplingParams
from ssd_target.decoding.batch_builder import BatchBuilder
from ssd_target.decoding.sampler import KeyedSampler
from ssd_target.decoding.sequence import Arrival, Sequence

ENGINE = EngineConfig(max_model_len=512, max_num_seqs=4, num_columns=7)


def sequences(count: int, temperature: float) -> list[Sequence]:
    sampling = SamplingParams(temperature=temperature, seed=2**64 - 1)
    request = Request(request_id="", prompt_ids=(1, 2, 3), sampling=sampling)
    arrivals = [
        Arrival(sequence_id=index, request=request, eos_token_ids=frozenset(), sink=ListSink())
        for index in range(count)
    ]
    return [Sequence(arrival=arrival, slot=slot) for slot, arrival in enumerate(arrivals)]


def check_round(
    device: FakeDevice, runner: TargetRunner, sampler: KeyedSampler, count: int, temperature: float
) -> None:
    """Run a round; assert that it reads nothing from the device but its tokens."""
    builder = BatchBuilder(runner.engine, runner.verify_columns)
    rows = sequences(count, temperature)
    for row in rows:
        builder.set_blocks(row.slot, [1, 2])
        sampler.admit(row)
    proposals = builder.proposals(rows, {0: (5, 6, 7)})
    logits_BPV = runner.verify(runner.prepare(builder.round(rows, proposals)))
    assert device.num_reads == 0
    chosen_BP = sampler.choose(rows, proposals, logits_BPV)
    assert device.num_reads == 1
    assert chosen_BP.shape == (count, ENGINE.num_columns)


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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("count", [1, 3])
def test_a_round_of_rank_0_reads_only_its_tokens_and_sends_two_messages(
    count: int, temperature: float
) -> None:
    with fake_device() as device:
        group = EqualRanks(4)
        runner = on_fake_gpu(TargetRunner, ENGINE, device, group)
        execution = runner.execution
        assert isinstance(execution, SplitTarget)
        sampler = KeyedSampler(runner.engine, runner.model.vocab_size, execution)
        check_round(device, runner, sampler, count, temperature)
        assert group.num_messages == 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("count", [1, 3])
def test_a_round_reads_only_its_tokens(count: int, temperature: float) -> None:
    with fake_device() as device:
        runner = on_fake_gpu(TargetRunner, ENGINE, device)
        check_round(
            device, runner, KeyedSampler(runner.engine, runner.model.vocab_size), count, temperature
        )


def test_a_prefill_that_is_not_finite_reads_the_device_once() -> None:
    with fake_device() as device:
        runner = on_fake_gpu(TargetRunner, ENGINE, device)
        zero_B = torch.zeros(1, dtype=torch.int64)
        tokens_1P = torch.zeros((1, ENGINE.prefill_chunk), dtype=torch.int64)
        # What is read of this device is 0, so no column is finite.
        assert runner.prefill(PagedBatch(tokens_1P, zero_B, zero_B + 9, zero_B[:, None])) == 0
        assert device.num_reads == 1


def test_a_prefill_reads_nothing_before_its_result() -> None:
    with fake_device() as device:
        runner = on_fake_gpu(TargetRunner, ENGINE, device)
        zero_B = torch.zeros(1, dtype=torch.int64)
        tokens_1P = torch.zeros((1, ENGINE.prefill_chunk), dtype=torch.int64)
        is_finite_R = runner.execution.prefill(
            PagedBatch(tokens_1P, zero_B, zero_B + 9, torch.from_numpy(np.array([[1, 2, 3]])))
        )
        assert device.num_reads == 0
        assert is_finite_R.shape == (ENGINE.prefill_chunk,)
