"""Token streams between the step thread and the asyncio loop."""

import asyncio
import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest

from ssd.errors import OverloadedError
from ssd.rpc import sampling_codec
from ssd.testing.tokenizer import ByteTokenizer
from ssd.types import (
    FinishReason,
    GenerationChunk,
    PositionLogprobs,
    Round,
    TokenId,
    TokenLogprob,
    TokenText,
)
from ssd_target.serving.streams import (
    MAX_MERGED_TOKENS,
    MESSAGE_SECONDS,
    TokenStream,
    Wakeups,
    add_texts,
)


def chunk(*token_ids: int, reason: FinishReason | None = None) -> GenerationChunk:
    return GenerationChunk(token_ids=token_ids, finish_reason=reason)


class Ends:
    """Both ends of one stream."""

    def __init__(self, buffer_tokens: int = 100, message_seconds: float = MESSAGE_SECONDS) -> None:
        self.wakeups = Wakeups(asyncio.get_running_loop())
        self.stream = TokenStream(self.wakeups, buffer_tokens, message_seconds)


async def test_a_slow_reader_receives_several_rounds_as_one_chunk() -> None:
    ends = Ends()
    ends.stream.put(chunk(1, 2))
    ends.stream.put(chunk(3))
    ends.stream.put(chunk(4, reason=FinishReason.LENGTH))
    merged = await ends.stream.take()
    assert merged.token_ids == (1, 2, 3, 4)
    assert merged.finish_reason is FinishReason.LENGTH


async def test_merged_tokens_fit_a_message_and_lose_nothing() -> None:
    ends = Ends(buffer_tokens=100_000)
    for token_id in range(2 * MAX_MERGED_TOKENS + 5):
        ends.stream.put(chunk(token_id))
    ends.stream.put(chunk(7, reason=FinishReason.LENGTH))
    found = [await ends.stream.take() for _ in range(3)]
    assert [len(each.token_ids) for each in found] == [MAX_MERGED_TOKENS, MAX_MERGED_TOKENS, 6]
    assert [token for each in found for token in each.token_ids][:-1] == [
        *range(2 * MAX_MERGED_TOKENS + 5)
    ]
    assert [each.finish_reason for each in found] == [None, None, FinishReason.LENGTH]


def with_alternatives(token_id: int, count: int) -> GenerationChunk:
    token = TokenLogprob(token_id, -1.0)
    return GenerationChunk(
        token_ids=(token_id,), logprobs=(PositionLogprobs(token, (token,) * count),)
    )


async def test_alternatives_count_for_the_buffer() -> None:
    ends = Ends(buffer_tokens=2_100)
    for token_id in range(100):
        ends.stream.put(with_alternatives(token_id, 20))
    assert not ends.stream.is_abandoned
    assert len((await ends.stream.take()).logprobs) == 100
    for token_id in range(101):
        ends.stream.put(with_alternatives(token_id, 20))
    assert ends.stream.is_abandoned


async def test_alternatives_count_for_a_message() -> None:
    ends, num_merged = Ends(buffer_tokens=1 << 20), MAX_MERGED_TOKENS // 21
    for token_id in range(num_merged + 3):
        ends.stream.put(with_alternatives(token_id, 20))
    assert len((await ends.stream.take()).logprobs) == num_merged
    assert [each.selected.token_id for each in (await ends.stream.take()).logprobs] == [
        *range(num_merged, num_merged + 3)
    ]


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
async def test_a_failed_stream_is_freed_without_garbage_collection() -> None:
    ends = Ends()
    ends.stream.fail(OverloadedError("the queue is full"))
    stream = weakref.ref(ends.stream)
    message = ""
    try:
        await ends.stream.take()
    except OverloadedError as error:
        message = str(error)
    ends.wakeups.flush()
    await asyncio.sleep(0)
    del ends
    assert message == "the queue is full"
    assert stream() is None


async def test_flush_wakes_a_waiting_reader() -> None:
    ends = Ends()
    reader = asyncio.create_task(ends.stream.take())
    await asyncio.sleep(0)

    def step_thread() -> None:
        ends.stream.put(chunk(5))
        ends.wakeups.flush()

    await asyncio.to_thread(step_thread)
    assert (await reader).token_ids == (5,)


async def test_a_reader_receives_the_tokens_before_the_error() -> None:
    ends = Ends()
    ends.stream.put(chunk(1))
    ends.stream.fail(RuntimeError("over"))
    assert (await ends.stream.take()).token_ids == (1,)
    with pytest.raises(RuntimeError, match="over"):
        await ends.stream.take()


async def test_the_buffer_of_a_stream_is_bounded() -> None:
    ends = Ends(buffer_tokens=3)
    ends.stream.put(chunk(1, 2, 3))
    assert not ends.stream.is_abandoned
    ends.stream.put(chunk(4))
    assert ends.stream.is_abandoned


def test_flush_after_the_loop_has_closed_has_no_effect() -> None:
    async def make() -> tuple[Wakeups, TokenStream]:
        wakeups = Wakeups(asyncio.get_running_loop())
        stream = TokenStream(wakeups, 100)
        return wakeups, stream

    loop = asyncio.new_event_loop()
    wakeups, stream = loop.run_until_complete(make())
    loop.close()
    wakeups.mark(stream)
    wakeups.flush()


