"""Fields that a dataclass and its message have in common, under the same names."""

from dataclasses import fields
from typing import Any


def shared_fields(source: object, kind: Any, *but: str) -> dict[str, Any]:
    """Return the values of a dataclass's fields by name, read from it or from its message.

    Args:
        source: a ``kind``, or the message that has the same field names.
        kind: the dataclass.
        but: names to leave out, because their types differ.
    """
    return {each.name: getattr(source, each.name) for each in fields(kind) if each.name not in but}
