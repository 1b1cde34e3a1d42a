"""Hundreds of texts of real vLLM: the same with failing drafts, without drafts, and of our target.

Not part of ``make vllm``, but of ``make vllm-full``.
"""

import pytest
from tests.ports import free_port
from tests.vllm.runs import PATIENT, Draft, Job, failing_draft, our_texts, run
from tests.vllm.server import MODEL

from ssd.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3600)]
VERBS = (
    *("add", "clip", "count", "drop", "find", "join", "load", "mean", "merge", "norm", "parse"),
    *("rank", "read", "scale", "sort", "split", "store", "sum", "test", "trim", "walk"),
)
NOUNS = (
    *("bytes", "columns", "edges", "files", "items", "keys", "labels", "lines", "names", "nodes"),
    *("pairs", "paths", "points", "rows", "scores", "shapes", "spans", "steps", "tokens", "trees"),
    *("values", "vectors", "views", "words"),
)
NUM_GREEDY, NUM_WARM = 504, 208
NUM_TOKENS = 64


def jobs(count: int, temperature: float) -> list[Job]:
    """Requests with different prompts and seeds."""
    encode = load_tokenizer(MODEL).encode
    names = [f"{verb}_{noun}" for noun in NOUNS for verb in VERBS][:count]
    assert len(names) == count
    return [
        {
            "prompt_ids": encode(f"def {name}(values):\n    "),
            "seed": seed,
            "max_tokens": NUM_TOKENS,
            "temperature": temperature,
        }
        for seed, name in enumerate(names)
    ]


def test_greedy_texts_are_equal_while_a_draft_fails() -> None:
    wanted = jobs(NUM_GREEDY, 0.0)
    expected = run(wanted)
    port = free_port()
    with failing_draft(port) as done:
        found = run(wanted, [f"127.0.0.1:{port}"], plugin={"mode": "speculative"})
    assert found.texts == expected.texts
    assert len({tuple(text) for text in found.texts}) > NUM_GREEDY // 2
    # On a busy machine a draft starts for longer than it serves.
    assert found.num_accepted > NUM_GREEDY
    assert min(done.count("stall"), done.count("kill")) > 2


def test_warm_texts_are_those_without_drafts_and_those_of_our_target() -> None:
    wanted = jobs(NUM_WARM, 1.0)
    with Draft() as draft:
        found = run(wanted, [draft.address], plugin=PATIENT)
    assert found.num_accepted > NUM_WARM * NUM_TOKENS // 4
    assert found.texts == run(wanted).texts
    assert found.texts == our_texts(wanted)