def taken_at_once(stream: TokenStream) -> GenerationChunk | None:
    """What a reader gets without waiting."""
    taking = stream.take()
    try:
        taking.send(None)
    except StopIteration as end:
        found: GenerationChunk = end.value
        return found
    taking.close()
    return None


async def test_the_first_and_the_last_tokens_do_not_wait_for_others() -> None:
    ends = Ends()
    ends.stream.put(chunk(1))
    assert taken_at_once(ends.stream) == chunk(1)
    ends.stream.put(chunk(2))
    assert taken_at_once(ends.stream) is None
    ends.stream.put(chunk(3, reason=FinishReason.LENGTH))
    assert taken_at_once(ends.stream) == chunk(2, 3, reason=FinishReason.LENGTH)


async def test_rounds_within_a_pause_are_one_message() -> None:
    ends, loop = Ends(), asyncio.get_running_loop()
    ends.stream.put(chunk(1))
    began_at = loop.time()
    await ends.stream.take()
    for token_id in (2, 3, 4):
        ends.stream.put(chunk(token_id))
        ends.wakeups.flush()
    assert await ends.stream.take() == chunk(2, 3, 4)
    assert loop.time() - began_at >= MESSAGE_SECONDS


async def test_a_reader_of_whole_texts_receives_few_messages() -> None:
    ends = Ends(buffer_tokens=8, message_seconds=1.0)
    ends.stream.put(chunk(1))
    assert taken_at_once(ends.stream) == chunk(1)
    for token_id in (2, 3, 4):
        ends.stream.put(chunk(token_id))
        assert taken_at_once(ends.stream) is None
    # Half of the buffer is a message.
    reader = asyncio.create_task(ends.stream.take())
    await asyncio.sleep(0)
    ends.stream.put(chunk(5))
    ends.wakeups.flush()
    assert await reader == chunk(2, 3, 4, 5)
    ends.stream.put(chunk(6))
    ends.stream.put(chunk(7, reason=FinishReason.LENGTH))
    assert taken_at_once(ends.stream) == chunk(6, 7, reason=FinishReason.LENGTH)
    assert not ends.stream.is_abandoned


async def test_an_error_does_not_wait_for_the_next_message() -> None:
    ends = Ends()
    ends.stream.put(chunk(1))
    await ends.stream.take()
    ends.stream.put(chunk(2))
    ends.stream.fail(OverloadedError("full"))
    assert taken_at_once(ends.stream) == chunk(2)
    with pytest.raises(OverloadedError):
        await ends.stream.take()


def test_tokens_with_log_probabilities_receive_the_bytes_of_parts_of_characters() -> None:
    tokenizer = ByteTokenizer()
    positions = tuple(
        PositionLogprobs(TokenLogprob(each, -1.0), (TokenLogprob(each, -1.0),))
        for each in tokenizer.encode("aé日😀")
    )
    add_texts(GenerationChunk(token_ids=(), logprobs=positions), tokenizer)
    messages = sampling_codec.logprobs_messages(positions)
    written = list(map(sampling_codec.position_logprobs, messages))
    assert b"".join(each.selected.encoded for each in written) == "aé日😀".encode()
    assert b"".join(each.top[0].encoded for each in written) == "aé日😀".encode()
    assert [each.selected.partial for each in written[:2]] == [b"", b"\xc3"]


def test_special_tokens_with_log_probabilities_receive_their_names() -> None:
    tokenizer = ByteTokenizer()
    (end,) = tokenizer.eos_token_ids
    position = PositionLogprobs(TokenLogprob(end, -1.0), (TokenLogprob(ord("a"), -2.0),))
    add_texts(GenerationChunk(token_ids=(), logprobs=(position,)), tokenizer)
    (message,) = sampling_codec.logprobs_messages((position,))
    written = sampling_codec.position_logprobs(message)
    assert [each.name for each in (written.selected, *written.top)] == ["<end>", "a"]
    assert [each.special for each in written.top] == [""]


def test_texts_of_tokens_keep_the_space_that_a_text_does_not_begin_with() -> None:
    class WordTokenizer(ByteTokenizer):
        def decode(self, token_ids: Sequence[TokenId]) -> str:
            return super().decode(token_ids).removeprefix(" ")

        def token_text(self, token_id: TokenId) -> str:
            return super().decode([token_id])

    position = PositionLogprobs(TokenLogprob(0x20, -1.0), (TokenLogprob(0x20, -1.0),))
    found = Round((TokenText(0x20),), 0, (TokenText(0x20),))
    chunk = GenerationChunk(token_ids=(), logprobs=(position,), rounds=(found,))
    add_texts(chunk, WordTokenizer())
    assert [each.text for each in (position.selected, *position.top)] == [" "] * 2
    assert [each.text for each in (*found.proposed, *found.added)] == [" "] * 2


def test_tokens_of_rounds_receive_their_text() -> None:
    accepted, rejected, bonus = (TokenText(ord(letter)) for letter in "abc")
    found = Round((accepted, rejected), 1, (accepted, bonus))
    add_texts(GenerationChunk(token_ids=(), rounds=(found,)), ByteTokenizer())
    assert [each.text for each in found.proposed] == ["a", "b"]
    assert [each.text for each in found.added] == ["a", "c"]
