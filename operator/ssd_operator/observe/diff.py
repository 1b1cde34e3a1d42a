"""Differences between a live object and the wanted one. Pure.

A pass compares, so that it makes no call if nothing is to be written. The API server adds defaults,
other writers add fields of their own, and numbers are returned in another spelling. Some fields are
owned as a whole, except in pods: selectors, variables, limits, allowed clients. A field that is no
longer wanted is not found here; the hash in our annotations differs then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ssd_operator.api.fields import parse_quantity, parse_rounded
from ssd_operator.api.spec import Object

Path = tuple[str, ...]
_Difference = tuple[Path, bool]
"""Where, and whether another writer has added it and may not."""

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
"""Lists that several writers share, by the last two steps to them; others are compared whole."""
_KEY_DEFAULTS = {"protocol": "TCP"}
_WHOLE = frozenset(
    {
        *("selector", "podSelector", "namespaceSelector", "labelSelector", "nodeSelector"),
        *("ingress", "env", "limits"),
    }
)
"""Fields below which every key is ours: a selector with one more key selects nothing, and a
variable is a setting of the process."""
_DEFAULTED = frozenset({"apiVersion", "divisor"})
"""Keys that the API server adds there, to ``fieldRef`` and ``resourceFieldRef``."""
_OURS_IF_ABSENT: Mapping[Path, frozenset[str]] = {
    (containers,): frozenset({"args", "envFrom"}) for containers in ("containers", "initContainers")
}
"""Fields that we leave empty and no other writer may fill."""
_QUANTITIES = frozenset({"requests", "limits"})
"""Maps of quantities."""
_QUANTITY = frozenset({"sizeLimit", "averageValue", "divisor"})
_DROPPED_WHEN_FALSE = frozenset({"paused", "publishNotReadyAddresses", "readOnly"})
"""Fields that the API server omits when they are false."""
_DROPPED_WHEN_EMPTY = frozenset(
    {"matchLabels", "labels", "annotations", "nodeSelector", *_QUANTITIES}
)
"""Maps that the API server omits when they are empty. Other empty objects have a meaning,
for example ``emptyDir``."""


_STRINGS = frozenset({("labels",), ("annotations",), ("matchLabels",), ("nodeSelector",)})
"""Maps whose empty values are stored."""


def matches(live: Object, wanted: Object) -> bool:
    """Whether applying ``wanted`` would change nothing; see ``differences``."""
    return next(differences(live, wanted), None) is None


def differences(live: Object, wanted: Object) -> Iterator[str]:
    """Paths at which ``live`` differs from ``wanted``, such as ``spec.template.spec.containers``.

    Lists with a merge key are compared by that key, other lists as a whole, quantities as numbers.
    Fields and items of other writers are no difference, except below fields that we own as a whole:
    an added variable or selector changes the meaning of ours. ``apiVersion`` and ``kind`` are not
    compared: items of a list come without them.
    """
    return (".".join(path) for path, _ in _all_differences(live, wanted))


def has_additions(live: Object, wanted: Object) -> bool:
    """Whether others have added items or keys below fields that we own.

    An apply removes added keys of atomic maps, but no items of a list that is merged by a key.
    """
    return any(is_addition for _, is_addition in _all_differences(live, wanted))


def without_additions(live: Object, wanted: Object) -> Object:
    """The merge patch that removes what ``has_additions`` finds, and nothing else of others.

    A merge patch replaces lists: each has the items that other writers may add. ``metadata`` is
    not patched.
    """
    about = ("apiVersion", "kind", "metadata")
    ours = {name: value for name, value in wanted.items() if name not in about}
    there = {name: live[name] for name in ours if name in live}
    return _merge_patch(there, _pruned(there, ours, ()))


def _pruned(live: Any, wanted: Any, path: Path) -> Any:
    """``live`` with our values, and without additions below fields that we own."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        kept = {
            name: _pruned(value, wanted[name], (*path, name)) if name in wanted else value
            for name, value in live.items()
            if name in wanted or not _is_addition(name, live, path)
        }
        missing = wanted.keys() - live.keys()
        return kept | {
            name: wanted[name] for name in missing if not _is_dropped(wanted[name], name)
        }
    keys = _MERGE_KEYS.get(path[-2:])
    if keys is None or not (isinstance(wanted, list) and isinstance(live, list)):
        return live if next(_differences(live, wanted, path), None) is None else wanted
    identity = _identity(keys)
    mine = {identity(each): each for each in wanted}
    items = [
        _pruned(each, mine.pop(identity(each)), path) if identity(each) in mine else each
        for each in live
        if identity(each) in mine or path[-1:] != ("env",)
    ]
    return [*items, *mine.values()]


def _merge_patch(before: Object, after: Object) -> Object:
    """What turns one object into another: null removes a key, lists are replaced."""
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    return {name: None for name in before if name not in after} | {
        name: _merge_patch(before[name], value)
        if isinstance(value, dict) and isinstance(before.get(name), dict)
        else value
        for name, value in changed.items()
    }


def _all_differences(live: Object, wanted: Object) -> Iterator[_Difference]:
    identity = ("apiVersion", "kind")
    ours = {name: value for name, value in wanted.items() if name not in identity}
    found = _differences(live, ours, ())
    if wanted.get("kind") == "Pod":
        # Admission adds variables and limits to pods, and nothing can remove them from a live pod.
        return (each for each in found if not each[1])
    return found


def _differences(live: Any, wanted: Any, path: Path) -> Iterator[_Difference]:
    if isinstance(wanted, dict) and isinstance(live, dict):
        for name, value in wanted.items():
            if name in live:
                yield from _differences(live[name], value, (*path, name))
            elif path[-1:] in _STRINGS or not _is_dropped(value, name):
                yield (*path, name), False
        for name in live.keys() - wanted.keys():
            if _is_addition(name, live, path):
                yield (*path, name), True
    elif isinstance(wanted, list) and isinstance(live, list):
        yield from _differences_of_lists(live, wanted, path)
    elif not _equals(live, wanted, path):
        yield path, False


def _is_addition(name: str, live: Object, path: Path) -> bool:
    """Whether a field that we do not set is one that others may not add."""
    if name in _OURS_IF_ABSENT.get(path[-1:], ()):
        return bool(live[name])
    return not _WHOLE.isdisjoint(path) and name not in _DEFAULTED


def _differences_of_lists(
    live: Sequence[Any], wanted: Sequence[Any], path: Path
) -> Iterator[_Difference]:
    keys = _MERGE_KEYS.get(path[-2:])
    if keys is None:
        if len(live) != len(wanted):
            yield path, False
            return
        for there, here in zip(live, wanted, strict=True):
            yield from _differences(there, here, path)
        return
    identity = _identity(keys)
    found = {identity(each): each for each in live}
    for each in wanted:
        if identity(each) in found:
            yield from _differences(found.pop(identity(each)), each, path)
        else:
            yield path, False
    if path[-1:] == ("env",):
        yield from ((path, True) for _ in found)


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
