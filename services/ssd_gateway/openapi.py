"""The OpenAPI document of the gateway, which ``/openapi.json`` serves."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ssd import __version__
from ssd.rpc.codec import MAX_PRIORITY
from ssd.rpc.sampling_codec import RANGES
from ssd_gateway.fields import MISSING_STRUCTURES
from ssd_gateway.schemas import (
    MISSING_FEATURES,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
)

_Schema = dict[str, Any]
_REFS = "#/components/schemas/{model}"
_ERRORS = {
    400: "A field is missing, unknown, of a wrong type or out of range.",
    401: "The API key is missing or wrong.",
    403: "The header Host is not accepted without an API key.",
    404: "No such model or path.",
    408: "The request took too long.",
    413: "The body is too large.",
    415: "The body is not declared as JSON, or is compressed.",
    429: "The server is overloaded; Retry-After has the seconds to wait.",
    500: "An internal error.",
    503: "No target is ready; Retry-After has the seconds to wait.",
}
_EXAMPLES: Mapping[type[BaseModel], _Schema] = {
    ChatRequest: {
        "model": "target",
        "messages": [{"role": "user", "content": "Return the largest item of a list."}],
        "max_tokens": 64,
    },
    CompletionRequest: {"model": "target", "prompt": "def fib(n):", "max_tokens": 64},
}
"""Bodies that a page shows; the model is that of ``ssd up``."""
_BOUNDS: Mapping[str, tuple[float, float]] = {
    **RANGES,
    "top_logprobs": RANGES["logprobs"],
    "max_completion_tokens": RANGES["max_tokens"],
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
}
"""Bounds of numbers that targets check."""
_OF_MODELS = (401, 403, 404, 429, 500, 503)


def document() -> _Schema:
    """Return the document."""
    schemas: _Schema = {}
    paths = {
        "/v1/chat/completions": _generation(ChatRequest, "ChatCompletion", schemas),
        "/v1/completions": _generation(CompletionRequest, "Completion", schemas),
        "/v1/models": {"get": _operation("The models of all ready targets.", "ModelList")},
        "/v1/models/{model}": {
            "get": _operation("A model.", "Model")
            | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]}
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "SSD gateway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas | _RESPONSES,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _generation(kind: type[BaseModel], answer: str, schemas: _Schema) -> _Schema:
    """Return the path of an endpoint that generates text; adds the schema of its body."""
    body = kind.model_json_schema(ref_template=_REFS)
    schemas |= body.pop("$defs")
    body["properties"]["model"] = _TEXT
    body["required"] = ["model", *body["required"]]
    for name in _BOUNDS.keys() & body["properties"].keys():
        _set_bounds(body["properties"][name], *_BOUNDS[name])
    # A feature of one endpoint can be missing in the other.
    missing = MISSING_FEATURES.keys() - body["properties"].keys()
    body["properties"] |= _missing({name: MISSING_FEATURES[name] for name in sorted(missing)})
    schemas["StructuredOutputs"]["properties"] |= _missing(MISSING_STRUCTURES)
    body["properties"] |= {name: {"description": "No effect."} for name in sorted(WITHOUT_EFFECT)}
    body["additionalProperties"] = False
    schemas[kind.__name__] = body
    operation = _operation("Text, whole or as a stream of events.", answer, tuple(_ERRORS))
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _TEXT}
    content = {"application/json": {"schema": _ref(kind.__name__), "example": _EXAMPLES[kind]}}
    return {"post": operation | {"requestBody": {"required": True, "content": content}}}


def _set_bounds(field: _Schema, lowest: float, highest: float) -> None:
    """Set the bounds of the numbers that a field accepts; a truth value has none."""
    for accepted in field.get("anyOf", [field]):
        if accepted["type"] in ("integer", "number"):
            accepted.pop("exclusiveMaximum", None)
            accepted |= {"minimum": lowest, "maximum": highest}


def _missing(features: Mapping[str, tuple[object, ...]]) -> _Schema:
    """Return the schemas of fields that are accepted only with neutral values."""
    return {
        name: {"enum": list(accepted), "description": "Not supported: asks for nothing."}
        for name, accepted in features.items()
    }


def _operation(summary: str, answer: str, errors: tuple[int, ...] = _OF_MODELS) -> _Schema:
    responses = {str(status): _response(_ERRORS[status], "Error") for status in errors}
    return {"summary": summary, "responses": {"200": _response(summary, answer), **responses}}


def _response(description: str, name: str) -> _Schema:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


def _ref(name: str) -> _Schema:
    return {"$ref": _REFS.format(model=name)}


def _object(optional: _Schema | None = None, **required: _Schema) -> _Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": sorted(required),
        "additionalProperties": False,
    }


def _or_null(schema: _Schema) -> _Schema:
    return {"anyOf": [schema, _NULL]}


def _list(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


_TEXT: _Schema = {"type": "string"}
_COUNT: _Schema = {"type": "integer", "minimum": 0}
_NUMBER: _Schema = {"type": "number"}
_NULL: _Schema = {"type": "null"}
_EXTENSION: _Schema = {"ssd": {"type": "object"}}
_LOGPROB = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_COUNT)}
_CALL = _object(
    id=_TEXT,
    type={"const": "function"},
    function=_object(name=_TEXT, arguments=_TEXT),
)
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)


def _answer(name: str, finish_reasons: list[str], logprobs: _Schema, **content: _Schema) -> _Schema:
    """Return the schema of a response; ``logprobs`` and ``content`` are parts of its choices."""
    choice = _object(
        _EXTENSION,
        index=_COUNT,
        finish_reason={"enum": finish_reasons},
        logprobs=_or_null(logprobs),
        **content,
    )
    return _object(
        _EXTENSION,
        id=_TEXT,
        object={"const": name},
        created=_COUNT,
        model=_TEXT,
        system_fingerprint=_TEXT,
        choices=_list(choice),
        usage=_USAGE,
    )


_RESPONSES: _Schema = {
    "ChatCompletion": _answer(
        "chat.completion",
        ["stop", "length", "tool_calls"],
        _object(
            content=_list(_object(**_LOGPROB, top_logprobs=_list(_object(**_LOGPROB)))),
            refusal=_NULL,
        ),
        message=_object(
            {"tool_calls": _list(_CALL)},
            role={"const": "assistant"},
            content=_or_null(_TEXT),
            refusal=_NULL,
        ),
    ),
    "Completion": _answer(
        "text_completion",
        ["stop", "length"],
        _object(
            tokens=_list(_TEXT),
            token_logprobs=_list(_NUMBER),
            top_logprobs=_list({"type": "object", "additionalProperties": _NUMBER}),
            text_offset=_list(_COUNT),
        ),
        text=_TEXT,
    ),
    "Model": _object(
        id=_TEXT,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_TEXT,
        max_model_len=_COUNT,
    ),
    "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Error": _object(
        error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT))
    ),
}
