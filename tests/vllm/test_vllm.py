"""Real vLLM as the target of real drafts: its texts are those of vLLM without drafts, and ours."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import exp
from pathlib import Path
from typing import Any

import pytest
from tests.pki import Authority, put
from tests.vllm.runs import PATIENT, Draft, Job, Texts, our_texts, run
from tests.vllm.server import MODEL, serving

from ssd.text.tokenizer import load_tokenizer
from ssd_vllm.requests import seed_of

pytestmark = pytest.mark.vllm
NUM_TOKENS = 64
NUM_SAMPLES = 96
NUM_BINS = 8
SAMPLING_RULES = ("coupled", "stock")
NUM_FEW = 8
"""Texts of a test of links."""
KILL_SECONDS = 0.3
"""A batch takes a second."""
PROMPTS = tuple(f"def {name}(values):\n    " for name in ("mean", "median", "merge", "split"))
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "presence_penalty": 0.5},
)


@pytest.fixture
def draft() -> Iterator[Draft]:
    with Draft() as found:
        yield found


def jobs() -> list[Job]:
    encode = load_tokenizer(MODEL).encode
    return [
        {"prompt_ids": encode(prompt), "seed": seed, "max_tokens": NUM_TOKENS, **sampling}
        for seed, prompt in enumerate(PROMPTS)
        for sampling in SAMPLINGS
    ]


@pytest.fixture(scope="module")
def without_drafts() -> Texts:
    return run(jobs()).texts


def test_texts_with_drafts_are_those_without_and_those_of_our_target(
    draft: Draft, without_drafts: Texts
) -> None:
    found = run(jobs(), [draft.address], plugin=PATIENT)
    assert found.texts == without_drafts
    assert found.num_accepted > len(SAMPLINGS) * len(PROMPTS) * NUM_TOKENS // 4
    assert our_texts(jobs()) == without_drafts


def test_preempted_requests_keep_their_texts(draft: Draft, without_drafts: Texts) -> None:
    # Room for a text of the maximum length, and for 5 of the 8 that run.
    found = run(jobs(), [draft.address], block_size=32, num_gpu_blocks_override=17)
    assert found.counters["vllm:num_preemptions"] > 0
    assert found.num_accepted > 0
    assert found.texts == without_drafts


def test_a_draft_that_is_killed_costs_no_text(draft: Draft, without_drafts: Texts) -> None:
    killers: list[threading.Timer] = []

    def kill_in_the_next_batch() -> None:
        if not killers:
            killers.append(threading.Timer(KILL_SECONDS, draft.kill))
            killers[0].start()

    found = run(jobs(), [draft.address], batch=4, after_batch=kill_in_the_next_batch)
    killers[0].join()
    assert found.texts == without_drafts
    assert found.num_accepted > 0


def test_bugs_of_the_proposer_cost_no_text(draft: Draft, without_drafts: Texts) -> None:
    found = run(jobs(), [draft.address], plugin=PATIENT, calls_to_bug=10)
    assert found.counters["ssd_proposer_crashes_total"] > 3
    assert found.num_accepted > 0
    assert found.texts == without_drafts


def test_thinking_ends_within_its_budget_with_drafts_too(
    draft: Draft, without_drafts: Texts
) -> None:
    thinking = {"reasoning_start_str": " the", "reasoning_end_str": "return"}
    first, *others = jobs()[:NUM_FEW]
    few = [first, *(job | {"thinking_token_budget": 2} for job in others)]
    expected = run(few, reasoning_config=thinking).texts
    end = load_tokenizer(MODEL).encode("return")[0]
    assert max(text.count(end) for text in expected) > 1
    found = run(few, [draft.address], plugin=PATIENT, reasoning_config=thinking)
    assert found.num_accepted > 0
    assert found.texts == expected
    assert expected[0] == without_drafts[0]


def test_a_text_may_end_from_its_least_number_of_tokens_on(
    draft: Draft, without_drafts: Texts
) -> None:
    ending = [
        job | {"min_tokens": size, "stop_token_ids": [text[size]]}
        for size, (job, text) in enumerate(zip(jobs(), without_drafts, strict=True))
    ]
    expected = run(ending).texts
    found = run(ending, [draft.address], plugin=PATIENT)
    assert found.num_accepted > 0
    assert found.texts == expected


def test_of_two_ranks_one_has_the_links_and_both_have_its_proposals(
    draft: Draft, without_drafts: Texts
) -> None:
    *few, last = jobs()[:NUM_FEW]
    given = [*few, last | {"seed": None}]
    found = run(given, [draft.address], plugin=PATIENT, tensor_parallel_size=2)
    assert found.num_accepted > NUM_FEW * NUM_TOKENS // 4
    assert draft.most_links() == 1
    # Their sums differ from those of one rank in the last bits, which decides none of these tokens.
    seed = seed_of(str(len(few)), None)
    assert found.texts == without_drafts[: len(few)] + our_texts([last | {"seed": seed}])


def test_two_replicas_of_a_server_share_a_draft(draft: Draft, without_drafts: Texts) -> None:
    plugin: dict[str, Any] = {"drafts": [draft.address], **PATIENT}
    flags = ("--data-parallel-size", "2")
    with serving(None, *flags, cpus="0|1", **plugin) as server, ThreadPoolExecutor(8) as clients:

        def text(job: Job) -> list[int]:
            prompt_ids = job.pop("prompt_ids")
            (choice,) = server.complete({**job, "prompt": prompt_ids, "ignore_eos": True})
            return list(choice["token_ids"])

        assert list(clients.map(text, jobs())) == without_drafts
        accepted = server.metrics()["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted > 0
    assert draft.most_links() == 2


def test_a_draft_with_another_tokenizer_is_refused_and_costs_no_text(
    draft: Draft, tmp_path: Path, without_drafts: Texts
) -> None:
    for file in (MODEL.parent / "draft").iterdir():
        (tmp_path / file.name).symlink_to(file)
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = list(ids)[-2:]
    ids[first], ids[second] = ids[second], ids[first]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with Draft("--model", tmp_path) as stranger:
        drafts = [stranger.address, draft.address]
        found = run(jobs()[:NUM_FEW], drafts, plugin=PATIENT)
        assert (stranger.most_links(), draft.most_links()) == (0, 1)
    assert found.texts == without_drafts[:NUM_FEW]
    assert found.num_accepted > 0


def test_links_use_tls_with_certificates_of_both_sides_and_a_token(
    tmp_path: Path, without_drafts: Texts
) -> None:
    authority = Authority()
    of_draft = authority.files(tmp_path / "draft", "127.0.0.1")
    of_target = authority.files(tmp_path / "target", "target")
    files = {name: put(tmp_path / name, name * 4) for name in ("token-one", "token-two")}
    flags = (
        *("--tls-certificate", of_draft.certificate, "--tls-key", of_draft.key),
        *("--tls-client-ca", of_draft.ca, "--caller-names", "target", "--token-file"),
    )
    security = {
        "link_ca": of_target.ca,
        "link_token_file": files["token-one"],
        "tls_certificate": of_target.certificate,
        "tls_key": of_target.key,
    }
    with Draft(*flags, files["token-one"]) as draft, Draft(*flags, files["token-two"]) as other:
        drafts = [draft.address, other.address]
        found = run(jobs()[:NUM_FEW], drafts, plugin={**PATIENT, **security})
        assert (draft.most_links(), other.most_links()) == (1, 0)
    assert found.texts == without_drafts[:NUM_FEW]
    assert found.num_accepted > 0


Near = dict[int, float]
"""Log-probabilities of the two most probable tokens, and of the one that is there."""


@pytest.fixture(scope="module")
def samples() -> dict[str, list[tuple[list[int], list[Near]]]]:
    """Texts with drafts by kind of sampling, with the log-probabilities of the model."""
    prompt = load_tokenizer(MODEL).encode(PROMPTS[0])
    texts: dict[str, Texts] = {}
    with Draft() as draft:
        for sampling in SAMPLING_RULES:
            sampled = run(
                [
                    {
                        "prompt_ids": prompt,
                        # On CPUs, vLLM 0.32 cannot rewind the generators of its own rule.
                        "seed": seed if sampling == "coupled" else None,
                        "max_tokens": NUM_TOKENS,
                        "temperature": 1.0,
                        "top_k": 2,
                    }
                    for seed in range(NUM_SAMPLES)
                ],
                [draft.address],
                plugin={"sampling": sampling, **PATIENT},
            )
            assert sampled.num_accepted > NUM_SAMPLES * NUM_TOKENS // 10, "proposals take part"
            texts[sampling] = sampled.texts
    every = [text for some in texts.values() for text in some]
    whole = [{"prompt_ids": prompt + text, "max_tokens": 1, "prompt_logprobs": 2} for text in every]
    rows = iter(run(whole).logprobs)
    near = [[next(rows) for _ in prompt + text][len(prompt) :] for text in every]
    found = iter(zip(every, near, strict=True))
    return {sampling: [next(found) for _ in some] for sampling, some in texts.items()}


@pytest.mark.parametrize("sampling", SAMPLING_RULES)
def test_tokens_have_the_probabilities_of_the_model(
    samples: dict[str, list[tuple[list[int], list[Near]]]], sampling: str
) -> None:
    """Chi-square of the choices between the two most probable tokens, by their probability."""
    # The sum of the choices of a bin, less its mean, has independent increments of known variance.
    chosen, mean, variance = ([0.0] * NUM_BINS for _ in range(3))
    for text, rows in samples[sampling]:
        for token, near in zip(text, rows, strict=True):
            first_id, second_id = sorted(near, key=lambda each: -near[each])[:2]
            assert token in (first_id, second_id)
            share = 1 / (1 + exp(near[second_id] - near[first_id]))
            which = min(int((share - 0.5) * 2 * NUM_BINS), NUM_BINS - 1)
            chosen[which] += token == first_id
            mean[which] += share
            variance[which] += share * (1 - share)
    assert min(variance) > 5.0, "each bin has enough choices"
    squares = [(c - m) ** 2 / v for c, m, v in zip(chosen, mean, variance, strict=True)]
    # A correct sampler exceeds it once in 1,000 runs: chi-square with 8 degrees of freedom.
    assert sum(squares) < 26.1, (chosen, mean, variance)
