import json
import math
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ssd.rpc.values import VALUES, any_of, tuples_of

from ssd.errors import FieldError
from ssd.rpc.bounds import MAX_TEXT_BYTES, MAX_TOKEN_IDS
from ssd.rpc.codec import (
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    Conversation,
    GenerateCall,
    ModelInfo,
    generate_call,
    generate_request,
    generate_response,
    generation_chunk,
    model_info,
    model_info_response,
)
from ssd.types import (
    ChatTurn,
    FinishReason,
    GenerationChunk,
    Mode,
    Round,
    SamplingParams,
    SpeculationStatistics,
    TokenText,
    ToolCall,
    Usage,
)
from ssd.v1 import generate_pb2, types_pb2

VOCAB = 100
Sampling = types_pb2.SamplingParams


def request(sampling: Sampling | None = None, **fields: object) -> generate_pb2.GenerateRequest:
    arguments = {"text": "def f(", "sampling": sampling} | fields
    return generate_pb2.GenerateRequest(**arguments)  # type: ignore[arg-type]


def turn(content: str = "", role: str = "user", **fields: Any) -> types_pb2.ChatMessage:
    return types_pb2.ChatMessage(role=role, content=content, **fields)


def chat(*messages: types_pb2.ChatMessage, **fields: str) -> generate_pb2.GenerateRequest:
    conversation = types_pb2.ChatMessages(messages=messages, **fields)
    return generate_pb2.GenerateRequest(chat=conversation)


def test_a_bare_prompt_gets_the_defaults_and_no_seed() -> None:
    call = generate_call(request(), VOCAB)
    assert call == GenerateCall(prompt="def f(")
    assert call.sampling == SamplingParams(temperature=1.0, seed=None, max_tokens=None)
    assert call.mode is Mode.AUTO


def test_token_ids_of_a_prompt_are_not_checked_by_the_codec() -> None:
    message = generate_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[1, VOCAB]))
    assert generate_call(message, VOCAB).prompt == (1, VOCAB)


