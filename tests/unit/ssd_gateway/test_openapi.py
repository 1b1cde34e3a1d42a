"""The OpenAPI document; ``make soak`` compares the answers with it."""

import json
import re
from pathlib import Path

import pytest

from ssd_gateway.fields import MISSING_STRUCTURES
from ssd_gateway.openapi import document
from ssd_gateway.schemas import (
    MISSING_FEATURES,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    parse,
)


def test_the_document_has_every_field_that_is_accepted() -> None:
    schemas = document()["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest):
        fields = schemas[kind.__name__]["properties"].keys()
        assert fields == kind.model_fields.keys() | MISSING_FEATURES.keys() | WITHOUT_EFFECT
    of_structures = schemas["StructuredOutputs"]["properties"].keys()
    assert of_structures >= MISSING_STRUCTURES.keys() | {"json", "regex"}


BOUNDS = {
    "n": (1, 8),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "priority": (-100, 100),
}


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        (ChatRequest, {**BOUNDS, "top_logprobs": (0, 20)}),
        (CompletionRequest, {**BOUNDS, "logprobs": (0, 20)}),
    ],
)
def test_the_document_has_the_bounds_that_targets_check(
    kind: type[ChatRequest | CompletionRequest], bounds: dict[str, tuple[float, float]]
) -> None:
    fields = document()["components"]["schemas"][kind.__name__]["properties"]
    for name, (lowest, highest) in bounds.items():
        number = fields[name].get("anyOf", [fields[name]])[0]
        assert (number["minimum"], number["maximum"]) == (lowest, highest), name
        assert "exclusiveMaximum" not in number
    least = fields["repetition_penalty"]["anyOf"][0]
    assert (least["minimum"], least["maximum"]) == (pytest.approx(0.01), 100)


def test_a_truth_value_has_no_bounds() -> None:
    logprobs = document()["components"]["schemas"]["ChatRequest"]["properties"]["logprobs"]
    assert logprobs["anyOf"] == [{"type": "boolean"}, {"type": "null"}]


def test_the_page_of_the_api_names_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "openai-api.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    for kind in (ChatRequest, CompletionRequest):
        fields = {each.alias or name for name, each in kind.model_fields.items()}
        assert fields | MISSING_FEATURES.keys() | WITHOUT_EFFECT <= named


def test_the_example_of_each_body_is_a_request() -> None:
    def example(path: str) -> bytes:
        body = document()["paths"][path]["post"]["requestBody"]
        return json.dumps(body["content"]["application/json"]["example"]).encode()

    assert parse(ChatRequest, example("/v1/chat/completions")).calls()
    assert parse(CompletionRequest, example("/v1/completions")).calls()
