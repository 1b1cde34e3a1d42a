"""Differences between a live object and the wanted one. Pure.

A pass compares, so that it makes no call if nothing is to be written. The API server adds defaults,
other writers add fields of their own, and numbers are returned in another spelling. Some fields are
owned as a whole, except in pods: selectors, variables, limits, allowed clients. A field that is no
longer wanted is not found here; the hash in our annotations differs then.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ssd_operator.api.fields import parse_quantity
from ssd_operator.api.spec import Object

Path = tuple[str, ...]
_Difference = tuple[Path, bool]
"""Path of a field, and whether another writer has added it and may not."""

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
_DEFAULTED = "apiVersion"
"""Key that the API server adds below these fields, to ``fieldRef``."""
_OURS_IF_ABSENT = frozenset({"args", "envFrom"})
"""Fields of containers that we leave empty and no other writer may fill."""
_QUANTITIES = frozenset({"requests", "limits"})
"""Maps of quantities."""
_QUANTITY = "sizeLimit"
_STRINGS = frozenset({"labels", "annotations", "matchLabels", "nodeSelector"})
"""Maps of strings, whose empty values are stored."""
_DROPPED_WHEN_FALSE = frozenset({"paused", "publishNotReadyAddresses", "readOnly"})
"""Fields that the API server omits when they are false."""
_DROPPED_WHEN_EMPTY = _STRINGS | _QUANTITIES
"""Maps that the API server omits when they are empty. Other empty objects have a meaning,
for example ``emptyDir``."""
_EXCLUDED: Mapping[str, frozenset[str]] = {
    "strategy": frozenset({"rollingUpdate"}),
    "seccompProfile": frozenset({"localhostProfile"}),
    "spec": frozenset({"minAvailable", "loadBalancerSourceRanges"}),
}
"""Fields, by the map that has them, that the API server refuses beside values of ours: together
with Recreate, RuntimeDefault, maxUnavailable and ClusterIP."""
_IDENTITY = frozenset({"apiVersion", "kind"})
"""Fields that are not compared: items of a list come without them."""


def matches(live: Object, wanted: Object) -> bool:
    """Whether applying ``wanted`` would change nothing; see ``differences``."""
    return not differences(live, wanted)


def differences(live: Object, wanted: Object) -> frozenset[str]:
    """Paths at which ``live`` differs from ``wanted``, such as ``spec.template.spec.containers``.

    Lists with a merge key are compared by that key, other lists as a whole, quantities as numbers.
    Fields and items of other writers are no difference, except below fields that we own as a whole:
    an added variable or selector changes the meaning of ours.
    """
    return frozenset(".".join(path) for path, _ in _compare(live, wanted)[1])


def removal(live: Object, wanted: Object) -> Object:
    """The merge patch that removes what others have added below fields that we own; often empty.

    An apply removes added keys of atomic maps, but no items of a list that is merged by a key. A
    merge patch replaces lists: each has the items that other writers may add. ``metadata`` is not
    patched.
    """
    repaired, differing = _compare(live, wanted)
    if not any(is_addition for _, is_addition in differing):
        return {}
    ours = wanted.keys() - _IDENTITY - {"metadata"}
    before, after = ({name: side[name] for name in ours & side.keys()} for side in (live, repaired))
    return _merge_patch(before, after)


def replacement(live: Object, wanted: Object, name: str = "") -> Object:
    """The merge patch that makes room for ``wanted``, whose apply is refused.

    A merge patch replaces lists. Fields of other writers are kept, except those that may be refused
    beside ours. ``name`` is the field of ``wanted`` in its object.
    """
    removed = {each: None for each in _EXCLUDED.get(name, ()) if each in live.keys() - wanted}
    return removed | {
        each: replacement(live[each], value, each)
        if isinstance(value, dict) and isinstance(live.get(each), dict)
        else value
        for each, value in wanted.items()
    }


def _merge_patch(before: Object, after: Object) -> Object:
    """What turns one object into another: null removes a key, lists are replaced."""
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    return {name: None for name in before if name not in after} | {
        name: _merge_patch(before[name], value)
        if isinstance(value, dict) and isinstance(before.get(name), dict)
        else value
        for name, value in changed.items()
    }


def _compare(live: Object, wanted: Object) -> tuple[Object, list[_Difference]]:
    """``live`` with our values and without additions below fields that we own; what differs."""
    differing = list[_Difference]()
    ours = {name: value for name, value in wanted.items() if name not in _IDENTITY}
    repaired = _repair(live, ours, (), differing)
    if wanted.get("kind") == "Pod":
        # Admission adds variables, limits and tolerations to pods, and nothing can remove them from
        # a live pod.
        differing = [(path, is_addition) for path, is_addition in differing if not is_addition]
    return repaired, differing


def _repair(live: Any, wanted: Any, path: Path, differing: list[_Difference]) -> Any:
    """Return a part of ``live`` with our values; add its differences to ``differing``."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        repaired = {}
        for name, value in live.items():
            if name in wanted:
                repaired[name] = _repair(value, wanted[name], (*path, name), differing)
            elif _is_addition(name, live, path):
                differing.append(((*path, name), True))
            else:
                repaired[name] = value
        for name, value in wanted.items():
            if name not in live and not _is_dropped(value, name, path):
                differing.append(((*path, name), False))
                repaired[name] = value
        return repaired
    if isinstance(wanted, list) and isinstance(live, list):
        return _repair_list(live, wanted, path, differing)
    if _equals(live, wanted, path):
        return live
    differing.append((path, False))
    return wanted