def test_texts_and_lists_of_maximum_length_are_accepted() -> None:
    text = "é" * (MAX_TEXT_BYTES // 2)
    assert generate_call(request(text=text), VOCAB).prompt == text
    ids = types_pb2.TokenIds(ids=[1] * (MAX_TOKEN_IDS - 1))
    call = generate_call(generate_pb2.GenerateRequest(token_ids=ids), VOCAB)
    assert call.prompt == (1,) * (MAX_TOKEN_IDS - 1)


def test_a_negative_seed_is_one_of_64_bits_and_a_tiny_top_p_is_zero() -> None:
    sampling = SamplingParams(seed=-1, top_p=1e-50)
    found = generate_call(generate_request(GenerateCall(prompt="x", sampling=sampling)))
    assert (found.sampling.seed, found.sampling.top_p) == (2**64 - 1, 0.0)


def test_seed_zero_and_temperature_zero_differ_from_unset() -> None:
    call = generate_call(request(Sampling(seed=0, temperature=0.0, max_tokens=5)), VOCAB)
    assert call.sampling == SamplingParams(seed=0, temperature=0.0, max_tokens=5)


@given(
    prompt=st.one_of(
        st.text(min_size=1),
        st.lists(st.integers(0, VOCAB - 1), min_size=1).map(tuple),
        st.builds(
            Conversation,
            st.lists(
                st.builds(
                    ChatTurn,
                    st.sampled_from(["user", "assistant", "tool"]),
                    st.text(),
                    st.lists(st.builds(ToolCall, st.text(), st.text(), st.text())).map(tuple),
                    st.text(),
                ),
                min_size=1,
            ).map(tuple),
            st.text(),
            st.text(),
        ),
    ),
    temperature=st.just(0.0) | st.floats(2**-16, 2, width=32),
    seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    max_tokens=st.integers(1, 10_000),
    mode=st.sampled_from(Mode),
    steps=st.fixed_dictionaries(
        {},
        optional={
            "stop": st.lists(st.text(min_size=1, max_size=5), max_size=16).map(tuple),
            "top_k": st.integers(1, VOCAB - 1),
            "top_p": st.floats(2**-16, 1, width=32),
            "min_p": st.floats(0, 1, width=32),
            "repetition_penalty": st.floats(0.0625, 64, width=32),
            "presence_penalty": st.floats(-2, 2, width=32),
            "frequency_penalty": st.floats(-2, 2, width=32),
            "logit_bias": st.just(((3, -100.0), (7, 0.5))),
            "min_tokens": st.integers(0, 100),
            "logprobs": st.integers(0, 20),
            "echo": st.booleans(),
            "json_schema": st.just("{}"),
            "n": st.integers(1, 8),
        },
    ),
)
def test_a_call_is_unchanged_after_encoding_and_decoding(
    prompt: str | tuple[int, ...] | Conversation,
    temperature: float,
    seed: int | None,
    max_tokens: int,
    mode: Mode,
    steps: dict[str, Any],
) -> None:
    call = GenerateCall(
        prompt=prompt,
        sampling=SamplingParams(
            temperature=temperature,
            stop_token_ids=(1, 2),
            ignore_eos=True,
            **steps,
            seed=seed,
            max_tokens=max_tokens,
        ),
        mode=mode,
        model="m",
        metadata={"a": "b"},
        report_rounds=True,
        message_interval_ms=1000,
        priority=-7,
    )
    message = generate_pb2.GenerateRequest.FromString(generate_request(call).SerializeToString())
    assert generate_call(message, VOCAB) == call


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (generate_pb2.GenerateRequest(), "input"),
        (request(text=""), "text"),
        (generate_pb2.GenerateRequest(token_ids=types_pb2.TokenIds()), "token_ids.ids"),
        (request(text="x" * (MAX_TEXT_BYTES + 1)), "text"),
        (chat(turn("é" * (MAX_TEXT_BYTES // 4)), turn("x" * (MAX_TEXT_BYTES // 2 + 1))), "chat"),
        (chat(), "chat.messages"),
        (chat(*[turn()] * 4097), "chat.messages"),
        (chat(turn(role="root")), "chat.messages[0].role"),
        (chat(turn(tool_calls=[types_pb2.ToolCall()] * 4097)), "chat.messages"),
        (chat(turn(), template_arguments="x" * (16 * 1024 + 1)), "chat.template_arguments"),
        (chat(turn("x", tool_calls=[types_pb2.ToolCall(arguments="x" * MAX_TEXT_BYTES)])), "chat"),
        (chat(turn("x"), tools="x" * MAX_TEXT_BYTES), "chat"),
        (request(model="m" * 257), "model"),
        (request(mode=99), "mode"),
        (request(priority=101), "priority"),
        (request(message_interval_ms=1001), "message_interval_ms"),
        (request(metadata={str(index): "" for index in range(17)}), "metadata"),
        (request(metadata={"a": "x" * 257}), "metadata[a]"),
        (request(Sampling(temperature=math.nan)), "sampling.temperature"),
        (request(Sampling(temperature=math.inf)), "sampling.temperature"),
        (request(Sampling(temperature=-0.1)), "sampling.temperature"),
        (request(Sampling(stop=["x"] * 17)), "sampling.stop"),
        (request(Sampling(stop=["x", ""])), "sampling.stop[1]"),
        (request(Sampling(stop=["x" * 257])), "sampling.stop[0]"),
        (request(Sampling(stop_token_ids=[1] * 17)), "sampling.stop_token_ids"),
        (request(Sampling(stop_token_ids=[1, VOCAB])), "sampling.stop_token_ids[1]"),
        (request(Sampling(top_k=0)), "sampling.top_k"),
        (request(Sampling(top_k=VOCAB + 1)), "sampling.top_k"),
        (request(Sampling(top_p=1.5)), "sampling.top_p"),
        (request(Sampling(min_p=-1.0)), "sampling.min_p"),
        (request(Sampling(repetition_penalty=math.inf)), "sampling.repetition_penalty"),
        (request(Sampling(presence_penalty=2.5)), "sampling.presence_penalty"),
        (request(Sampling(frequency_penalty=math.nan)), "sampling.frequency_penalty"),
        (request(Sampling(logprobs=21)), "sampling.logprobs"),
        (request(Sampling(json_schema="x" * 65_537)), "sampling.json_schema"),
        (request(Sampling(json_schema="")), "sampling.json_schema"),
        (request(Sampling(regex="é" * 2_049)), "sampling.regex"),
        (request(Sampling(n=0)), "sampling.n"),
        (request(Sampling(n=9)), "sampling.n"),
        (request(Sampling(logit_bias={1: 101.0})), "sampling.logit_bias[1]"),
        (request(Sampling(logit_bias=dict.fromkeys(range(1025), 0.0))), "sampling.logit_bias"),
        (request(Sampling(logit_bias={VOCAB: 1.0})), f"sampling.logit_bias[{VOCAB}]"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_field(
    message: generate_pb2.GenerateRequest, field: str
) -> None:
    with pytest.raises(FieldError) as caught:
        generate_call(message, VOCAB)
    assert caught.value.field == field


MANY = "[" + "[]," * (MAX_JSON_VALUES // 2) + "1]"


@pytest.mark.parametrize(
    ("calls", "tools", "arguments"),
    [
        ([MANY], "", ""),
        (['{"a": 1}'] * 4096, "[" + '{"a": 1},' * (MAX_JSON_VALUES // 3) + "1]", ""),
        ([], MANY, ""),
    ],
    ids=["call", "together", "tools"],
)
def test_a_conversation_with_much_json_is_refused(
    calls: list[str], tools: str, arguments: str
) -> None:
    asking = ChatTurn("assistant", "", tuple(ToolCall("1", "f", each) for each in calls))
    sent = generate_request(GenerateCall(prompt=Conversation((asking,), tools, arguments)))
    with pytest.raises(FieldError, match="has over 65536 JSON values") as caught:
        generate_call(sent)
    assert caught.value.field == "chat"


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH, MAX_JSON_DEPTH + 1])
@pytest.mark.parametrize(
    ("before", "after"),
    [("[", "]"), ('{"a": ', "}"), ('["]]", ', ', "\\"[["]')],
    ids=["lists", "objects", "brackets in texts"],
)
@pytest.mark.parametrize("place", ["tools", "arguments", "call"])
def test_json_that_is_nested_too_deeply_is_refused(
    depth: int, before: str, after: str, place: str
) -> None:
    nested = before * depth + "1" + after * depth
    call = (ToolCall("1", "f", nested),) if place == "call" else ()
    turn = ChatTurn("assistant", "", call)
    texts = {"tools": nested} if place == "tools" else {}
    texts |= {"template_arguments": nested} if place == "arguments" else {}
    prompt = GenerateCall(prompt=Conversation((turn,), **texts))
    if depth <= MAX_JSON_DEPTH:
        assert generate_call(generate_request(prompt)) == prompt
        return
    with pytest.raises(FieldError, match="has over 32 levels of JSON"):
        generate_call(generate_request(prompt))


def test_a_long_text_in_arguments_is_one_value() -> None:
    arguments = json.dumps({"code": 'x = [{"a": [1, 2]}],\n' * 100_000})
    asking = ChatTurn("assistant", "", (ToolCall("1", "f", arguments),))
    call = GenerateCall(prompt=Conversation((asking,)))
    assert generate_call(generate_request(call)) == call


def test_values_without_effect_are_those_of_a_request_that_does_not_set_them() -> None:
    sampling = Sampling(
        top_k=VOCAB,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        min_tokens=0,
        n=1,
        logit_bias={1: 0.0},
    )
    call = generate_call(request(sampling, priority=0), VOCAB)
    assert call == GenerateCall(prompt="def f(")


@pytest.mark.parametrize(
    "call",
    [
        GenerateCall(prompt="\ud800"),
        GenerateCall(prompt=(-1,)),
        GenerateCall(prompt=(2**32,)),
        GenerateCall(prompt="x", sampling=SamplingParams(seed=-(2**63) - 1)),
        GenerateCall(prompt="x", sampling=SamplingParams(seed=2**64)),
    ],
)
def test_a_value_that_cannot_be_encoded_is_a_field_error(call: GenerateCall) -> None:
    with pytest.raises(FieldError):
        generate_request(call)


TEXTS = tuples_of(any_of(TokenText))
CHUNKS = any_of(
    GenerationChunk,
    token_ids=tuples_of(VALUES[int]),
    logprobs=st.just(()),
    seed=st.none() | st.integers(0, 2**64 - 1),
    # A sequence that fails has an error instead.
    finish_reason=st.sampled_from([None, *FinishReason]).filter(lambda each: each != "failed"),
    rounds=tuples_of(any_of(Round, proposed=TEXTS, added=TEXTS)),
    usage=st.none() | any_of(Usage),
    statistics=st.none() | any_of(SpeculationStatistics),
)


@given(CHUNKS)
def test_a_chunk_is_unchanged_after_encoding_and_decoding(chunk: GenerationChunk) -> None:
    wire = generate_response(chunk).SerializeToString()
    assert generation_chunk(generate_pb2.GenerateResponse.FromString(wire)) == chunk


@given(any_of(ModelInfo))
def test_model_info_is_unchanged_after_encoding_and_decoding(info: ModelInfo) -> None:
    assert model_info(model_info_response(info)) == info
    names = {field.name for field in generate_pb2.GetModelInfoResponse.DESCRIPTOR.fields}
    assert names == set(ModelInfo.__dataclass_fields__)


def test_a_text_that_ended_for_a_reason_of_a_newer_target_has_ended() -> None:
    message = generate_pb2.GenerateResponse()
    assert generation_chunk(message).finish_reason is None
    message.finish_reason = cast("types_pb2.FinishReason", 77)
    assert generation_chunk(message).finish_reason is FinishReason.STOP


def test_a_temperature_too_small_for_float32_is_greedy() -> None:
    call = generate_call(request(Sampling(temperature=1e-38)), VOCAB)
    assert call.sampling.temperature == 0.0
