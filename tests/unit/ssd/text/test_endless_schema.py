"""JSON schemas whose texts contain themselves without end."""

from typing import Any

import pytest

from ssd.text.endless_schema import endless_place

ITSELF = {"$ref": "#"}
NODE = {"type": "object", "properties": {"a": ITSELF}, "required": ["a"]}
OF_TWO = {
    "A": {"type": "object", "properties": {"b": {"$ref": "#/$defs/B"}}, "required": ["b"]},
    "B": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]},
}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (NODE, "#"),
        (NODE | {"type": ["object"]}, "#"),
        ({"type": "array", "minItems": 1, "items": ITSELF}, "#"),
        ({"allOf": [{"type": "object"}, ITSELF]}, "#"),
        ({"$ref": "#/$defs/A", "$defs": OF_TWO}, "#/$defs/A"),
        ({"$ref": "#/$defs/x~1y", "$defs": {"x/y": {"$ref": "#/$defs/x~1y"}}}, "#/$defs/x~1y"),
        ({"$id": "http://a/b"} | NODE, "#"),
    ],
)
def test_a_schema_that_must_contain_itself_is_found(schema: dict[str, Any], place: str) -> None:
    assert endless_place(schema) == place


@pytest.mark.parametrize(
    "schema",
    [
        {},
        # A number has no properties, so it satisfies this one.
        {"properties": {"a": ITSELF}, "required": ["a"]},
        NODE | {"type": ["object", "null"]},
        NODE | {"required": []},
        NODE | {"required": ["b"]},
        NODE | {"properties": {"a": {"anyOf": [ITSELF, {"type": "null"}]}}},
        {"type": "array", "items": ITSELF},
        {"type": "array", "minItems": 1, "prefixItems": [{}], "items": ITSELF},
        {"$defs": OF_TWO},
        # Two places refer to a third, which ends.
        {
            "allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}],
            "$defs": {"x": {"type": "object"}},
        },
        # "#" is the inner document.
        {
            "type": "object",
            "properties": {"a": {"$id": "http://a/b", "allOf": [{"not": ITSELF}, {}]}},
            "required": ["a"],
        },
        {"type": "object", "properties": {"a": {"$id": "x", "$ref": "#"}}, "required": ["a"]},
        {"$ref": "http://a/b"},
        {"$ref": "#name", "$defs": {"x": {"$anchor": "name"}}},
        {"$ref": "#/$defs/none"},
        {"$ref": 1, "allOf": 1, "required": 1},
    ],
)
def test_a_schema_that_may_have_a_finite_text_is_not_refused(schema: dict[str, Any]) -> None:
    assert endless_place(schema) is None


def test_a_long_chain_of_references_is_followed() -> None:
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(20_000)}
    assert endless_place({"$ref": "#/$defs/0", "$defs": chain}) is None
    last = {"20000": {"$ref": "#/$defs/0"}}
    assert endless_place({"$ref": "#/$defs/0", "$defs": chain | last}) is not None
