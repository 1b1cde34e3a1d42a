"""Bounds of requests, and the messages for values out of bounds."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from ssd.errors import ContextLengthError, FieldError, PromptSizeError
from ssd.rpc.bounds import LARGEST_ID, PromptBounds, check_token_ids
from ssd.rpc.codec import generate_call
from ssd.rpc.sampling_codec import sampling_message, sampling_params
from ssd.types import SamplingParams
from ssd.v1 import generate_pb2, types_pb2

VOCAB = 100
Sampling = types_pb2.SamplingParams


def request(sampling: Sampling | None = None, text: str = "def f(") -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(text=text, sampling=sampling)


def test_too_many_token_ids_are_refused_before_they_are_copied() -> None:
    class Unreadable(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("was read")

    bounds = PromptBounds(tokens=64)
    message = SimpleNamespace(
        model="",
        sampling=Sampling(max_tokens=7),
        token_ids=SimpleNamespace(ids=Unreadable([1] * 64)),
        WhichOneof=lambda _name: "token_ids",
    )
    with pytest.raises(
        ContextLengthError, match="has 64 tokens and max_tokens is 7: together 71"
    ) as caught:
        generate_call(cast(generate_pb2.GenerateRequest, message), VOCAB, bounds)
    assert caught.value.field == "token_ids.ids"


def test_the_longest_text_of_a_model_is_accepted_and_one_byte_more_is_not() -> None:
    bounds = PromptBounds.of_model(max_model_len=10, longest_token_bytes=7)
    assert generate_call(request(text="é" * 35), VOCAB, bounds).prompt == "é" * 35
    with pytest.raises(
        PromptSizeError, match="has 71 bytes, and no text of max_model_len, 10 tokens, has over"
    ) as caught:
        generate_call(request(text="é" * 35 + "x"), VOCAB, bounds)
    assert caught.value.field == "text"


def test_a_text_above_the_bound_of_all_models_is_not_blamed_on_one() -> None:
    bounds = PromptBounds.of_model(max_model_len=10, longest_token_bytes=None)
    with pytest.raises(PromptSizeError, match=r"has 4194305 bytes, must have 0\.\.4194304$"):
        generate_call(request(text="x" * 4_194_305), VOCAB, bounds)


@pytest.mark.parametrize("length", [None, 7, 10**6])
def test_the_longest_request_that_is_accepted_fits_the_message_limit(length: int | None) -> None:
    bounds = PromptBounds.of_model(4096, length)
    per_turn, rest = divmod(bounds.text_bytes, 4096)
    rich = generate_pb2.GenerateRequest(
        model="m" * 256,
        chat=types_pb2.ChatMessages(
            messages=[
                types_pb2.ChatMessage(role="assistant", content="x" * (per_turn + (n < rest)))
                for n in range(4096)
            ]
        ),
        sampling=Sampling(
            stop=["😀" * 256] * 16,
            json_schema="x" * 65_536,
            stop_token_ids=[LARGEST_ID] * 16,
            logit_bias=dict.fromkeys(range(LARGEST_ID - 1024, LARGEST_ID), 0.0),
        ),
        metadata={f"{n:02}" + "😀" * 254: "😀" * 256 for n in range(16)},
    )
    generate_call(rich, None, bounds)
    assert rich.ByteSize() <= bounds.message_bytes
    ids = types_pb2.TokenIds(ids=[LARGEST_ID] * 4095)
    assert generate_pb2.GenerateRequest(token_ids=ids).ByteSize() <= bounds.message_bytes


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        (Sampling(max_tokens=2**31), "max_tokens: is 2147483648, must be in 1..2147483647"),
        (Sampling(max_tokens=0), "max_tokens: is 0, must be in 1..2147483647"),
        (Sampling(top_p=-1e-9), "top_p: is -1e-09, must be in 0..1"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty: is 0, must be in 0.01..100"),
        (Sampling(temperature=2.5), "temperature: is 2.5, must be in 0..2"),
    ],
)
def test_a_number_and_its_range_are_written_out(sampling: Sampling, text: str) -> None:
    with pytest.raises(FieldError) as caught:
        generate_call(request(sampling), VOCAB)
    assert str(caught.value) == f"sampling.{text}"


def test_the_lowest_factor_is_allowed_although_a_message_rounds_it() -> None:
    message = sampling_message(SamplingParams(repetition_penalty=0.01))
    assert sampling_params(message).repetition_penalty == pytest.approx(0.01)


def test_a_bias_of_an_unknown_token_is_named_by_its_id() -> None:
    with pytest.raises(FieldError, match=r"^b\[9\]: is 9, must be in 0\.\.7$"):
        check_token_ids("b", [1, 9], 8, is_keyed=True)
    with pytest.raises(FieldError, match=r"^ids\[1\]: is 9, must be in 0\.\.7$"):
        check_token_ids("ids", [1, 9], 8)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_a_wrong_id_is_found_anywhere_in_a_long_list(wrong: int) -> None:
    with pytest.raises(FieldError, match=rf"^ids\[5000\]: is {wrong},"):
        check_token_ids("ids", [*[1] * 5000, wrong, 1], 8)


def test_the_error_of_a_length_has_its_three_numbers() -> None:
    message = "the prompt has 60 tokens and max_tokens is 9: together 69, over max_model_len 64"
    assert message in str(ContextLengthError(60, 9, 64))
