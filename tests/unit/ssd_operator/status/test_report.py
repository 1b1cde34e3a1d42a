"""When a status is written, and the Events of its changes."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_operator.api.schema import crd
from ssd_operator.api.spec import RESOURCE_KINDS, Object
from ssd_operator.observe.pod_state import Address
from ssd_operator.policy.drain import Drain, DrainPlan
from ssd_operator.policy.plan import PlanState
from ssd_operator.status.report import (
    QUIET_SECONDS,
    Event,
    Log,
    drain_events,
    due,
    needs_write,
    report_deleted,
    status_events,
)

STATUS: Object = {
    "observedGeneration": 1,
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Serving",
            "message": "1 of 1 targets serve.",
            "lastTransitionTime": "then",
        }
    ],
    "draft": {"summary": "1/1", "lastScaleTime": "then"},
    "links": [{"target": "t", "draft": "d", "roundTripMicroseconds": 100, "state": "Active"}],
    "speculation": {"tokensPerRound": "3.1", "hitRate": "0.86"},
}


def changed(*path: str | int, to: object) -> Object:
    status = deepcopy(STATUS)
    part = status
    for name in path[:-1]:
        part = part[name]  # type: ignore[index]
    part[path[-1]] = to  # type: ignore[index]
    return status


FLIPS = [
    changed("conditions", 0, "status", to="False"),
    changed("conditions", 0, "reason", to="ServingPartly"),
    changed("conditions", 0, "message", to="1 of 2 targets serve."),
    changed("draft", "summary", to="0/1"),
    changed("observedGeneration", to=2),
    changed("links", 0, "state", to="Lost"),
    changed("links", to=[]),
    changed("links", 0, "roundTripMicroseconds", to=0),
]


@pytest.mark.parametrize("new", FLIPS)
def test_a_change_of_state_is_written_at_once_but_not_twice_a_second(new: Object) -> None:
    assert needs_write(STATUS, new, 1.0)
    assert not needs_write(STATUS, new, 0.9)


SCALED, SCALED_MORE = (
    changed("conditions", 0, to={"type": "ScalingActive", "reason": "Internal", "message": demand})
    for demand in ("6.0 sequences speculate.", "6.1 sequences speculate.")
)

UNREACHABLE, UNREACHABLE_STILL = (
    changed("conditions", 0, to={"type": "Ready", "reason": "TargetUnreachable", "message": error})
    for error in ("Connection refused.", "Connection reset by peer.")
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (STATUS, changed("links", 0, "roundTripMicroseconds", to=200)),
        (STATUS, changed("links", 0, "reason", to="link_too_slow: 312 us")),
        (STATUS, changed("speculation", "tokensPerRound", to="3.2")),
        (STATUS, changed("speculation", to={})),
        (SCALED, SCALED_MORE),
        (UNREACHABLE, UNREACHABLE_STILL),
    ],
)
def test_measured_values_wait_a_minute(old: Object, new: Object) -> None:
    assert not needs_write(old, new, 59.9)
    assert needs_write(old, new, 60)
    assert needs_write(new, old, 60)
    assert not needs_write(new, deepcopy(new), 1e9)


@pytest.mark.parametrize("new", [STATUS, *FLIPS])
def test_a_condition_of_another_writer_is_not_compared(new: Object) -> None:
    theirs = {"type": "example.com/Audited", "status": "True", "reason": "Done"}
    old = STATUS | {"conditions": [theirs, *STATUS["conditions"]]}
    assert needs_write(old, new, 60) is (new is not STATUS)


def status(drafts: int = 2, **reasons: str) -> Object:
    """A status whose conditions have these reasons."""
    bad = {"NoDrafts", "NameTaken", "Unschedulable", "InsufficientLocalGPUs", "Paused"}
    bad |= {"PreflightFailed", "Loading", "ImagePull", "Forbidden", "ReservedEnv"}
    unknown = {"TargetUnreachable": "Unknown"}
    reasons = {"Ready": "Serving"} | reasons
    return {
        "conditions": [
            {
                "type": kind,
                "status": unknown.get(reason, str(reason not in bad)),
                "reason": reason,
                "message": f"{reason}.",
            }
            for kind, reason in reasons.items()
        ],
        "target": {"revision": "r1"},
        "draft": {"desiredReplicas": drafts, "revision": "r2"},
    }


def with_reason(kind: str, reason: str) -> Object:
    reasons: dict[str, Any] = {kind: reason}
    return status(**reasons)


KEPT = [
    ("Progressing", "RollingOut"),
    ("Progressing", "PreflightFailed"),
    ("ResourcesOwned", "NameTaken"),
    ("DraftReady", "ImagePull"),
    ("SpeculationActive", "NoDrafts"),
    ("TargetReady", "Unschedulable"),
]
CHANGES: list[tuple[Object, Object, list[str]]] = [
    ({}, status(), ["Created"]),
    (status(), status(), []),
    *((with_reason(*each), with_reason(*each), []) for each in KEPT),
    (status(drafts=1), status(drafts=3), ["DraftsScaled"]),
    (status(), status() | {"draft": {"desiredReplicas": 2, "revision": "r3"}}, ["RevisionChanged"]),
    (
        status(drafts=1, SpeculationActive="Active"),
        status(drafts=0, SpeculationActive="NoDrafts"),
        ["DraftsScaled"],
    ),
    (
        status(SpeculationActive="Active"),
        status(Ready="Unschedulable", SpeculationActive="NoDrafts"),
        [],
    ),
]
REASONS = [
    ("Progressing", "RollingOut", "UpToDate", ["RolledOut"]),
    ("Progressing", "RollingOut", "Paused", []),
    ("Progressing", "RollingOut", "Preflight", []),
    ("Progressing", "Preflight", "UpToDate", []),
    ("Progressing", "Preflight", "PreflightFailed", ["PreflightFailed"]),
    ("SpeculationActive", "NoDrafts", "Active", ["SpeculationOn"]),
    ("SpeculationActive", "Active", "NoDrafts", ["SpeculationOff"]),
    ("SpeculationActive", "Active", "TargetUnreachable", []),
    ("ResourcesOwned", "Owned", "NameTaken", ["NameTaken"]),
    ("ResourcesOwned", "Owned", "Forbidden", ["Forbidden"]),
    ("TargetReady", "Loading", "Unschedulable", ["Unschedulable"]),
    ("TargetReady", "AllReady", "Loading", []),
    ("DraftCapacity", "Sufficient", "InsufficientLocalGPUs", ["InsufficientLocalGPUs"]),
    ("DraftReady", "Loading", "Unschedulable", []),
    ("DraftReady", "Loading", "ImagePull", ["ImagePull"]),
    ("SpecValid", "Valid", "ReservedEnv", ["ReservedEnv"]),
]
"""A condition, its reasons before and after, and the Events."""
CHANGES += [
    (with_reason(kind, old), with_reason(kind, new), found) for kind, old, new, found in REASONS
]


@pytest.mark.parametrize(("old", "new", "reasons"), CHANGES)
def test_status_changes_have_events(old: Object, new: Object, reasons: list[str]) -> None:
    assert [event.reason for event in status_events(old, new)] == reasons


def test_a_drain_has_an_event_at_its_begin_and_its_end() -> None:
    called, pending = (
        Drain("d0", 9, Address("10.0.0.1"), is_new=True),
        Drain("pending", 0, None, is_new=True),
    )
    begun = DrainPlan(drains=(called, pending, Drain("d1", 9, Address("10.0.0.2"))))
    assert [event.message for event in drain_events(begun, {})] == ["d0 accepts no more sessions."]
    ended = drain_events(DrainPlan(), {"d0": "Drained", "d1": "TimedOut", "running": ""})
    assert [(event.severity, event.reason) for event in ended] == [
        ("Normal", "DraftDrained"),
        ("Warning", "DrainTimedOut"),
    ]


some_events = st.lists(
    st.builds(Event, st.just("Normal"), st.sampled_from("AB"), st.sampled_from("xy"))
)


@given(st.lists(st.tuples(st.floats(0, 500), some_events), max_size=20))
def test_an_event_is_posted_once_in_ten_minutes(passes: list[tuple[float, list[Event]]]) -> None:
    log: Log = {}
    now = 0.0
    posted: dict[Event, float] = {}
    for seconds, events in passes:
        now += seconds
        fresh, log = due(events, log, now)
        assert len(log) <= 4
        for event in set(events):
            is_due = event not in posted or now - posted[event] >= QUIET_SECONDS
            assert fresh.count(event) == is_due
            if is_due:
                posted[event] = now


@pytest.mark.parametrize("kind", sorted(RESOURCE_KINDS))
def test_the_status_of_a_deleted_resource_has_only_fields_of_its_kind(kind: str) -> None:
    metadata = {"generation": 1, "finalizers": ["foregroundDeletion"]}
    resource: Object = {"metadata": metadata, "status": {"conditions": STATUS["conditions"]}}
    report = report_deleted(resource, PlanState(), 1_000_000.0)
    schema = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert report.status.keys() <= schema["properties"]["status"]["properties"].keys()
