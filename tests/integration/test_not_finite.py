"""A token whose embedding is NaN fails the requests that contain it, and no other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.pairs import LONG_WAIT, QUICK, draft_of, target_of

from ssd.errors import NotFiniteError
from ssd.rpc.client import TargetClient
from ssd.testing.tiny_folder import VOCAB_SIZE, write_tiny_folder
from ssd.types import Mode, SamplingParams, SpeculationStatistics, TokenId

SHAPE = (
    *("--dtype", "float32", "--lookahead", "3", "--branches", "8", "--max-model-len", "256"),
    *("--prefill-chunk", "32", *QUICK),
)
MAX_TRIES = 20
PROMPTS = [[7, 8, 9], list(range(40)), [100] * 5]
Text = tuple[list[TokenId], SpeculationStatistics]


@asynccontextmanager
async def serving(folder: Path, draft: Path | None = None) -> AsyncIterator[TargetClient]:
    flags = (*SHAPE, "--max-num-seqs", "4", "--deterministic", *LONG_WAIT)
    async with AsyncExitStack() as stack:
        drafts = []
        if draft is not None:
            drafts.append(await stack.enter_async_context(draft_of(draft, *SHAPE)))
        started = target_of(folder, *flags, drafts=drafts)
        _, client = await stack.enter_async_context(started)
        yield client


async def generate(client: TargetClient, prompt: list[TokenId]) -> Text:
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True)
    # Mode AUTO would decode plainly where the drafts of a busy machine do not pay.
    generating = client.generate(prompt, sampling, Mode.SPECULATIVE)
    chunks = [chunk async for chunk in generating]
    statistics = chunks[-1].statistics
    assert statistics is not None
    return [token for chunk in chunks for token in chunk.token_ids], statistics


async def ask_all(client: TargetClient) -> list[list[TokenId]]:
    return [tokens for tokens, _ in await asyncio.gather(*(generate(client, p) for p in PROMPTS))]


async def test_a_token_with_a_nan_embedding_fails_only_its_request(tmp_path: Path) -> None:
    sound = write_tiny_folder(tmp_path / "sound", seed=1)
    async with serving(sound) as client:
        texts = await ask_all(client)
        used = {token for tokens in (*PROMPTS, *texts) for token in tokens}
        bad = max(set(range(VOCAB_SIZE - 1)) - used)
        poisoned_prompts = [[*range(35), bad, 1], [3, 4, bad]]
        plain = [(await generate(client, prompt))[0] for prompt in poisoned_prompts]
    broken = write_tiny_folder(tmp_path / "broken", seed=1, nan_token=bad)
    async with serving(broken, broken) as client:
        clean = asyncio.create_task(ask_all(client))
        for _ in range(3):
            for prompt in poisoned_prompts:
                place = f"position {prompt.index(bad)} .*token id {bad}"
                with pytest.raises(NotFiniteError, match=place):
                    await generate(client, prompt)
        assert await clean == texts
        assert await ask_all(client) == texts
    async with serving(sound, broken) as client:
        for prompt, expected in zip(poisoned_prompts, plain, strict=True):
            tokens, statistics = await generate(client, prompt)
            assert tokens == expected
            assert statistics.hits == 0
        # On a busy machine, a session can open after a short text has ended.
        hits = 0
        for _ in range(MAX_TRIES):
            tokens, statistics = await generate(client, PROMPTS[1])
            assert tokens == texts[1]
            hits += statistics.hits
            if hits:
                break
        assert hits > 0
