"""A target and real drafts over real gRPC: all tokens are identical to plain decoding."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tests.model_folders import model_folder
from tests.pairs import LONG_WAIT, QUICK, draft_of, target_of
from tests.processes import ProcessUnderTest
from tests.texts import read

from ssd.errors import FieldError
from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.codec import SpeculationChange
from ssd.testing.tiny_folder import write_tiny_folder
from ssd.types import Mode, SamplingParams, SpeculationStatistics, TokenId

SHAPE = ("--dtype", "float32", "--lookahead", "3", "--branches", "8", *QUICK)
BY_DEFAULT = ("--engine", "auto")
DRAFT_ALONE = ("--backup", "none")
"""Of a target: n-grams neither continue nor replace a branch, so each proposal is the draft's."""
TARGET = (*SHAPE, "--max-num-seqs", "4", "--deterministic")
MAX_LEN = 600
WARM = SamplingParams(temperature=0.7, seed=2**63 + 5, max_tokens=150, ignore_eos=True)
GAIN = 8.0
"""Makes attention so strong that a wrong key or value in a draft reduces hits."""
MAX_TRIES = 20
"""Maximum number of requests until one has hits. A busy draft opens sessions slowly."""
folder = model_folder(seed=1, attention_gain=GAIN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def twins(folder: Path) -> AsyncIterator[tuple[ProcessUnderTest, ProcessUnderTest]]:
    """A target and its draft, linked, for tests that end neither."""
    there = ("--pod-name", "demo-draft-0-x", "--node-name", "n1", "--cell", "0", *BY_DEFAULT)
    here = ("--pod-name", "demo-target-0-y", "--node-name", "n1", "--cell", "0")
    flags = (*TARGET, *LONG_WAIT, *DRAFT_ALONE, *here, *BY_DEFAULT)
    async with (
        draft_of(folder, *SHAPE, *there) as twin,
        target_of(folder, *flags, drafts=[twin]) as (process, _),
    ):
        yield process, twin


@pytest.fixture
async def client(twins: tuple[ProcessUnderTest, ProcessUnderTest]) -> AsyncIterator[TargetClient]:
    async with TargetClient(twins[0].grpc_address) as client:
        yield client


async def until_link(process: ProcessUnderTest, state: str) -> None:
    while (await process.until("link")).fields["state"] != state:
        pass


Answer = tuple[tuple[TokenId, ...], SpeculationStatistics]


async def generate(
    client: TargetClient,
    mode: Mode = Mode.SPECULATIVE,
    prompt: str = "some text",
    sampling: SamplingParams = WARM,
) -> Answer:
    found = await read(client, prompt, sampling, mode)
    return found.token_ids, found.statistics


async def generate_until_hits(
    client: TargetClient,
    plain: tuple[TokenId, ...],
    more_than: int = 0,
    mode: Mode = Mode.SPECULATIVE,
) -> None:
    """Generate until one answer has that many hits; each has the tokens of plain decoding."""
    for _ in range(MAX_TRIES):
        tokens, statistics = await generate(client, mode)
        assert tokens == plain
        if statistics.hits > more_than:
            return
    raise AssertionError(f"never more than {more_than} hits in {MAX_TRIES} requests")


async def test_a_draft_with_the_targets_weights_has_no_misses_and_no_rejections(
    client: TargetClient,
) -> None:
    plain, statistics = await generate(client, Mode.AUTOREGRESSIVE)
    assert statistics.hits == 0
    for _ in range(MAX_TRIES):
        tokens, statistics = await generate(client)
        assert tokens == plain
        assert (statistics.misses, statistics.late) == (0, 0)
        assert statistics.accepted_tokens == statistics.proposed_tokens
        if statistics.hits > 20:
            break
    assert statistics.hits > 20
    several = await asyncio.gather(*(generate(client, prompt=f"text {n}") for n in range(4)))
    alone = (generate(client, Mode.AUTOREGRESSIVE, f"text {n}") for n in range(4))
    for (tokens, _), (plain, _) in zip(several, await asyncio.gather(*alone), strict=True):
        assert tokens == plain


async def test_token_ids_without_an_embedding_are_refused(tmp_path: Path) -> None:
    """The tokenizer has 257 tokens and the embedding 250, as after adding tokens."""
    small = write_tiny_folder(tmp_path / "small", seed=1, vocab_size=250)
    async with (
        draft_of(small, *SHAPE) as draft_process,
        target_of(small, *TARGET, *LONG_WAIT, drafts=[draft_process]) as (_, client),
    ):
        assert (await client.model_info()).vocab_size == 250
        with pytest.raises(FieldError, match=r"ids\[1\]: is 250, must be in 0..249"):
            await anext(client.generate([1, 250], WARM))
        with pytest.raises(FieldError, match=r"token id 256, .* 0..249"):
            await anext(client.generate("a<|end|>b", WARM))
        plain, _ = await generate(client, Mode.AUTOREGRESSIVE)
        assert max(plain) < 250
        await generate_until_hits(client, plain, more_than=20)


async def test_target_and_draft_can_have_embeddings_of_different_sizes(
    folder: Path, tmp_path: Path
) -> None:
    padded = write_tiny_folder(tmp_path / "padded", seed=1, attention_gain=GAIN, vocab_size=272)
    async with (
        draft_of(folder, *SHAPE) as draft_process,
        target_of(padded, *TARGET, *LONG_WAIT, drafts=[draft_process]) as (_, client),
    ):
        plain, _ = await generate(client, Mode.AUTOREGRESSIVE)
        await generate_until_hits(client, plain, more_than=20)
        with pytest.raises(FieldError, match=r"is 257, must be in 0\.\.256"):
            await anext(client.generate([257], WARM))


async def test_a_target_and_a_draft_of_different_dtypes_generate_identical_tokens(
    folder: Path,
) -> None:
    async with (
        draft_of(folder, *SHAPE) as twin,
        target_of(folder, *TARGET, *LONG_WAIT, "--dtype", "bfloat16", drafts=[twin]) as (_, client),
        DraftClient(twin.grpc_address) as admin,
    ):
        found = (await client.model_info()).dtype, (await admin.get_status()).dtype
        assert found == ("bfloat16", "float32")
        plain, _ = await generate(client, Mode.AUTOREGRESSIVE)
        await generate_until_hits(client, plain)


async def test_sessions_of_a_drained_draft_move_and_it_ends_before_the_streams(
    tmp_path: Path,
) -> None:
    folder = write_tiny_folder(tmp_path / "pair", seed=1, max_len=MAX_LEN)
    flags = (*TARGET, *LONG_WAIT, "--max-model-len", str(MAX_LEN))
    long = replace(WARM, max_tokens=MAX_LEN - 100)
    async with AsyncExitStack() as stack:
        shape = (*SHAPE, "--max-model-len", str(MAX_LEN), "--drain-seconds", "60")
        pair = [await stack.enter_async_context(draft_of(folder, *shape)) for _ in range(2)]
        draining, remaining = pair
        _, client = await stack.enter_async_context(target_of(folder, *flags, drafts=pair))

        async def sessions() -> dict[str, int]:
            return {link.address: link.sessions for link in (await client.pool_status()).links}

        prompts = [f"text {n}" for n in range(4)]
        running_on = [
            asyncio.create_task(generate(client, Mode.SPECULATIVE, each, long)) for each in prompts
        ]
        async with asyncio.timeout(60):
            while 0 in (await sessions()).values():
                pass
        async with DraftClient(draining.grpc_address) as admin, asyncio.timeout(60):
            # The target counts a session before its opening has arrived.
            while not (await admin.get_status()).sessions:
                pass
            assert await admin.drain(60_000) > 0
        assert await draining.wait() == 0
        assert not any(each.done() for each in running_on), "the draft did not wait for the streams"
        async with asyncio.timeout(60):
            # A session opens again in the next round of its text.
            while (await sessions())[remaining.grpc_address] < 4:
                assert not any(each.done() for each in running_on), "a text ended without a session"
        answers = await asyncio.gather(*running_on)
        alone = [generate(client, Mode.AUTOREGRESSIVE, prompt, long) for prompt in prompts]
        for answer, (plain, _) in zip(answers, await asyncio.gather(*alone), strict=True):
            assert answer[0] == plain
            found = answer[1]
            # Rounds without a session occur before it opens, twice: on a busy machine, many.
            assert found.hits > 0.9 * (found.hits + found.misses + found.late)


async def test_both_ends_of_a_link_report_the_pod_of_the_other(
    twins: tuple[ProcessUnderTest, ProcessUnderTest], client: TargetClient
) -> None:
    (link,) = (await client.pool_status()).links
    assert (link.draft_pod, link.draft_node) == ("demo-draft-0-x", "n1")
    assert (await twins[1].until("link")).fields["target"] == "demo-target-0-y"


async def test_a_link_slower_than_allowed_is_refused_with_the_measured_round_trip(
    folder: Path,
) -> None:
    strict = (*TARGET, "--max-round-trip-us", "1", "--drafts")
    async with (
        draft_of(folder, *SHAPE, "--pod-name", "demo-draft-0-x") as draft_process,
        target_of(folder, *strict, draft_process.grpc_address) as (process, client),
    ):
        refusal = (await process.until("link")).fields
        assert refusal["state"] == "refused"
        assert re.match(
            r"link_too_slow: its round trip is \d+ us over tcp, at most 1 us are allowed: place",
            refusal["reason"],
        )
        (link,) = (await client.pool_status()).links
        assert (link.state, link.transport, link.draft_pod) == ("refused", "tcp", "demo-draft-0-x")
        assert link.reason.startswith("link_too_slow: ")
        assert link.round_trip_seconds > 1e-6
        _, statistics = await generate(client)
        assert statistics.mode is Mode.AUTOREGRESSIVE


async def test_the_mode_of_requests_in_mode_auto_changes_at_run_time(client: TargetClient) -> None:
    plain, statistics = await generate(client, Mode.AUTOREGRESSIVE)
    assert statistics.mode is Mode.AUTOREGRESSIVE
    try:
        await client.set_speculation(
            SpeculationChange(mode=Mode.SPECULATIVE, fan_out_policy="uniform", backup="none")
        )
        await generate_until_hits(client, plain, mode=Mode.AUTO)
        await client.set_speculation(SpeculationChange(mode=Mode.AUTOREGRESSIVE))
        tokens, statistics = await generate(client, Mode.AUTO)
        assert tokens == plain
        assert (statistics.hits, statistics.proposed_tokens) == (0, 0)
    finally:
        # Other tests use this target too.
        await client.set_speculation(
            SpeculationChange(mode=Mode.AUTO, fan_out_policy="adaptive", backup="none")
        )


async def test_a_draft_that_does_not_pay_is_turned_off_and_reported(folder: Path) -> None:
    # Each round with a session loses 100 ms: on any machine more than its tokens gain.
    waits = ("--no-adaptive-deadline", "--draft-deadline-ms", "100")
    flags = ("--backup", "none", "--no-circuit-breaker", *waits)
    async with (
        draft_of(folder, *SHAPE, "--inject-step-ms", "60") as slow,
        target_of(folder, *TARGET, *flags, drafts=[slow]) as (_, client),
    ):
        plain, statistics = await generate(client, Mode.AUTOREGRESSIVE)
        for _ in range(MAX_TRIES):
            tokens, statistics = await generate(client, Mode.AUTO)
            assert tokens == plain
            if statistics.paused_rounds == statistics.rounds:
                break
        assert statistics.paused_rounds == statistics.rounds
        status = await client.pool_status()
        assert (status.speculating, status.speculation_reason) == (False, "slower")
        assert 0.0 < status.speculation_speed_up < 1.0
