"""JSON schemas whose texts never end: an object that must contain itself.

llguidance accepts such a schema, and a text would open objects up to ``max_tokens``.

*Decision*: only what every text of a schema must contain counts: the target of ``$ref``, the
schemas of ``allOf``, required properties of an object, the items of a list that cannot be empty.
*Because* a cycle of these is then certain, so no schema with a finite text is refused. *Not
chosen*: all schemas without a finite text. They need a fixed point over ``anyOf`` and ``oneOf``,
whose time is quadratic in a schema of a client. A schema whose alternatives all contain themselves
is accepted, and its texts end at ``max_tokens``.
"""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeGuard

Schema = dict[str, Any]


def endless_place(schema: Schema) -> str | None:
    """Return the JSON pointer of a place that must contain itself; None if there is none."""
    places = {id(schema): "#"}
    contained: dict[int, list[int]] = {}
    waiting = [schema]
    while waiting:
        outer = waiting.pop()
        needed = contained.setdefault(id(outer), [])
        for path, part in _needed_parts(outer, schema):
            if not _is_open(part, schema):
                continue
            needed.append(id(part))
            if id(part) not in places:
                places[id(part)] = path if path.startswith("#") else places[id(outer)] + path
                waiting.append(part)
    try:
        TopologicalSorter(contained).prepare()
    except CycleError as error:
        return min((places[part_id] for part_id in error.args[1]), key=len)
    return None


def _needed_parts(schema: Schema, root: Schema) -> Iterator[tuple[str, object]]:
    """Yield what each text contains, with pointers: of the document, or from here."""
    if "$ref" in schema:
        # Older drafts ignore the other keywords beside it.
        yield str(schema["$ref"]), _target(schema["$ref"], root)
        return
    for index, part in enumerate(_list(schema.get("allOf"))):
        yield f"/allOf/{index}", part
    if schema.get("type") in ("object", ["object"]):
        properties = schema.get("properties")
        for name in _list(schema.get("required")):
            if isinstance(properties, dict) and isinstance(name, str):
                yield f"/properties/{name}", properties.get(name)
    if schema.get("type") in ("array", ["array"]) and _is_filled(schema):
        yield "/items", schema.get("items")


def _is_filled(schema: Schema) -> bool:
    """Whether a list has an element to which ``items`` applies."""
    least = schema.get("minItems")
    return isinstance(least, int | float) and least >= 1 and "prefixItems" not in schema


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _target(reference: object, root: Schema) -> object:
    """Return the place of this document that a pointer names; None for other references."""
    first, *names = str(reference).split("/")
    place: object = root if first == "#" else None
    for name in names:
        place = (
            place.get(name.replace("~1", "/").replace("~0", "~")) if _is_open(place, root) else None
        )
    return place


def _is_open(place: object, root: Schema) -> TypeGuard[Schema]:
    """Whether ``#`` inside a place means the document; an inner ``$id`` changes it."""
    return isinstance(place, dict) and (place is root or "$id" not in place)