def _repair_list(
    live: list[Any], wanted: list[Any], path: Path, differing: list[_Difference]
) -> list[Any]:
    keys = _MERGE_KEYS.get(path[-2:])
    if keys is None and len(live) == len(wanted):
        return [_repair(*pair, path, differing) for pair in zip(live, wanted, strict=True)]
    if keys is None:
        # Kubernetes adds tolerations of unready nodes to each pod.
        is_longer = path[-1:] == ("tolerations",) and all(item in live for item in wanted)
        differing.append((path, is_longer))
        return wanted
    theirs, ours = (
        {tuple(item.get(key, _KEY_DEFAULTS.get(key)) for key in keys): item for item in items}
        for items in (live, wanted)
    )
    repaired = []
    for identity, item in theirs.items():
        if identity in ours:
            repaired.append(_repair(item, ours[identity], path, differing))
        elif path[-1] == "env":
            differing.append((path, True))
        else:
            repaired.append(item)
    missing = [item for identity, item in ours.items() if identity not in theirs]
    differing += [(path, False) for _ in missing]
    return repaired + missing


def _is_addition(name: str, live: Object, path: Path) -> bool:
    """Whether a field that we do not set is one that others may not add."""
    if name in _OURS_IF_ABSENT and path[-1:] in (("containers",), ("initContainers",)):
        return bool(live[name])
    return not _WHOLE.isdisjoint(path) and name != _DEFAULTED


def _is_dropped(value: Any, name: str, path: Path) -> bool:
    """Whether the API server would store nothing for this value."""
    if not _STRINGS.isdisjoint(path[-1:]):
        return False
    if value is False:
        return name in _DROPPED_WHEN_FALSE
    if value == {}:
        return name in _DROPPED_WHEN_EMPTY
    return value is None or value in ("", [])


def _equals(live: Any, wanted: Any, path: Path) -> bool:
    if live == wanted:
        return isinstance(live, bool) == isinstance(wanted, bool)
    is_listed = not _QUANTITIES.isdisjoint(path[-2:-1])
    if not is_listed and path[-1:] != (_QUANTITY,):
        return False
    number = partial(parse_quantity, is_rounded=is_listed)
    try:
        return number(live) == number(wanted)
    except ValueError:
        return False
