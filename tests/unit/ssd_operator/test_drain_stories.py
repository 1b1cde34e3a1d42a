"""Drains with a ReplicaSet that follows at any time, and drafts that start, hang and die."""

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ssd_operator.api.spec import Object
from ssd_operator.observe.pod_state import DRAIN_DEADLINE_ANNOTATION, to_seconds, to_text
from ssd_operator.policy.drain import CellDrafts

DRAIN_SECONDS = 20.0


@dataclass
class Draft:
    """One draft pod, with the state of its process."""

    name: str
    created: float
    scheduled: bool = False
    ready: bool = False
    draining: bool = False
    drained: bool = False
    sessions: int = 0
    annotations: dict[str, str] = field(default_factory=dict)

    def seen(self) -> Object:
        return {
            "metadata": {
                "name": self.name,
                "creationTimestamp": to_text(self.created),
                "annotations": dict(self.annotations),
            },
            "spec": {"nodeName": "n1"} if self.scheduled else {},
            "status": {
                "podIP": "10.0.0.1" if self.scheduled else "",
                "conditions": [{"type": "Ready", "status": str(self.ready)}],
            },
        }

    def may_go(self, now: float) -> bool:
        """Whether it may be removed: it has drained, its deadline is over, or it serves nothing."""
        deadline = to_seconds(self.annotations.get(DRAIN_DEADLINE_ANNOTATION))
        is_late = deadline is not None and deadline <= now
        return self.drained or is_late or not (self.ready or self.draining)


def deletion_order(draft: Draft) -> tuple[bool, bool, int, float]:
    """Sort key of kube-controller-manager, the first pod to delete first."""
    cost = int(draft.annotations.get("controller.kubernetes.io/pod-deletion-cost", "0"))
    return draft.scheduled, draft.ready, cost, -draft.created


class Cell(RuleBasedStateMachine):
    """A draft Deployment, its ReplicaSet, its pods, and an operator that may restart."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.wanted = self.replicas = 3
        self.drafts = [
            Draft(name=name, created=created, scheduled=True, ready=True, sessions=sessions)
            for name, created, sessions in [("a", 0, 1), ("b", 1, 2), ("c", 2, 3)]
        ]
        self.facts: dict[str, str] = {}
        self.names = itertools.count()

    def pick(self, number: int, drafts: list[Draft]) -> Draft:
        return drafts[number % len(drafts)]

    def remove(self, draft: Draft) -> None:
        assert draft.may_go(self.now), draft
        self.drafts.remove(draft)

    @rule(number=st.integers(0, 5))
    def user_scales(self, number: int) -> None:
        self.wanted = number

    @rule(seconds=st.sampled_from([0.5, 21.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def operator_restarts(self) -> None:
        self.facts.clear()

    @rule()
    def replica_set_follows(self) -> None:
        while len(self.drafts) < self.replicas:
            self.drafts.append(Draft(name=f"d{next(self.names)}", created=self.now))
        for draft in sorted(self.drafts, key=deletion_order)[: len(self.drafts) - self.replicas]:
            self.remove(draft)

    @rule()
    def operator_passes(self) -> None:
        sessions = {draft.name: draft.sessions for draft in self.drafts}
        plan = CellDrafts(
            pods=[draft.seen() for draft in self.drafts],
            wanted=self.wanted,
            replicas=self.replicas,
            results=self.facts,
            sessions=sessions,
            drain_seconds=DRAIN_SECONDS,
            now=self.now,
        ).plan(0)
        by_name = {draft.name: draft for draft in self.drafts}
        for mark in plan.marks:
            by_name[mark.pod].annotations |= mark.annotations
        for call in plan.calls:
            assert 0 < call.seconds <= DRAIN_SECONDS + 1
            by_name[call.pod].draining = True
        self.replicas = plan.replicas[0]
        for name in plan.delete_pods:
            self.remove(by_name[name])

    @rule()
    def all_is_well(self) -> None:
        self.operator_passes()
        self.replica_set_follows()
        self.drafts_start()

    @rule()
    def drafts_start(self) -> None:
        """Each pod makes one step: it gets a node, or becomes ready with sessions."""
        for number, draft in enumerate(self.drafts):
            if draft.scheduled and not draft.draining and not draft.ready:
                draft.ready, draft.sessions = True, (number * 3 + int(self.now)) % 5
            draft.scheduled = True

    @precondition(lambda self: self.drafts)
    @rule(number=st.integers(0, 4), is_evicted=st.booleans())
    def draft_dies(self, number: int, is_evicted: bool) -> None:  # noqa: FBT001
        draft = self.pick(number, self.drafts)
        self.facts.pop(draft.name, None)
        if is_evicted:
            self.drafts.remove(draft)
        draft.ready = draft.draining = draft.drained = False
        draft.sessions = 0

    @precondition(lambda self: any(draft.draining for draft in self.drafts))
    @rule(number=st.integers(0, 4), end=st.sampled_from(["unready", "Drained", "Unreachable"]))
    def drain_goes_on(self, number: int, end: str) -> None:
        """The operator and the kubelet observe the end of a drain at different times."""
        draft = self.pick(number, [draft for draft in self.drafts if draft.draining])
        if end == "unready":
            draft.ready = False
        elif end == "Drained":
            draft.sessions, draft.drained = 0, True
        if end == "Drained" or (end == "Unreachable" and not draft.drained):
            self.facts[draft.name] = end

    def teardown(self) -> None:
        """Without disturbance the cell reaches the wanted number."""
        for _ in range(12):
            self.all_is_well()
            self.now += 5
        assert len(self.drafts) == self.replicas == self.wanted
        assert not any(draft.annotations for draft in self.drafts)


TestDrains = Cell.TestCase
TestDrains.settings = settings(max_examples=250, stateful_step_count=25)
