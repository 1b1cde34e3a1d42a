"""Sampling parameters select the tokens that the target alone selects, in each mode."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.sequences import make_sequence
from tests.unit.ssd_target.bench import Bench, own_draft
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ssd.engine.config import EngineConfig
from ssd.speculation.noise import gumbel_noise
from ssd.testing.ledger_runner import law
from ssd.testing.scripted_draft import Behaviour
from ssd.types import FinishReason, Mode, SamplingParams, TokenId
from ssd_target.decoding.sampler import KeyedSampler, RingSampler, Sampler
from ssd_target.decoding.sequence import Sequence

VOCAB = 13
EOS = 4
PROMPT = (1, 2, 3, 2)
LIMIT = 40
WARM = SamplingParams(temperature=0.9, seed=2**63 + 5)
COLD = SamplingParams(temperature=0.0)
BIAS = ((2, 1.5), (EOS, 2.0), (9, -100.0))
STEPS = {
    "top-k": replace(WARM, top_k=3),
    "top-p": replace(WARM, top_p=0.6),
    "min-p": replace(WARM, min_p=0.3),
    "repetition": replace(COLD, repetition_penalty=1.3),
    "presence": replace(COLD, presence_penalty=1.5),
    "frequency": replace(WARM, frequency_penalty=0.4),
    "bias": replace(COLD, logit_bias=BIAS),
    "min tokens": replace(WARM, logit_bias=((EOS, 5.0),), min_tokens=7),
    "logprobs": replace(WARM, logprobs=3),
    "all": replace(
        WARM,
        top_k=9,
        top_p=0.8,
        min_p=0.05,
        repetition_penalty=0.9,
        presence_penalty=0.3,
        frequency_penalty=-0.2,
        logit_bias=BIAS,
        min_tokens=5,
        logprobs=0,
    ),
}
steps = pytest.mark.parametrize("sampling", STEPS.values(), ids=STEPS.keys())


def reference(sampling: SamplingParams) -> list[TokenId]:
    """Plain decoding with the processors of transformers."""
    params, ids = sampling, list(PROMPT)
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    last = LogitsProcessorList()
    if params.logit_bias:
        last.append(SequenceBiasLogitsProcessor([[[i], bias] for i, bias in params.logit_bias]))
    if params.min_tokens:
        last.append(
            MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, EOS, device="cpu")
        )
    if params.temperature:
        last.append(TemperatureLogitsWarper(params.temperature))
        last += [TopKLogitsWarper(params.top_k)] if params.top_k else []
        last += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
        last += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    while len(ids) < len(PROMPT) + LIMIT and EOS not in ids[len(PROMPT) :]:
        ids_1S: Any = torch.tensor([ids])
        logits_1V = processors(ids_1S, law(ids_1S[0], VOCAB)[None])
        counts_V = torch.bincount(
            torch.tensor(ids[len(PROMPT) :], dtype=torch.int64), minlength=VOCAB
        )
        logits_1V = logits_1V - counts_V * params.frequency_penalty
        logits_1V = logits_1V - (counts_V > 0) * params.presence_penalty
        scores_1V = last(ids_1S, logits_1V)
        if params.temperature:
            noise_1V = gumbel_noise(params.seed or 0, [len(ids)], VOCAB)
            scores_1V = scores_1V + torch.from_numpy(noise_1V)
        ids.append(int(scores_1V.argmax()))
    return ids[len(PROMPT) :]


@steps
@pytest.mark.parametrize("mode", [Mode.AUTOREGRESSIVE, Mode.SPECULATIVE, Mode.SYNCHRONOUS])
def test_each_mode_selects_the_tokens_of_plain_decoding_with_transformers(
    sampling: SamplingParams, mode: Mode
) -> None:
    bench = Bench(deadline_ms=1000.0, own_draft=own_draft("perfect"))
    expected = reference(sampling)
    if mode is Mode.SPECULATIVE:
        script = [Behaviour.HIT, Behaviour.HALF, Behaviour.HIT, Behaviour.WRONG] * 10
        bench.join(script, text=(*PROMPT, *expected))
    found = bench.submit(PROMPT, LIMIT, sampling=sampling, mode=mode, eos=[EOS])
    other = bench.submit(PROMPT, LIMIT, sampling=replace(sampling, seed=3), mode=mode)
    bench.run()
    assert found.tokens == expected
    assert other.error is None
    if mode is not Mode.AUTOREGRESSIVE:
        assert found.statistics.accepted_tokens > 0, "no proposal was tested"


@steps
def test_every_row_of_a_device_is_the_row_of_plain_decoding(sampling: SamplingParams) -> None:
    engine = EngineConfig(max_model_len=64, max_num_seqs=4, num_columns=5)
    logits_BPV = torch.randn((3, 5, VOCAB), generator=torch.Generator().manual_seed(7)) * 2
    plain = SamplingParams(temperature=0.8, seed=4)
    for sampler in (RingSampler(engine, VOCAB), KeyedSampler(engine, VOCAB)):
        rows = [sequence(0, plain), sequence(1, sampling), sequence(2, replace(sampling, seed=9))]
        chosen = one_by_one(sampler, rows, logits_BPV)
        proposals = [tuple(row[:4]) for row in chosen]
        assert sampler.choose(rows, proposals, logits_BPV) == chosen
        if sampling.logprobs is not None:
            together = sampler.logprobs(rows[1])
            assert [each.selected.token_id for each in together] == chosen[1]
            expected_PV = logits_BPV[1].log_softmax(dim=1)
            for position, expected_V in zip(together, expected_PV, strict=True):
                assert position.selected.logprob == pytest.approx(
                    float(expected_V[position.selected.token_id]), abs=1e-5
                )
                assert [each.token_id for each in position.top] == expected_V.topk(
                    sampling.logprobs
                ).indices.tolist()


def test_a_device_selects_the_rows_of_different_requests_as_those_of_each_alone() -> None:
    samplings = [replace(sampling, seed=5) for sampling in STEPS.values()]
    num_rows = len(samplings)
    engine = EngineConfig(max_model_len=64, max_num_seqs=num_rows, num_columns=5)
    logits_BPV = torch.randn((num_rows, 5, VOCAB), generator=torch.Generator().manual_seed(2)) * 2
    alone = [
        one_by_one(RingSampler(engine, VOCAB), [sequence(0, sampling)], logits_1PV)
        for sampling, logits_1PV in zip(samplings, logits_BPV[:, None], strict=True)
    ]
    sampler = KeyedSampler(engine, VOCAB)
    rows = [sequence(slot, sampling) for slot, sampling in enumerate(samplings)]
    for row in rows:
        sampler.admit(row)
    proposals = [tuple(chosen[: 4 - slot % 5]) for slot, (chosen,) in enumerate(alone)]
    found = sampler.choose(rows, proposals, logits_BPV)
    for chosen, proposed, (expected,) in zip(found, proposals, alone, strict=True):
        assert chosen[: len(proposed) + 1] == expected[: len(proposed) + 1]


def sequence(slot: int, sampling: SamplingParams) -> Sequence:
    return make_sequence(
        PROMPT, sampling, sequence_id=slot, slot=slot, eos_token_ids=frozenset({EOS})
    )


def one_by_one(
    sampler: Sampler, rows: list[Sequence], logits_BPV: torch.Tensor
) -> list[list[TokenId]]:
    """The choice at every row, with a sequence that grows by one token a round."""
    for row in rows:
        sampler.admit(row)
    for column in range(logits_BPV.shape[1]):
        chosen = sampler.choose(rows, [()] * len(rows), logits_BPV[:, column, None])
        for row, (token,) in zip(rows, chosen, strict=True):
            row.tokens.append(token)
    found = [row.tokens[len(PROMPT) :] for row in rows]
    for row in rows:
        sampler.release(row)
        del row.tokens[len(PROMPT) :]
        sampler.admit(row)
    return found


def test_log_probabilities_belong_to_the_tokens_of_their_chunk() -> None:
    bench = Bench(deadline_ms=1000.0)
    sampling = replace(COLD, logprobs=2)
    bench.join([Behaviour.HIT] * 20)
    found = bench.submit(PROMPT, LIMIT, sampling=sampling, mode=Mode.SPECULATIVE, eos=[EOS])
    bench.run()
    positions = [position for chunk in found.chunks for position in chunk.logprobs]
    assert [each.selected.token_id for each in positions] == found.tokens
    assert all(each.selected == each.top[0] for each in positions), "greedy takes the best"
    assert max(len(chunk.token_ids) for chunk in found.chunks) > 1
    assert all(
        first.logprob >= second.logprob
        for each in positions
        for first, second in pairwise(each.top)
    )


def test_a_ban_of_the_end_lasts_for_min_tokens_also_inside_a_proposal() -> None:
    bench = Bench(own_draft=own_draft("other"))
    sampling = replace(COLD, logit_bias=((EOS, 100.0),), min_tokens=6)
    found = bench.submit(PROMPT, LIMIT, sampling=sampling, mode=Mode.SYNCHRONOUS, eos=[EOS])
    bench.run()
    assert found.finish_reason is FinishReason.STOP
    assert found.tokens.index(EOS) == 6
