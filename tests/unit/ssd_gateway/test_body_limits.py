"""Bounds of bodies before they are parsed."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway import INFO, VALUES

from ssd.errors import TooLargeError
from ssd.rpc.bounds import max_values
from ssd_gateway.parser import MAX_VALUES, OTHER_BYTES, OTHER_VALUES, BodyLimits
from ssd_gateway.schemas import CompletionRequest

LIMITS = BodyLimits(num_bytes=1 << 23, num_values=1000)


def num_values(value: Any) -> int:
    match value:
        case dict():
            return 1 + len(value) + sum(map(num_values, value.values()))
        case list():
            return 1 + sum(map(num_values, value))
    return 1


@given(
    value=VALUES | st.text('\\"[]{},:\n é'),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_no_body_has_more_values_than_the_bound_or_less_than_half(
    value: Any, *, ascii_only: bool, indent: int | None
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode(errors="replace")
    found = num_values(json.loads(body))
    assert found <= max_values(body, 1 << 20) <= 2 * found


@pytest.mark.parametrize("each", ["[]", "{}", "1", '""', '{"a":[{}]}'])
def test_a_body_with_many_values_is_refused_before_it_is_parsed(each: str) -> None:
    body = '{"metadata":[' + ",".join([each] * 1000) + "]}"
    with pytest.raises(TooLargeError, match="the body has over 1000 values"):
        LIMITS.check_values(body.encode())


def test_a_long_text_is_one_value() -> None:
    code = 'x = [{"a": [1, 2, 3]}, "\\\\"],\n' * 10_000
    LIMITS.check_values(json.dumps({"prompt": code}).encode())


def test_the_longest_prompt_of_a_model_fits_and_a_longer_body_does_not() -> None:
    info = replace(INFO, max_model_len=2000, max_text_bytes=64_000)
    limits = BodyLimits.of_models([INFO, info], 1 << 30)
    limits_of_one = BodyLimits.of_models([info], 1 << 30)
    assert limits.num_bytes > limits_of_one.num_bytes == OTHER_BYTES + 3 * 64_000
    assert limits_of_one.num_values == OTHER_VALUES + 2000
    escaped = json.dumps({"prompt": "é" * 32_000})
    assert len(escaped) <= limits_of_one.num_bytes
    assert BodyLimits.of_models([info], 2048).num_bytes == 2048


def test_the_longest_prompts_of_a_batch_fit_within_fixed_maximums() -> None:
    info = replace(INFO, max_model_len=6000, max_text_bytes=60_000)
    batch = CompletionRequest.max_prompts
    limits = BodyLimits.of_models([info], 1 << 30, batch)
    body = json.dumps({"prompt": [[100_000] * 6000] * batch}).encode()
    assert len(body) <= limits.num_bytes == OTHER_BYTES + batch * 3 * 60_000
    limits.check_values(body)
    longer = replace(info, max_model_len=100_000)
    assert BodyLimits.of_models([longer], 1 << 30, batch).num_values == MAX_VALUES
    longest = replace(info, max_model_len=1_000_000)
    assert BodyLimits.of_models([longest], 1 << 30, batch).num_values == OTHER_VALUES + 1_000_000
    assert BodyLimits.of_models([longest], 2048, batch).num_bytes == 2048


def test_a_target_that_reports_no_bound_has_that_of_all_models() -> None:
    older = replace(INFO, max_text_bytes=0)
    assert BodyLimits.of_models([older], 1 << 30).num_bytes == OTHER_BYTES + 3 * (4 << 20)
