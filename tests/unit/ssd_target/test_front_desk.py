"""What the front desk refuses and in which order, and what it does beside the asyncio loop."""

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from ssd.engine.runner import ModelRunner
from ssd.errors import ContextLengthError, FieldError
from ssd.rpc.codec import GenerateCall, Prompt
from ssd.testing.clock import FakeClock
from ssd.testing.tokenizer import ByteTokenizer
from ssd.types import TokenId
from ssd_target.front_desk import DeskSettings, FrontDesk
from ssd_target.inbox import Inbox
from ssd_target.streams import Wakeups

MAX_MODEL_LEN = 64
NUM_TOKEN_IDS = 120
"""Fewer than the tokenizer has."""


class WatchedTokenizer(ByteTokenizer):
    """Remembers which thread did the work."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> list[TokenId]:
        self.threads.append(threading.current_thread())
        return super().encode(text)

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        self.threads.append(threading.current_thread())
        return super().decode(token_ids)


@pytest.fixture
def tokenizer() -> WatchedTokenizer:
    return WatchedTokenizer()


@pytest.fixture
async def desk(tokenizer: WatchedTokenizer) -> FrontDesk:
    settings = DeskSettings(stream_stall_seconds=60.0, stream_buffer_tokens=100)
    desk = FrontDesk(settings, tokenizer, None, Inbox(4), FakeClock())
    runner = SimpleNamespace(
        engine=SimpleNamespace(max_model_len=MAX_MODEL_LEN, num_token_ids=NUM_TOKEN_IDS),
        model=SimpleNamespace(eos_token_ids=frozenset()),
    )
    desk.open(cast(ModelRunner, runner), Wakeups(asyncio.get_running_loop()))
    return desk


async def ask(desk: FrontDesk, prompt: Prompt) -> None:
    call = GenerateCall(prompt=prompt, max_tokens=4)
    await anext(desk.generate(call, "r"))


async def test_a_prompt_of_the_models_length_is_read_through(desk: FrontDesk) -> None:
    with pytest.raises(FieldError) as caught:
        await ask(desk, (1, 257, 3))
    assert caught.value.field == "token_ids.ids[1]"


async def test_a_prompt_holds_only_ids_that_the_model_has(desk: FrontDesk) -> None:
    with pytest.raises(FieldError, match=r"\[1\]: token id 120 is outside 0..119"):
        await ask(desk, (119, 120, 3))
    with pytest.raises(FieldError, match=r"token id 121, .* 0..119") as caught:
        await ask(desk, "x y")
    assert caught.value.field == "input"


async def test_a_prompt_that_is_too_long_is_not_read_through(desk: FrontDesk) -> None:
    with pytest.raises(ContextLengthError):
        await ask(desk, (1, 257, *[3] * MAX_MODEL_LEN))


@pytest.mark.parametrize(("count", "is_aside"), [(10, False), (50_000, True)])
async def test_long_texts_and_lists_are_worked_on_beside_the_loop(
    desk: FrontDesk, tokenizer: WatchedTokenizer, count: int, *, is_aside: bool
) -> None:
    assert await desk.encode("a" * count) == (97,) * count
    assert await desk.decode([98] * count) == "b" * count
    mine = threading.current_thread()
    assert [thread is not mine for thread in tokenizer.threads] == [is_aside] * 2


@pytest.mark.parametrize("count", [1, 50_000])
async def test_ids_to_decode_are_of_the_vocabulary(desk: FrontDesk, count: int) -> None:
    with pytest.raises(FieldError) as caught:
        await desk.decode([*[1] * count, 257])
    assert caught.value.field == f"token_ids[{count}]"
