"""Worker threads for long inputs, and their bound."""

import asyncio
import gc
import threading
import weakref

import pytest
from tests.unit.ssd_target.serving.watched_tokenizer import WatchedTokenizer

from ssd.errors import FieldError, OverloadedError
from ssd_target.serving.tokenization import MAX_LONG_CALLS, Tokenization

LONG = "a" * 2_000


@pytest.fixture
def tokenizer() -> WatchedTokenizer:
    return WatchedTokenizer()


@pytest.fixture
async def tokenization(tokenizer: WatchedTokenizer) -> Tokenization:
    return Tokenization(tokenizer)


class Text(str):
    """A text that weak references can refer to."""

    __slots__ = ("__weakref__",)


async def test_a_text_is_freed_when_its_call_is_cancelled_before_it_is_tokenized(
    tokenization: Tokenization, tokenizer: WatchedTokenizer
) -> None:
    tokenizer.may_go_on.clear()
    reading = [asyncio.create_task(tokenization.tokenize(LONG)) for _ in range(2)]
    assert await asyncio.to_thread(tokenizer.two_are_inside.wait, 5.0)
    texts = [Text(LONG) for _ in range(3)]
    kept = [weakref.ref(text) for text in texts]
    waiting = [asyncio.create_task(tokenization.tokenize(text)) for text in texts]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    del texts, waiting, task
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    tokenizer.may_go_on.set()
    await asyncio.gather(*reading)


async def test_two_long_texts_are_tokenized_at_a_time_and_short_ones_meanwhile(
    tokenization: Tokenization, tokenizer: WatchedTokenizer
) -> None:
    tokenizer.may_go_on.clear()
    reading = [asyncio.create_task(tokenization.tokenize(LONG)) for _ in range(5)]
    assert await asyncio.to_thread(tokenizer.two_are_inside.wait, 5.0)
    for task in reading[:2]:
        task.cancel()
    await asyncio.wait(reading[:2])
    assert len(tokenizer.threads) == 2, "a cancelled call does not free its thread"
    tokenizer.may_go_on.set()
    assert await tokenization.tokenize("abc") == (97, 98, 99)
    assert len(await asyncio.gather(*reading[2:])) == 3


@pytest.mark.parametrize(("count", "in_thread"), [(10, False), (50_000, True)])
async def test_long_inputs_are_processed_in_a_worker_thread(
    tokenization: Tokenization, tokenizer: WatchedTokenizer, count: int, *, in_thread: bool
) -> None:
    assert await tokenization.tokenize("a" * count) == (97,) * count
    assert await tokenization.detokenize([98] * count) == "b" * count
    mine = threading.current_thread()
    assert [thread is not mine for thread in tokenizer.threads] == [in_thread] * 2


@pytest.mark.parametrize("count", [1, 50_000])
async def test_ids_to_detokenize_are_in_the_vocabulary(
    tokenization: Tokenization, count: int
) -> None:
    with pytest.raises(FieldError) as caught:
        await tokenization.detokenize([*[1] * count, 257])
    assert caught.value.field == f"token_ids[{count}]"


async def test_calls_with_long_inputs_are_bounded_and_prompts_are_not(
    tokenization: Tokenization, tokenizer: WatchedTokenizer
) -> None:
    tokenizer.may_go_on.clear()
    running = [asyncio.create_task(tokenization.tokenize(LONG)) for _ in range(MAX_LONG_CALLS)]
    await asyncio.sleep(0)
    with pytest.raises(
        OverloadedError, match="8 calls of Tokenize or Detokenize with 1000 or more"
    ):
        await tokenization.tokenize(LONG)
    with pytest.raises(OverloadedError):
        await tokenization.detokenize([98] * len(LONG))
    assert await tokenization.detokenize([98]) == "b"
    prompt = asyncio.create_task(tokenization.encode_prompt(LONG))
    running.pop().cancel()
    await asyncio.sleep(0)
    running.append(asyncio.create_task(tokenization.tokenize(LONG)))
    tokenizer.may_go_on.set()
    assert len(await asyncio.gather(prompt, *running)) == 1 + MAX_LONG_CALLS
    assert await tokenization.tokenize(LONG) == (97,) * len(LONG)
