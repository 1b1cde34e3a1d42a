"""Speculation never changes a token, whatever the sampling parameters of a request are.

All requests of a test run at the same time, in AUTOREGRESSIVE mode, with draft processes, and with
a draft in the target's process. ``make test``: the defaults of all settings, among them OpenVINO.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from tests.exactness.cells import Size, pair
from tests.pairs import LONG_WAIT, draft_of, target_of
from tests.texts import Text, read_choices

from ssd.rpc.client import TargetClient
from ssd.types import FinishReason, Mode, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PATTERN = r"def [a-z_]{3,12}\((self|x)(, [a-z]{1,5}){0,2}\):"
WARM = SamplingParams(temperature=1.0, ignore_eos=True)
COLD = SamplingParams(temperature=0.0, ignore_eos=True)
CASES = {
    "top-k": replace(WARM, top_k=20),
    "top-p": replace(WARM, top_p=0.9),
    "min-p": replace(WARM, temperature=0.7, min_p=0.05),
    "filters": replace(WARM, top_k=40, top_p=0.8, min_p=0.02),
    "repetition": replace(COLD, repetition_penalty=1.2),
    "penalties": replace(WARM, presence_penalty=0.8, frequency_penalty=0.3),
    "repetitive": replace(COLD, presence_penalty=-1.0, frequency_penalty=-0.4),
    "bias": replace(COLD, logit_bias=((32, 3.0), (200, -100.0), (300, 2.0))),
    "end": replace(WARM, ignore_eos=False, min_tokens=20, logit_bias=((0, 4.0),)),
    "stop": replace(WARM, top_p=0.9, stop=("(self", "return", "\n\n")),
    "logprobs": replace(WARM, logprobs=3),
    "greedy logprobs": replace(COLD, logprobs=1),
    "n": replace(WARM, top_p=0.95, n=3),
    "schema": replace(WARM, json_schema=json.dumps(PERSON)),
    "greedy schema": replace(COLD, json_schema=json.dumps(PERSON)),
    "any object": replace(WARM, top_p=0.7, json_schema='{"type":"object"}'),
    "regex": replace(WARM, regex=PATTERN),
    "all": replace(
        WARM,
        top_k=100,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.1,
        logit_bias=((10, 1.0),),
        min_tokens=4,
        stop=("zz",),
        logprobs=0,
        json_schema=json.dumps(PERSON),
    ),
}
STRUCTURED = [name for name, each in CASES.items() if each.json_schema or each.regex]
MOST_WAVES = 20
"""Maximum number of times that texts with a structure run until a table hits in each."""


@dataclass(frozen=True, slots=True)
class Found(Text):
    """One continuation of one case."""

    case: str


async def run_case(
    client: TargetClient, name: str, prompt: str, mode: Mode, max_tokens: int
) -> list[Found]:
    sampling = replace(CASES[name], seed=len(prompt), max_tokens=max_tokens)
    texts = await read_choices(client, prompt, sampling, mode)
    return [Found(texts[choice].chunks, name) for choice in range(CASES[name].n)]


async def run_all(
    client: TargetClient, size: Size, mode: Mode, names: Sequence[str] = tuple(CASES)
) -> list[Found]:
    found = await asyncio.gather(
        *(
            run_case(client, name, prompt, mode, size.max_tokens)
            for name in names
            for prompt in size.prompts
        )
    )
    return [each for texts in found for each in texts]


async def check_accepted(client: TargetClient, size: Size, plain: list[Found]) -> None:
    """Assert that tables hit and tokens are accepted in each structure; compare all texts.

    A text with a structure is short, and can end before its first table arrives.
    """
    missing = set(STRUCTURED)
    for _ in range(MOST_WAVES):
        names = sorted(missing)
        expected = [each for name in names for each in plain if each.case == name]
        found = await run_all(client, size, Mode.SPECULATIVE, names)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        statistics = [(each.case, each.statistics) for each in found]
        missing -= {case for case, each in statistics if each.hits and each.accepted_tokens}
        if not missing:
            return
    raise AssertionError(f"no hit with an accepted token in {sorted(missing)}")


def check_structure(found: Found) -> None:
    """Assert that a text that ended by its structure has it."""
    sampling = CASES[found.case]
    is_stopped = found.last.finish_reason is FinishReason.STOP
    if not is_stopped or found.text.endswith(sampling.stop or "\0"):
        return
    if sampling.regex:
        assert re.fullmatch(sampling.regex, found.text), found
    if sampling.json_schema:
        value = json.loads(found.text)
        if found.case != "any object":
            assert set(value) == {"name", "age", "tags"}
            assert len(value["name"]) <= 12
            assert 0 <= value["age"] <= 150
            assert set(value["tags"]) <= {"red", "green", "blue"}


def check_same(found: list[Found], plain: list[Found]) -> None:
    """Assert that texts are those of plain decoding, with their structures and probabilities."""
    for expected, text in zip(plain, found, strict=True):
        assert text.token_ids == expected.token_ids, text
        assert text.last.finish_reason is expected.last.finish_reason
        for one, other in zip(text.logprobs, expected.logprobs, strict=True):
            assert one.selected.token_id == other.selected.token_id
            assert one.selected.logprob == pytest.approx(other.selected.logprob, abs=1e-4)
        check_structure(text)


@asynccontextmanager
async def default_pair(_size: Size) -> AsyncIterator[TargetClient]:
    """Run a target and its draft with the defaults of their settings; inside, they are linked.

    Only the deadlines differ: on a busy machine, all tables would be late.
    """
    flags = (*LONG_WAIT, "--draft-model", "demo://draft")
    async with (
        draft_of("demo://draft") as draft,
        target_of("demo://target", *flags, drafts=[draft]) as (_, client),
    ):
        yield client


@asynccontextmanager
async def set_pair(size: Size) -> AsyncIterator[TargetClient]:
    """Run a deterministic target and its draft with one engine."""
    flags = (*LONG_WAIT, "--draft-model", "demo://draft", "--deterministic")
    async with pair(size, target_flags=flags, draft_flags=("--no-adaptive-branches",)) as (it, _):
        yield it


ALL = [
    pytest.param(
        Size(6, 2, engine=engine, max_num_seqs=4, max_tokens=32),
        set_pair,
        marks=pytest.mark.slow,
        id=engine,
    )
    for engine in ("openvino", "torch", "static")
]


@pytest.mark.parametrize(
    ("size", "started"),
    [pytest.param(Size(6, 2, max_tokens=32), default_pair, id="defaults"), *ALL],
)
async def test_the_tokens_of_each_mode_are_the_same_for_all_sampling_parameters(
    size: Size, started: Callable[[Size], AbstractAsyncContextManager[TargetClient]]
) -> None:
    async with started(size) as client:
        plain = await run_all(client, size, Mode.AUTOREGRESSIVE)
        others = {
            mode: await run_all(client, size, mode) for mode in (Mode.SPECULATIVE, Mode.SYNCHRONOUS)
        }
        await check_accepted(client, size, plain)
    for mode, found in others.items():
        check_same(found, plain)
        accepted = {
            name: sum(each.statistics.accepted_tokens for each in found if each.case == name)
            for name in CASES
        }
        # ``check_accepted`` counts those of texts with a structure.
        counted = [
            accepted[name] for name in CASES if mode is Mode.SYNCHRONOUS or name not in STRUCTURED
        ]
        assert sum(count > 0 for count in counted) > 0.8 * len(counted), accepted
    ended = {each.case for each in plain if each.last.finish_reason is FinishReason.STOP}
    assert {"regex", "end", "stop"} <= ended
    assert {each.last.choice for each in plain} == {0, 1, 2}
