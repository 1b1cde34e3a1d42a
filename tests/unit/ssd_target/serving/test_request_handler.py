"""Validation of requests and of their room in the queue."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import pytest
from opentelemetry.trace import NoOpTracer
from prometheus_client import REGISTRY
from tests.unit.ssd_target.serving.watched_tokenizer import WatchedTokenizer

from ssd.engine.target_runner import TargetRunner
from ssd.errors import (
    ContextLengthError,
    FieldError,
    NotReadyError,
    OverloadedError,
    PromptSizeError,
    RankError,
)
from ssd.rpc.codec import Conversation, GenerateCall, Prompt
from ssd.testing.clock import FakeClock
from ssd.text.chat_template import ChatTemplate
from ssd.types import (
    ChatTurn,
    FinishReason,
    GenerationChunk,
    Mode,
    PositionLogprobs,
    SamplingParams,
    TokenId,
    TokenLogprob,
)
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.scheduler import prompt_keys
from ssd_target.decoding.sequence import Sequence
from ssd_target.serving import request_handler
from ssd_target.serving.request_handler import RequestHandler
from ssd_target.serving.request_trace import RequestTrace
from ssd_target.serving.streams import TokenStream, Wakeups
from ssd_target.settings import TargetSettings

MAX_MODEL_LEN = 64
BLOCK_SIZE = 16
NUM_TOKEN_IDS = 120
"""Fewer than the tokenizer has."""
TEMPLATE = ChatTemplate("{{ 'x' * 60 }}{% for each in messages %}{{ each.content }}{% endfor %}")
LONG = "a" * 2_000


@pytest.fixture
def tokenizer() -> WatchedTokenizer:
    return WatchedTokenizer()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
async def handler(tokenizer: WatchedTokenizer, inbox: Inbox) -> RequestHandler:
    settings = TargetSettings(stream_buffer_tokens=100, max_queue=2, max_num_seqs=1)
    wakeups = Wakeups(asyncio.get_running_loop())
    handler = RequestHandler(settings, tokenizer, TEMPLATE, inbox, wakeups, FakeClock())
    runner = SimpleNamespace(
        engine=SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, num_token_ids=NUM_TOKEN_IDS, block_size=BLOCK_SIZE
        )
    )
    handler.open(cast(TargetRunner, runner))
    return handler


@pytest.mark.parametrize(
    ("draft_model", "drafts", "requested", "mode"),
    [
        ("demo://draft", (), Mode.AUTO, Mode.SYNCHRONOUS),
        ("demo://draft", ("127.0.0.1:1",), Mode.AUTO, Mode.AUTO),
        ("demo://draft", (), Mode.AUTOREGRESSIVE, Mode.AUTOREGRESSIVE),
        ("demo://draft", ("127.0.0.1:1",), Mode.SYNCHRONOUS, Mode.SYNCHRONOUS),
        ("", (), Mode.AUTO, Mode.AUTO),
    ],
)
async def test_auto_uses_the_draft_of_the_target_only_without_other_drafts(
    draft_model: str, drafts: tuple[str, ...], requested: Mode, mode: Mode, inbox: Inbox
) -> None:
    settings = TargetSettings(draft_model=draft_model, drafts=drafts)
    wakeups = Wakeups(asyncio.get_running_loop())
    handler = RequestHandler(settings, WatchedTokenizer(), TEMPLATE, inbox, wakeups, FakeClock())
    assert handler._mode(requested) is mode


async def test_mode_synchronous_needs_a_draft_model(handler: RequestHandler) -> None:
    with pytest.raises(FieldError, match="draft_model"):
        handler._mode(Mode.SYNCHRONOUS)


def untraced() -> RequestTrace:
    return RequestTrace(NoOpTracer(), FakeClock(), {})


async def generate(
    handler: RequestHandler,
    prompt: Prompt,
    sampling: SamplingParams | None = None,
    mode: Mode = Mode.AUTO,
) -> None:
    sampling = replace(sampling or SamplingParams(), max_tokens=4)
    call = GenerateCall(prompt=prompt, sampling=sampling, mode=mode)
    async for _ in handler.generate(call, "r", untraced()):
        pass


@pytest.mark.parametrize(
    ("asked", "found"), [(Mode.AUTO, Mode.SPECULATIVE), (Mode.AUTOREGRESSIVE, Mode.AUTOREGRESSIVE)]
)
async def test_the_mode_of_the_target_applies_to_requests_in_mode_auto(
    handler: RequestHandler, inbox: Inbox, asked: Mode, found: Mode
) -> None:
    handler.set_auto_mode(Mode.SPECULATIVE)
    reading, arrival = await submit(handler, inbox, asked)
    assert arrival.mode is found
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_ids_of_a_prompt_are_checked(handler: RequestHandler) -> None:
    with pytest.raises(FieldError) as caught:
        await generate(handler, (1, 257, 3))
    assert caught.value.field == "token_ids.ids[1]"


async def test_a_prompt_contains_only_ids_that_the_model_has(handler: RequestHandler) -> None:
    with pytest.raises(FieldError, match=r"\[1\]: is 120, must be in 0..119"):
        await generate(handler, (119, 120, 3))
    with pytest.raises(FieldError, match=r"token id 121, .* 0..119") as caught:
        await generate(handler, "x y")
    assert caught.value.field == "input"


async def test_ids_of_a_prompt_that_is_too_long_are_not_checked(handler: RequestHandler) -> None:
    with pytest.raises(ContextLengthError):
        await generate(handler, (1, 257, *[3] * MAX_MODEL_LEN))


async def test_a_full_queue_refuses_a_request_before_its_text_is_tokenized(
    handler: RequestHandler, tokenizer: WatchedTokenizer, inbox: Inbox
) -> None:
    inbox.num_waiting = inbox.num_new = 2
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        await generate(handler, "abc")
    assert tokenizer.threads == []
    inbox.num_new = 0  # both wait after a preemption
    await begin(handler, inbox)


async def test_a_request_has_its_place_in_the_queue_until_it_is_submitted(
    handler: RequestHandler, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = asyncio.Event()

    async def grammar(_sampling: SamplingParams) -> None:
        await compiled.wait()

    monkeypatch.setattr(handler, "_grammar", grammar)
    with_grammars = [asyncio.create_task(generate(handler, (1,))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="max_queue"):
        await generate(handler, (1,))
    compiled.set()
    await asyncio.sleep(0)
    assert inbox.num_arrivals == 3
    with pytest.raises(OverloadedError, match="max_queue"):
        await generate(handler, (1,))
    for each in with_grammars:
        each.cancel()
    await asyncio.gather(*with_grammars, return_exceptions=True)


async def test_more_continuations_than_ever_have_room_are_a_field_error(
    handler: RequestHandler,
) -> None:
    with pytest.raises(FieldError, match=r"is 4, must be in 1\.\.3") as caught:
        await generate(handler, "abc", SamplingParams(n=4))
    assert caught.value.field == "sampling.n"


async def test_requests_whose_text_is_being_tokenized_count_as_waiting(
    handler: RequestHandler, tokenizer: WatchedTokenizer
) -> None:
    tokenizer.may_go_on.clear()
    reading = [asyncio.create_task(generate(handler, LONG)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await generate(handler, "abc")
    tokenizer.may_go_on.set()
    results = await asyncio.gather(*reading, return_exceptions=True)
    assert {type(each) for each in results} == {ContextLengthError}
    with pytest.raises(ContextLengthError):
        await generate(handler, LONG)


async def test_a_conversation_begins_with_what_its_template_writes(
    handler: RequestHandler, tokenizer: WatchedTokenizer
) -> None:
    conversation = Conversation((ChatTurn("user", "1"),))
    for prompt in (conversation, "y"):
        ids, _ = await handler._prompt(GenerateCall(prompt=prompt, sampling=SamplingParams()))
        assert ids
    assert tokenizer.with_prefix == [True, False]


async def test_the_length_of_a_conversation_is_that_of_its_rendered_text(
    handler: RequestHandler, tokenizer: WatchedTokenizer
) -> None:
    with pytest.raises(
        PromptSizeError, match="has 65 bytes, and no text of max_model_len, 64 tokens, has over"
    ) as caught:
        await generate(handler, Conversation((ChatTurn("user", "12345"),)))
    assert caught.value.field == "chat"
    assert tokenizer.threads == []


async def submit(
    handler: RequestHandler, inbox: Inbox, mode: Mode = Mode.AUTO
) -> tuple[asyncio.Task[None], Sequence]:
    reading = asyncio.create_task(generate(handler, "abc", mode=mode))
    await asyncio.sleep(0)
    (arrival,) = (each for each in inbox.drain() if isinstance(each, Sequence))
    return reading, arrival


async def begin(handler: RequestHandler, inbox: Inbox) -> tuple[asyncio.Task[None], TokenStream]:
    reading, arrival = await submit(handler, inbox)
    return reading, cast(TokenStream, arrival.sink)


@pytest.mark.parametrize(("count", "has_keys"), [(999, False), (1000, True)])
async def test_the_continuations_of_a_long_prompt_arrive_with_one_list_of_its_keys(
    handler: RequestHandler,
    inbox: Inbox,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    *,
    has_keys: bool,
) -> None:
    threads: list[threading.Thread] = []

    def watched_keys(prompt_ids: tuple[TokenId, ...], block_size: int) -> list[bytes]:
        threads.append(threading.current_thread())
        return prompt_keys(prompt_ids, block_size)

    monkeypatch.setattr(request_handler, "prompt_keys", watched_keys)
    assert handler.runner is not None
    handler.runner.engine.max_model_len = 2000  # type: ignore[misc]
    prompt = tuple(range(100)) * 10
    reading = asyncio.create_task(generate(handler, prompt[:count], SamplingParams(n=2)))
    await asyncio.to_thread(inbox.wait, 5.0)
    first, second = (each for each in inbox.drain() if isinstance(each, Sequence))
    assert first.keys == (prompt_keys(prompt, BLOCK_SIZE) if has_keys else [])
    assert second.keys is first.keys
    assert len(threads) == has_keys
    assert threading.current_thread() not in threads
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_a_drawn_seed_is_an_exact_number_of_json(
    handler: RequestHandler, inbox: Inbox
) -> None:
    submitted = [await submit(handler, inbox) for _ in range(2)]
    seeds = [arrival.seed for _, arrival in submitted]
    assert all(int(float(seed)) == seed < 2**53 for seed in seeds)
    assert len(set(seeds)) == 2
    for reading, _ in submitted:
        reading.cancel()
    await asyncio.gather(*(reading for reading, _ in submitted), return_exceptions=True)


async def test_requests_of_a_target_that_fails_end_with_the_cause_and_others_are_refused(
    handler: RequestHandler, inbox: Inbox
) -> None:
    running = [await begin(handler, inbox) for _ in range(2)]
    handler.fail(RankError("rank 1 was killed by signal 9 (SIGKILL)"))
    ended = await asyncio.gather(*(each for each, _ in running), return_exceptions=True)
    with pytest.raises(NotReadyError) as refused:
        await generate(handler, "abc")
    for error in (*ended, refused.value):
        assert isinstance(error, NotReadyError)
        assert "the target ends: rank 1 was killed by signal 9" in str(error)
    assert handler.num_requests == 0


async def test_a_request_whose_step_thread_has_lost_a_rank_waits_for_its_name(
    handler: RequestHandler, inbox: Inbox
) -> None:
    reading, stream = await begin(handler, inbox)
    stream.end(RankError("rank 0 has lost another rank: Connection closed by peer"))
    await asyncio.sleep(0)
    assert not reading.done()
    handler.fail(RankError("rank 3 does not answer the other ranks"))
    with pytest.raises(NotReadyError, match="rank 3 does not answer"):
        await reading


async def test_a_request_whose_lost_rank_stays_unknown_ends_nevertheless(
    handler: RequestHandler, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_handler, "CAUSE_SECONDS", 0.01)
    reading, stream = await begin(handler, inbox)
    stream.end(RankError("rank 0 has lost another rank"))
    with pytest.raises(NotReadyError, match="rank 0 has lost another rank"):
        await reading


async def test_a_request_without_tokens_has_no_time_to_first_token(
    handler: RequestHandler, inbox: Inbox
) -> None:
    names = ("ssd_time_to_first_token_seconds_count", "ssd_e2e_seconds_count")

    def counts() -> list[float]:
        return [REGISTRY.get_sample_value(name) or 0.0 for name in names]

    async def finish(*token_ids: TokenId, reason: FinishReason) -> list[float]:
        before = counts()
        reading, stream = await begin(handler, inbox)
        stream.put(GenerationChunk(token_ids=token_ids, finish_reason=reason))
        stream.wake()
        await reading
        return [now - then for now, then in zip(counts(), before, strict=True)]

    assert await finish(reason=FinishReason.CANCELLED) == [0, 0]
    assert await finish(97, reason=FinishReason.CANCELLED) == [1, 0]
    assert await finish(97, reason=FinishReason.LENGTH) == [1, 1]


async def begin_echo(
    handler: RequestHandler, inbox: Inbox
) -> tuple[AsyncGenerator[GenerationChunk], asyncio.Task[GenerationChunk], TokenStream]:
    call = GenerateCall(prompt="abc", sampling=SamplingParams(max_tokens=1, echo=True))
    chunks = handler.generate(call, "r", untraced())
    reading = asyncio.create_task(anext(chunks))
    await asyncio.sleep(0)
    (sequence,) = (each for each in inbox.drain() if isinstance(each, Sequence))
    return chunks, reading, cast(TokenStream, sequence.sink)


async def test_a_request_that_is_refused_in_the_queue_echoes_nothing(
    handler: RequestHandler, inbox: Inbox
) -> None:
    chunks, reading, stream = await begin_echo(handler, inbox)
    stream.fail(OverloadedError("the queue is full"))
    stream.wake()
    with pytest.raises(OverloadedError):
        await reading
    await chunks.aclose()


async def test_the_echo_of_a_prompt_comes_before_its_first_token(
    handler: RequestHandler, inbox: Inbox
) -> None:
    chunks, reading, stream = await begin_echo(handler, inbox)
    stream.put(GenerationChunk(token_ids=(97,), finish_reason=FinishReason.LENGTH))
    stream.wake()
    echo, token = await reading, await anext(chunks)
    assert (echo.text, echo.prompt_tokens, token.text, token.prompt_tokens) == ("abc", 3, "a", 0)
    await chunks.aclose()


@pytest.mark.parametrize(
    ("stop", "text", "reasons"),
    [
        (".", "a", (FinishReason.STOP, FinishReason.STOP)),
        ("!", "a.\ufffd", (FinishReason.LENGTH, FinishReason.LENGTH)),
        # Only the end of the text makes the incomplete character U+FFFD.
        ("\ufffd", "a.", (FinishReason.LENGTH, FinishReason.STOP)),
    ],
)
async def test_a_stop_string_in_a_token_that_begins_a_character_ends_a_text_at_its_limit(
    handler: RequestHandler,
    inbox: Inbox,
    monkeypatch: pytest.MonkeyPatch,
    stop: str,
    text: str,
    reasons: tuple[FinishReason, FinishReason],
) -> None:
    def token_bytes(token_id: TokenId) -> bytes:
        return b".\xe2" if token_id == 200 else bytes([token_id])

    monkeypatch.setattr(handler.tokenizer, "token_bytes", token_bytes)
    call = GenerateCall(prompt=(97,), sampling=SamplingParams(max_tokens=2, stop=(stop,)))
    chunks = handler.generate(call, "r", untraced())
    reading = asyncio.create_task(anext(chunks))
    await asyncio.sleep(0)
    (sequence,) = (each for each in inbox.drain() if isinstance(each, Sequence))
    token_ids = sequence.append((97, 200))
    assert sequence.finish_reason is reasons[0]
    stream = cast(TokenStream, sequence.sink)
    stream.put(GenerationChunk(token_ids=token_ids, finish_reason=sequence.finish_reason))
    stream.wake()
    chunk = await reading
    assert (chunk.text, chunk.finish_reason) == (text, reasons[1])
    await chunks.aclose()


class EndsAtDot:
    """A grammar whose texts end at ``.``, the end of text of the tokenizer."""

    def completes(self, token_id: TokenId) -> bool:
        return token_id == ord(".")


@dataclass(frozen=True)
class Ending:
    """Tokens of rounds, and the text that they end."""

    rounds: tuple[str, ...]
    text: str
    sampling: SamplingParams
    eos: str = ""
    """Characters that end a text unless they are ignored."""
    reason: FinishReason = FinishReason.STOP


AT_DOT = SamplingParams(stop_token_ids=(ord("."),))
IGNORING = SamplingParams(ignore_eos=True)


@pytest.mark.parametrize(
    "ending",
    [
        Ending(("ab.",), "ab", AT_DOT),
        Ending(("a", "b", "."), "ab", AT_DOT),
        Ending((".",), "", AT_DOT),
        Ending(("abc.",), "abc", AT_DOT),
        Ending(("ab.",), "ab", replace(AT_DOT, ignore_eos=True)),
        Ending(("a", "b", "."), "ab", replace(AT_DOT, stop=("b.",))),
        Ending(("ab", "."), "a", replace(AT_DOT, stop=("b",))),
        Ending(("ab.",), "ab", SamplingParams(), eos="."),
        Ending((".ab.",), ".ab.", IGNORING, eos=".", reason=FinishReason.LENGTH),
        Ending(("ab.",), "ab", replace(IGNORING, regex="a+"), eos="."),
    ],
)
@pytest.mark.parametrize("echo", [False, True])
async def test_the_token_that_ends_a_text_is_reported_and_not_part_of_the_text(
    handler: RequestHandler,
    inbox: Inbox,
    monkeypatch: pytest.MonkeyPatch,
    ending: Ending,
    *,
    echo: bool,
) -> None:
    async def grammar(sampling: SamplingParams) -> EndsAtDot | None:
        return EndsAtDot() if sampling.regex else None

    monkeypatch.setattr(handler, "_grammar", grammar)
    monkeypatch.setattr(WatchedTokenizer, "eos_token_ids", frozenset(ending.eos.encode()))
    params = replace(ending.sampling, max_tokens=4, n=2, logprobs=0, echo=echo)
    chunks = handler.generate(GenerateCall(prompt=".", sampling=params), "r", untraced())
    reading = asyncio.create_task(anext(chunks))
    await asyncio.sleep(0)
    sequences = [each for each in inbox.drain() if isinstance(each, Sequence)]
    for sequence in sequences:
        stream = cast(TokenStream, sequence.sink)
        for letters in ending.rounds:
            if sequence.finish_reason is None:
                ids = sequence.append(letters.encode())
                logprobs = tuple(PositionLogprobs(TokenLogprob(each, -1.0)) for each in ids)
                reached = sequence.finish_reason
                stream.put(GenerationChunk(token_ids=ids, logprobs=logprobs, finish_reason=reached))
        stream.wake()
    received = [await reading, *[each async for each in chunks]]
    for sequence in sequences:
        own = [each for each in received if each.choice == sequence.choice]
        assert "".join(each.text for each in own) == "." * echo + ending.text
        assert own[-1].finish_reason is ending.reason
        new = sequence.tokens[sequence.num_prompt :]
        assert [each for chunk in own for each in chunk.token_ids][echo:] == new
        assert [each.selected.token_id for chunk in own for each in chunk.logprobs] == new
