"""Does the cluster already hold what we want?

A pass that writes nothing must know it without asking: the API server adds defaults, other writers
add fields of their own, and numbers come back in another spelling. What we no longer want is not
seen here but by the hash in our annotations, which then differs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ssd_operator.quantity import parse_quantity, parse_rounded
from ssd_operator.spec import Object

Path = tuple[str, ...]

_MERGE_KEYS: Mapping[Path, tuple[str, ...]] = {
    ("metadata", "ownerReferences"): ("uid",),
    ("spec", "containers"): ("name",),
    ("spec", "initContainers"): ("name",),
    ("spec", "volumes"): ("name",),
    ("spec", "imagePullSecrets"): ("name",),
    ("containers", "env"): ("name",),
    ("containers", "ports"): ("containerPort", "protocol"),
    ("containers", "volumeMounts"): ("mountPath",),
    ("initContainers", "env"): ("name",),
    ("initContainers", "volumeMounts"): ("mountPath",),
    ("spec", "ports"): ("port", "protocol"),
}
"""Lists that several writers share, by the last two steps to them; others are taken as a whole."""
_KEY_DEFAULTS = {"protocol": "TCP"}
_QUANTITIES = frozenset({"requests", "limits"})
"""Maps of quantities."""
_QUANTITY = frozenset({"sizeLimit", "averageValue", "divisor"})
_DROPPED_WHEN_FALSE = frozenset({"publishNotReadyAddresses", "readOnly"})
"""Fields that the API server leaves out when they are false."""
_DROPPED_WHEN_EMPTY = frozenset(
    {"matchLabels", "labels", "annotations", "nodeSelector", *_QUANTITIES}
)
"""Maps that the API server leaves out when they are empty; other empty objects say something,
``emptyDir`` for one."""


def covers(live: Object, wanted: Object) -> bool:
    """Whether applying ``wanted`` would change nothing.

    Every leaf that we own equals the live one: lists with a merge key by that key, other lists as a
    whole, quantities as numbers. Fields and items that others add stay. ``apiVersion`` and ``kind``
    are not looked at: items of a list come without them.
    """
    identity = ("apiVersion", "kind")
    ours = {name: value for name, value in wanted.items() if name not in identity}
    return _covers(live, ours, ())


def _covers(live: Any, wanted: Any, path: Path) -> bool:
    match wanted:
        case dict():
            return isinstance(live, dict) and _covers_map(live, wanted, path)
        case list():
            return isinstance(live, list) and _covers_list(live, wanted, path)
        case _:
            return _equals(live, wanted, path)


def _covers_map(live: Object, wanted: Object, path: Path) -> bool:
    return all(
        _covers(live[name], value, (*path, name)) if name in live else _is_dropped(value, name)
        for name, value in wanted.items()
    )


def _covers_list(live: Sequence[Any], wanted: Sequence[Any], path: Path) -> bool:
    keys = _MERGE_KEYS.get(path[-2:])
    if keys is None:
        return len(live) == len(wanted) and all(
            _covers(there, here, path) for there, here in zip(live, wanted, strict=True)
        )
    identity = _identity(keys)
    found = {identity(each): each for each in live}
    return all(
        identity(each) in found and _covers(found[identity(each)], each, path) for each in wanted
    )


def _identity(keys: tuple[str, ...]) -> Callable[[Object], tuple[Any, ...]]:
    return lambda item: tuple(item.get(key, _KEY_DEFAULTS.get(key)) for key in keys)


def _is_dropped(value: Any, name: str) -> bool:
    """Whether the API server would store nothing for this value."""
    if value is False:
        return name in _DROPPED_WHEN_FALSE
    if value == {}:
        return name in _DROPPED_WHEN_EMPTY
    return value is None or value in ("", [])


def _equals(live: Any, wanted: Any, path: Path) -> bool:
    if live == wanted:
        return isinstance(live, bool) == isinstance(wanted, bool)
    is_listed = not _QUANTITIES.isdisjoint(path[-2:-1])
    if not is_listed and _QUANTITY.isdisjoint(path[-1:]):
        return False
    number = parse_rounded if is_listed else parse_quantity
    try:
        return number(live) == number(wanted)
    except ValueError:
        return False
