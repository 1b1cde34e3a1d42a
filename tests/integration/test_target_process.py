"""A target process with a tiny model, over real gRPC."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tests.model_folders import model_folder
from tests.pairs import ANY_PORT, QUICK, target_of
from tests.processes import completed, running
from tests.texts import read, read_choices

from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.types import FinishReason, SamplingParams, Usage

SMALL = (
    *("--dtype", "float32", "--max-num-seqs", "4", "--prefill-chunk", "32", "--lookahead", "3"),
    *QUICK,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
of_one_target = pytest.mark.asyncio(loop_scope="module")
folder = model_folder(seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[TargetClient]:
    async with target_of(folder, *SMALL, "--max-model-len", "64") as (_, client):
        yield client


@of_one_target
async def test_an_unset_seed_is_drawn_and_unset_max_tokens_fit_the_model(
    client: TargetClient,
) -> None:
    call = GenerateCall(prompt="ab", sampling=SamplingParams(ignore_eos=True))
    text = await read(client, call)
    assert len(text.token_ids) == 62
    assert text.chunks[0].seed is not None
    again = SamplingParams(seed=text.chunks[0].seed, max_tokens=62, ignore_eos=True)
    assert (await read(client, "ab", again)).token_ids == text.token_ids


@of_one_target
async def test_continuations_of_one_prompt_are_streamed_together_each_with_noise_of_its_own(
    client: TargetClient,
) -> None:
    sampling = SamplingParams(ignore_eos=True, logprobs=2, top_p=0.95, seed=7, max_tokens=12)
    alone = await read(client, "abc", sampling)
    found = await read_choices(client, "abc", replace(sampling, n=3, echo=True))
    prompt_ids = await client.tokenize("abc")
    assert sorted(found) == [0, 1, 2]
    tokens = []
    for text in found.values():
        echo, *chunks = text.chunks
        assert (echo.token_ids, echo.text, echo.logprobs) == (prompt_ids, "abc", ())
        assert echo.seed == 7
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert chunks[-1].usage == Usage(prompt_tokens=3, completion_tokens=12)
        tokens.append(text.token_ids[len(prompt_ids) :])
        assert tuple(each.selected.token_id for each in text.logprobs) == tokens[-1]
        assert [len(each.top) for each in text.logprobs] == [2] * 12
        assert any(each.selected.text for each in text.logprobs)
    assert dict(zip(found, tokens, strict=True))[0] == alone.token_ids
    assert len(set(tokens)) == 3


@of_one_target
async def test_a_stop_string_ends_the_text_and_the_tokens(client: TargetClient) -> None:
    whole = await read(client, "abc", GREEDY)
    stop = whole.text[9:11]
    stopped = await read(client, "abc", replace(GREEDY, stop=(stop,)))
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.last.finish_reason is FinishReason.STOP
    assert whole.token_ids[: len(stopped.token_ids)] == stopped.token_ids
    assert stopped.last.usage is not None
    assert stopped.last.usage.completion_tokens == len(stopped.token_ids)


@pytest.mark.parametrize(
    ("flags", "error", "code"),
    [
        (("--device", "cuda:99"), "SettingsError", 78),
        (("--model", "/nowhere"), "ModelNotFoundError", 78),
    ],
)
async def test_a_process_that_cannot_start_reports_the_cause_in_one_line(
    folder: Path, tmp_path: Path, flags: tuple[str, ...], error: str, code: int
) -> None:
    log = tmp_path / "termination-log"
    flags = (*ANY_PORT, "--termination-log", str(log), *flags)
    async with running("ssd_target", "--model", str(folder), *flags) as process:
        failed = await process.until("failed")
        assert failed.fields["error"] == error
        assert await process.wait() == code
    assert log.read_text() == f"{error}: {failed.fields['message']}"


@pytest.mark.parametrize(
    ("module", "flags", "code"),
    [
        ("ssd_target", (), 0),
        ("ssd_target", ("--device", "cuda"), 0),
        ("ssd_target", ("--max-model-len", "100000"), 78),
        ("ssd_target", ("--attention", "nope"), 78),
        ("ssd_draft", (), 0),
        ("ssd_draft", ("--model", "/nowhere"), 78),
    ],
)
def test_print_config_does_not_load_the_model(
    folder: Path, module: str, flags: tuple[str, ...], code: int
) -> None:
    (weights := folder / "model.safetensors").rename(folder / "away")
    try:
        ended = completed(module, "--model", str(folder), *flags, "--print-config")
    finally:
        (folder / "away").rename(weights)
    assert ended.code == code
    if code == 0:
        assert json.loads(ended.stdout)["model"] == str(folder)
        assert ended.stderr == ""
    else:
        assert ended.stdout == ""
        assert json.loads(ended.stderr)["event"] == "failed"
