"""Does the cluster already hold what we want?

A pass that writes nothing must know it without asking: the API server adds defaults, other writers
add fields of their own, and numbers come back in another spelling. What we no longer want is not
seen here but by the hash in our annotations, which then differs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Whether applying ``wanted`` would change nothing; see ``differences``."""
    return next(differences(live, wanted), None) is None


def differences(live: Object, wanted: Object) -> Iterator[str]:
    """Paths at which ``live`` is not what we want, such as ``spec.template.spec.containers``.

    Every leaf that we own equals the live one: lists with a merge key by that key, other lists as a
    whole, quantities as numbers. Fields and items that others add stay. ``apiVersion`` and ``kind``
    are not looked at: items of a list come without them.
    """
    identity = ("apiVersion", "kind")
    ours = {name: value for name, value in wanted.items() if name not in identity}
    return map(".".join, _differences(live, ours, ()))


def _differences(live: Any, wanted: Any, path: Path) -> Iterator[Path]:
    if isinstance(wanted, dict) and isinstance(live, dict):
        for name, value in wanted.items():
            if name in live:
                yield from _differences(live[name], value, (*path, name))
            elif not _is_dropped(value, name):
                yield (*path, name)
    elif isinstance(wanted, list) and isinstance(live, list):
        yield from _differences_of_lists(live, wanted, path)
    elif not _equals(live, wanted, path):
        yield path


def _differences_of_lists(live: Sequence[Any], wanted: Sequence[Any], path: Path) -> Iterator[Path]:
    keys = _MERGE_KEYS.get(path[-2:])
    if keys is None:
        if len(live) != len(wanted):
            yield path
            return
        for there, here in zip(live, wanted, strict=True):
            yield from _differences(there, here, path)
        return
    identity = _identity(keys)
    found = {identity(each): each for each in live}
    for each in wanted:
        if identity(each) in found:
            yield from _differences(found[identity(each)], each, path)
        else:
            yield path


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
