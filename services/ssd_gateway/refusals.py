"""Errors of pydantic in plain words, with the paths of the fields in the body."""

import re
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ssd.errors import FieldError, RequestError

_UNIONS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "stop": "a text or a list of texts",
    "content": "a text or a list of parts",
    "arguments": "a text or an object",
    "tool_choice": "'none', 'auto', 'required', or a function as an object",
    "guided_json": "a JSON schema, as an object or a text",
    "json": "a JSON schema, as an object or a text",
}
"""What a field must be that can be of several types, by the last name of its path."""
_TYPES = {
    "string_type": "a text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "finite_number": "a finite number",
    "string_unicode": "valid Unicode",
}
_BOUNDS = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "too_short": "is empty; it must have at least {min_length} entry",
    "too_long": "has {actual_length} entries, must have at most {max_length}",
}
_SHOWN_CHARACTERS = 34
"""Longer values are not part of a message."""


def refusal(error: ValidationError) -> RequestError:
    """Return the error of a request."""
    details = error.errors(include_url=False)
    # In a union, the error of an alternative with the right type explains more.
    first = next((detail for detail in details if _has_right_type(detail)), details[0])
    kind, place = first["type"], path(first["loc"])
    if kind == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['msg'].partition(': ')[2]}")
    if kind == "model_type" and not place:
        return RequestError("the body is not a JSON object")
    if kind == "value_error":
        place, _, message = first["msg"].removeprefix("Value error, ").partition(": ")
        return FieldError(place, message)
    return FieldError(place, _message(first))


def _has_right_type(error: ErrorDetails) -> bool:
    """Whether a value has a type that its field accepts."""
    is_no_literal = error["type"] == "literal_error" and isinstance(error["input"], dict | list)
    return error["type"] not in _TYPES and not is_no_literal


def _message(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return "unrecognized request argument"
    if kind in _TYPES:
        names = [part for part in error["loc"] if part in _UNIONS]
        return f"must be {_UNIONS[str(names[-1])] if names else _TYPES[kind]}"
    context: Mapping[str, object] = error.get("ctx", {})
    if kind in _BOUNDS:
        # The message of a list has the number of entries instead of the value.
        return _shown(error["input"]) + _BOUNDS[kind].format(**context)
    if kind == "literal_error":
        allowed = str(context["expected"]).replace(" or ", ", ").replace("'", "")
        return f"{_shown(error['input'])}must be one of {allowed}"
    return error["msg"][0].lower() + error["msg"][1:]


def _shown(value: object) -> str:
    """Return the beginning of a message: the value, if it is a short number or text."""
    shown = repr(value) if isinstance(value, int | float | str) else ""
    return f"is {shown}, " if 0 < len(shown) <= _SHOWN_CHARACTERS else ""


def path(location: tuple[int | str, ...]) -> str:
    """Return the path of a field, without the names of the alternatives of a union."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[a-z_]+", part) and part not in ("str", "int", "float", "bool"):
            text += f".{part}" if text else part
    return text
