"""The target chooses at the rows that verification reads."""

import numpy as np
import torch

from ssd.engine.config import EngineConfig
from ssd.speculation.verification import verify_coupled
from ssd.testing.sink import ListSink
from ssd.types import NO_TOKEN, Request, SamplingParams
from ssd_target.decoding.batch_builder import Proposals
from ssd_target.decoding.sampler import Ints, KeyedSampler, RingSampler
from ssd_target.decoding.sequence import Arrival, Sequence

K = 3
VOCAB = 11


def sequences(temperatures: list[float]) -> list[Sequence]:
    return [
        Sequence(
            arrival=Arrival(
                sequence_id=index,
                request=Request(
                    request_id="",
                    prompt_ids=(1,) * (index + 1),
                    sampling=SamplingParams(temperature=temperature, seed=index),
                ),
                eos_token_ids=frozenset(),
                sink=ListSink(),
            ),
            slot=len(temperatures) - 1 - index,
        )
        for index, temperature in enumerate(temperatures)
    ]


def test_rows_after_the_first_other_token_are_not_chosen_and_the_outcome_is_the_same() -> None:
    rows = sequences([0.0, 0.9, 0.0, 1.3])
    sampler = RingSampler(EngineConfig(max_model_len=64, max_num_seqs=4, num_columns=K + 1), VOCAB)
    for row in rows:
        sampler.admit(row)
    logits_BPV = torch.randn((4, K + 1, VOCAB), generator=torch.Generator().manual_seed(1))
    whole_BP = all_rows(sampler, rows, logits_BPV)
    first_B1 = sampler.choose(rows, no_proposals(4), logits_BPV[:, :1])
    assert np.array_equal(whole_BP[:, :1], first_B1)
    proposed_BK = whole_BP[:, :K].copy()
    proposed_BK[1, 1] = (proposed_BK[1, 1] + 1) % VOCAB
    proposed_BK[2, 0] = (proposed_BK[2, 0] + 1) % VOCAB
    num_proposed_B = np.array([K, K, K, 1])
    proposals = Proposals(proposed_BK, num_proposed_B, ())
    chosen_BP = sampler.choose(rows, proposals, logits_BPV)
    num_chosen_B = [K + 1, 2, 1, 2]
    for index, count in enumerate(num_chosen_B):
        assert np.array_equal(chosen_BP[index, :count], whole_BP[index, :count])
        assert (chosen_BP[index, count:] == NO_TOKEN).all()
    outcomes = verify_coupled(proposed_BK, num_proposed_B, chosen_BP)
    assert [each.accepted for each in outcomes] == [K, 1, 0, 1]
    assert [each.bonus for each in outcomes] == whole_BP[np.arange(4), [K, 1, 0, 1]].tolist()


def test_the_device_chooses_the_same_tokens() -> None:
    rows = sequences([0.0, 0.9, 0.0, 1.3])
    engine = EngineConfig(max_model_len=64, max_num_seqs=4, num_columns=K + 1)
    on_host, on_device = RingSampler(engine, VOCAB), KeyedSampler(engine, VOCAB)
    for row in rows:
        on_host.admit(row)
        on_device.admit(row)
    logits_BPV = torch.randn((4, K + 1, VOCAB), generator=torch.Generator().manual_seed(2))
    logits_BPV[3, 1] = torch.nan
    whole_BP = all_rows(on_host, rows, logits_BPV)
    proposals = Proposals(whole_BP[:, :K], np.array([K, K, 0, K]), ())
    chosen_BP = on_device.choose(rows, proposals, logits_BPV)
    assert np.array_equal(chosen_BP[[0, 1, 3]], whole_BP[[0, 1, 3]])
    assert chosen_BP[2].tolist() == [whole_BP[2, 0], NO_TOKEN, NO_TOKEN, NO_TOKEN]
    on_device.release(rows[3])
    assert on_device.choose_at(np.array([0]), np.array([9]), logits_BPV[3, :1]).tolist() == [
        logits_BPV[3, 0].argmax()
    ]


def no_proposals(count: int) -> Proposals:
    nothing_BK = np.empty((count, 0), dtype=np.int64)
    return Proposals(nothing_BK, np.zeros(count, dtype=np.int64), ())


def all_rows(sampler: RingSampler, rows: list[Sequence], logits_BPV: torch.Tensor) -> Ints:
    """The choice at every row, one position at a time."""
    slots_B = np.array([row.slot for row in rows])
    sampler.fill(rows, np.full(len(rows), K))
    chosen = [
        sampler.choose_at(
            slots_B, np.array([len(row.tokens) + column for row in rows]), logits_BPV[:, column]
        )
        for column in range(K + 1)
    ]
    return np.stack(chosen, axis=1)
