"""``SamplingParams`` and log-probabilities: messages to dataclasses and back, within bounds."""

from collections.abc import Mapping
from typing import Any

from ssd.rpc.bounds import (
    LARGEST_ID,
    MAX_TEMPERATURE,
    check_count,
    check_range,
    check_token_ids,
)
from ssd.types import PositionLogprobs, SamplingParams, TokenLogprob
from ssd.v1 import types_pb2

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
"""Maximum number of entries in one request."""
MAX_CHOICES = 8
MAX_LOGPROBS = 20
LEAST_TEMPERATURE = 1e-6
"""Temperatures below it count as 0: logits / temperature would overflow float32."""
_NUM_SEEDS = 2**64
SEEDS = (-(2**63), _NUM_SEEDS - 1)
"""Lowest and highest seed. Clients of OpenAI send signed ones, which count modulo 2^64."""
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    # Other factors could overflow float32. The lowest one is .01 as a message has it.
    "repetition_penalty": (0.00999999977648258, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "max_tokens": (1, LARGEST_ID),
    "min_tokens": (0, LARGEST_ID),
    "logprobs": (0, MAX_LOGPROBS),
    "n": (1, MAX_CHOICES),
    "seed": SEEDS,
}
"""Ranges of optional numbers, except those that depend on the vocabulary."""
_SWITCHES = ("ignore_eos", "echo")
MAX_STRUCTURE_BYTES = {"json_schema": 64 * 1024, "regex": 4 * 1024}
"""Maximum size of a structure by its field."""
_DEFAULTS = SamplingParams()


def sampling_params(
    message: types_pb2.SamplingParams, vocab_size: int | None = None
) -> SamplingParams:
    """Convert a message; fields that are not set have their defaults.

    Args:
        message: as received.
        vocab_size: bound of token ids; None: 2^31.

    Raises:
        FieldError: a field is out of range.
    """
    all_tokens = LARGEST_ID if vocab_size is None else vocab_size
    values: dict[str, Any] = {
        name: getattr(message, name) for name in ("top_k", *RANGES) if message.HasField(name)
    }
    _check_ranges(values, top_k=(1, all_tokens))
    if values.get("top_k") == all_tokens:
        del values["top_k"]
    if values.get("temperature", 1.0) < LEAST_TEMPERATURE:
        values["temperature"] = 0.0
    _check_stops(message, vocab_size)
    _check_biases(message.logit_bias, vocab_size)
    structure = message.WhichOneof("structure")
    if structure is not None:
        values[structure] = text = getattr(message, structure)
        most = MAX_STRUCTURE_BYTES[structure]
        check_count(f"sampling.{structure}", len(text.encode()), "bytes", 1, most)
    return SamplingParams(
        **values,
        **{name: getattr(message, name) for name in _SWITCHES},
        logit_bias=tuple(sorted(entry for entry in message.logit_bias.items() if entry[1])),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
    )


def sampling_message(sampling: SamplingParams) -> types_pb2.SamplingParams:
    """Convert to a message; fields with their defaults stay unset, except the temperature.

    Raises:
        FieldError: a number is out of range. The message would round it or refuse it without its
            name.
    """
    names = ("top_k", *RANGES, *_SWITCHES, *MAX_STRUCTURE_BYTES)
    values = {name: getattr(sampling, name) for name in names}
    changed = {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
    _check_ranges(changed, top_k=(0, LARGEST_ID))
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, None)
    biases = dict(sampling.logit_bias)
    _check_biases(biases, None)
    if "seed" in changed:
        changed["seed"] %= _NUM_SEEDS
    return types_pb2.SamplingParams(
        **changed | {"temperature": sampling.temperature, "logit_bias": biases},
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
    )


def logprobs_messages(
    positions: tuple[PositionLogprobs, ...],
) -> list[types_pb2.PositionLogprobs]:
    """Convert the log-probabilities of a chunk."""
    return [
        types_pb2.PositionLogprobs(
            selected=_logprob_message(position.selected), top=map(_logprob_message, position.top)
        )
        for position in positions
    ]


def position_logprobs(message: types_pb2.PositionLogprobs) -> PositionLogprobs:
    """Convert the message of one position."""
    return PositionLogprobs(_logprob(message.selected), tuple(map(_logprob, message.top)))


def _logprob_message(token: TokenLogprob) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(
        token_id=token.token_id,
        logprob=token.logprob,
        text=token.text,
        partial=token.partial,
        special=token.special,
    )


def _logprob(message: types_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        message.token_id, message.logprob, message.text, message.partial, message.special
    )


def _check_ranges(values: Mapping[str, Any], **others: tuple[float, float]) -> None:
    for name, (lowest, highest) in (others | RANGES).items():
        if name in values:
            check_range(f"sampling.{name}", values[name], lowest, highest)


def _check_stops(message: types_pb2.SamplingParams, vocab_size: int | None) -> None:
    for name, entries in (("stop", message.stop), ("stop_token_ids", message.stop_token_ids)):
        check_count(f"sampling.{name}", len(entries), "entries", 0, MAX_STOPS)
    for index, stop in enumerate(message.stop):
        check_count(f"sampling.stop[{index}]", len(stop), "characters", 1, MAX_STOP_CHARACTERS)
    check_token_ids("sampling.stop_token_ids", message.stop_token_ids, vocab_size)


def _check_biases(biases: Mapping[int, float], vocab_size: int | None) -> None:
    check_count("sampling.logit_bias", len(biases), "entries", 0, MAX_LOGIT_BIASES)
    check_token_ids("sampling.logit_bias", sorted(biases), vocab_size, is_keyed=True)
    for token_id, bias in biases.items():
        check_range(f"sampling.logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
