"""The target chooses at the rows that verification reads."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.compiled_choices import compiled_choices
from tests.sequences import make_sequence

from ssd.engine.config import STATIC, EngineConfig
from ssd.speculation.verification import verify_coupled
from ssd.types import NO_TOKEN, Outcome, SamplingParams, TokenId
from ssd_target.decoding import sampler as sampler_module
from ssd_target.decoding.sampler import KeyedSampler, RingSampler
from ssd_target.decoding.sequence import Sequence
from ssd_target.step_thread import _sampler

K = 3
VOCAB = 11
ENGINE = EngineConfig(max_model_len=64, max_num_seqs=4, num_columns=K + 1)
NONE = [()] * 4


def sequences(temperatures: list[float]) -> list[Sequence]:
    return [
        make_sequence(
            (1,) * (index + 1),
            SamplingParams(temperature=temperature, seed=index),
            sequence_id=index,
            slot=len(temperatures) - 1 - index,
        )
        for index, temperature in enumerate(temperatures)
    ]


def logits(seed: int) -> torch.Tensor:
    return torch.randn((4, K + 1, VOCAB), generator=torch.Generator().manual_seed(seed))


def test_rows_after_the_first_other_token_are_not_chosen_and_the_outcome_is_the_same() -> None:
    rows, logits_BPV = sequences([0.0, 0.9, 0.0, 1.3]), logits(1)
    sampler = RingSampler(ENGINE, VOCAB)
    for row in rows:
        sampler.admit(row)
    whole = all_rows(sampler, rows, logits_BPV)
    assert sampler.choose(rows, NONE, logits_BPV) == [row[:1] for row in whole]
    proposals = [row[:K] for row in whole]
    proposals[1][1] = (proposals[1][1] + 1) % VOCAB
    proposals[2][0] = (proposals[2][0] + 1) % VOCAB
    del proposals[3][1:]
    chosen = sampler.choose(rows, list(map(tuple, proposals)), logits_BPV)
    for found, expected, count in zip(chosen, whole, [K + 1, 2, 1, 2], strict=True):
        assert found == expected[:count]
    outcomes = [verify_coupled(*each) for each in zip(proposals, chosen, strict=True)]
    assert outcomes == [Outcome(k, row[k]) for k, row in zip([K, 1, 0, 1], whole, strict=True)]


def test_a_slot_has_the_noise_of_its_newest_sequence() -> None:
    rows, logits_BPV = sequences([0.0] * 4), logits(3)
    sampler = RingSampler(ENGINE, VOCAB)
    for row in rows:
        sampler.admit(row)
    logits_BPV[1, 0, 5] = torch.nan
    logits_BPV[2, 0, 4] = torch.inf
    greedy = sampler.choose(rows, NONE, logits_BPV)
    assert greedy[1:3] == [[NO_TOKEN]] * 2
    assert greedy[3] == [logits_BPV[3, 0].argmax()]
    sampler.admit(sequences([2.0] * 4)[3])
    assert sampler.choose(rows, NONE, logits_BPV)[3] != greedy[3]
    sampler.release(rows[3])
    assert sampler.choose(rows, NONE, logits_BPV) == greedy


def test_the_device_chooses_the_same_tokens() -> None:
    rows, logits_BPV = sequences([0.0, 0.9, 0.0, 1.3]), logits(2)
    on_host, on_device = RingSampler(ENGINE, VOCAB), KeyedSampler(ENGINE, VOCAB)
    for row in rows:
        on_host.admit(row)
        on_device.admit(row)
    logits_BPV[3, 1] = torch.nan
    whole = all_rows(on_host, rows, logits_BPV)
    proposals = [tuple(row[:count]) for row, count in zip(whole, (K, K, 0, K), strict=True)]
    assert on_device.choose(rows, proposals, logits_BPV) == whole
    chosen = on_host.choose(rows, proposals, logits_BPV)
    assert [row == all_of[: len(row)] for row, all_of in zip(chosen, whole, strict=True)] == [
        True
    ] * 4
    on_device.release(rows[3])
    one_B = np.array([0])
    assert on_device.choose_at(one_B, one_B + 9, logits_BPV[3, :1], one_B).tolist() == [
        logits_BPV[3, 0].argmax()
    ]


@pytest.mark.timeout(120)
@torch.inference_mode()
def test_no_choice_of_target_or_draft_is_compiled_after_the_warm_up() -> None:
    """The embeddings have different padding, and one has no multiple of 4 of rows."""
    target: Any = SimpleNamespace(
        engine=replace(ENGINE, engine=STATIC),
        execution=None,
        model=SimpleNamespace(vocab_size=VOCAB + 1),
    )
    draft: Any = SimpleNamespace(model=SimpleNamespace(vocab_size=VOCAB))
    with compiled_choices(sampler_module) as compiler:
        sampler = _sampler(target, draft)
        warmed_up = compiler.num_graphs
        assert warmed_up > 0
        for temperature in (0.0, 1.0):
            for count in (1, 2):
                rows = sequences([temperature] * count)
                for row in rows:
                    sampler.admit(row)
                sampler.choose(rows, [()] * count, torch.zeros((count, K + 1, VOCAB + 1)))
                rows_B = np.arange(count)
                sampler.choose_at(rows_B, rows_B, torch.zeros((count, VOCAB)), rows_B)
        assert compiler.num_graphs == warmed_up


def all_rows(
    sampler: RingSampler, rows: list[Sequence], logits_BPV: torch.Tensor
) -> list[list[TokenId]]:
    """The choice at every row, one position at a time."""
    slots_B, rows_B = np.array([row.slot for row in rows]), np.arange(len(rows))
    sampler.fill(rows, [K] * len(rows))
    chosen = [
        sampler.choose_at(
            slots_B,
            np.array([len(row.tokens) + column for row in rows]),
            logits_BPV[:, column],
            rows_B,
        )
        for column in range(K + 1)
    ]
    found: list[list[TokenId]] = np.stack(chosen, axis=1).tolist()
    return found
