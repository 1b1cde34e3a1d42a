"""The maximum length of a request that sets none."""

import pytest

from ssd.errors import ContextLengthError
from ssd.rpc.codec import Conversation, GenerateCall, Prompt
from ssd.types import ChatTurn, SamplingParams
from ssd_target.serving.request_handler import max_new_tokens

CHAT = Conversation((ChatTurn("user", "12"),))


@pytest.mark.parametrize(
    ("prompt", "room", "limit"),
    [("text", 1000, 256), ("text", 100, 100), ((1, 2), 999, 256), (CHAT, 999, 999), (CHAT, 9, 9)],
)
def test_a_chat_continues_to_the_end_of_the_context(prompt: Prompt, room: int, limit: int) -> None:
    call = GenerateCall(prompt=prompt, sampling=SamplingParams())
    assert max_new_tokens(call, 10, 10 + room) == limit
    with pytest.raises(ContextLengthError):
        max_new_tokens(call, 10, 10)


@pytest.mark.parametrize(
    ("prompt", "field"), [("text", "text"), ((1,), "token_ids.ids"), (CHAT, "chat")]
)
def test_a_prompt_without_room_for_new_tokens_is_refused_with_its_field(
    prompt: Prompt, field: str
) -> None:
    call = GenerateCall(prompt=prompt, sampling=SamplingParams(max_tokens=4))
    with pytest.raises(
        ContextLengthError, match="has 62 tokens and max_tokens is 4: together 66"
    ) as caught:
        max_new_tokens(call, 62, 64)
    assert caught.value.field == field
