"""Data types: ``auto`` on each CPU, and targets and drafts with different types."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.processes import ProcessUnderTest, running

from ssd.rpc.client import DraftClient, TargetClient
from ssd.testing.tiny_folder import write_tiny_folder
from ssd.types import Mode, SamplingParams

SHAPE = ("--lookahead", "3", "--branches", "8", "--port", "0", "--http-port", "0")
LONG_WAIT = ("--draft-deadline-ms", "10000", "--no-adaptive-deadline", "--no-circuit-breaker")
MAX_TRIES = 20
PROMPTS = ["some text", "def fib(n):", "import os"]
WARM = SamplingParams(temperature=0.7, seed=11, max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("pair"), seed=1)


@asynccontextmanager
async def pair(
    folder: Path, target_flags: tuple[str, ...] = (), draft_flags: tuple[str, ...] = ()
) -> AsyncIterator[tuple[ProcessUnderTest, ProcessUnderTest]]:
    """A linked target and draft of the same model."""
    common = ("--model", str(folder), *SHAPE)
    async with running("ssd_draft", *common, *draft_flags) as draft:
        await draft.until("ready")
        addresses = ("--drafts", draft.grpc_address)
        async with running("ssd_target", *common, *addresses, *LONG_WAIT, *target_flags) as target:
            await target.until("ready")
            assert (await target.until("link")).fields["state"] == "active"
            yield target, draft


async def tokens_of(client: TargetClient, prompt: str, mode: Mode) -> tuple[list[int], int]:
    tokens: list[int] = []
    hits = 0
    async for chunk in client.generate(prompt, WARM, mode):
        tokens += chunk.token_ids
        hits += chunk.statistics.hits if chunk.statistics else 0
    return tokens, hits


async def assert_speculation_changes_no_token(client: TargetClient) -> None:
    calls = (tokens_of(client, each, Mode.AUTOREGRESSIVE) for each in PROMPTS)
    plain = await asyncio.gather(*calls)
    # On a busy machine, a session can open after a short text has ended.
    for _ in range(MAX_TRIES):
        calls = (tokens_of(client, each, Mode.SPECULATIVE) for each in PROMPTS)
        ahead = await asyncio.gather(*calls)
        assert [tokens for tokens, _ in ahead] == [tokens for tokens, _ in plain]
        if sum(hits for _, hits in ahead) > 0:
            return
    raise AssertionError(f"no hit in {MAX_TRIES} tries")


def events(process: ProcessUnderTest, name: str) -> list[dict[str, object]]:
    return [dict(event.fields) for event in process.events if event.name == name]


@pytest.mark.parametrize(
    ("of_target", "of_draft"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("auto", "auto"),
    ],
)
async def test_a_target_and_a_draft_of_different_dtypes_generate_identical_tokens(
    folder: Path, of_target: str, of_draft: str
) -> None:
    of_drafts = ("--dtype", of_draft, "--weights", "same")
    async with (
        pair(folder, ("--dtype", of_target), of_drafts) as (target, draft),
        TargetClient(target.grpc_address) as client,
        DraftClient(draft.grpc_address) as draft_process,
    ):
        found = (await client.model_info()).dtype, (await draft_process.get_status()).dtype
        if of_target != "auto":
            assert found == (of_target, of_draft)
        await assert_speculation_changes_no_token(client)
