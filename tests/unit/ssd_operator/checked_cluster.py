"""A cluster that fails a test when a write of the operator takes away a pod that serves."""

import copy
from dataclasses import dataclass, field

from tests.unit.ssd_operator.controllers import first_to_go, is_of_template, pods_of, template_hash
from tests.unit.ssd_operator.memory_cluster import MemoryCluster, is_watched

from ssd_operator.api.parse import SpecError, parse
from ssd_operator.api.spec import KIND, Object, drafts_of_cell
from ssd_operator.children.objects import COMPONENT_LABEL, draft_cells
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import cell_of, drain_deadline_of, is_ready, name_of


@dataclass
class CheckedCluster(MemoryCluster):
    """Raises AssertionError at a write that removes what it must not. One resource."""

    drained: set[str] = field(default_factory=set)
    """Drafts that have drained."""
    is_seen: bool = False
    """Whether the pass that writes now has seen everything as it is."""
    seen: Object = field(default_factory=dict)
    """The resource as that pass has seen it; empty for as it is."""
    _rolling: set[str] = field(default_factory=set)
    """Targets that the operator took down, and that are not back."""

    async def apply(self, wanted: Object, uid: str = "", subresource: str = "") -> Object:
        address = wanted["metadata"]["namespace"], Ref(wanted["kind"], wanted["metadata"]["name"])
        if subresource:
            return await super().apply(wanted, uid, subresource)
        before = copy.deepcopy(self.objects.get(address))
        try:
            return await super().apply(wanted, uid)
        finally:
            after = self.objects.get(address)
            self._check_takeover(before, after)
            if wanted["kind"] == "Deployment" and before and after and before != after:
                # A new gateway starts beside the old ones, so it takes nothing down.
                checks = {"draft": self._check_shrink, "target": self._check_roll}
                component = wanted["metadata"]["labels"][COMPONENT_LABEL]
                if component in checks:
                    checks[component](before, after)

    def _check_takeover(self, before: Object | None, after: Object | None) -> None:
        # Children that a deleted resource left have no owner, too.
        has_owner = before is not None and before["metadata"].get("ownerReferences")
        was_foreign = before is not None and not has_owner and not is_watched(before)
        assert not was_foreign or before == after, f"a foreign object is written: {before}"

    def touched(self, name: str) -> None:
        """Another writer changed a target: what follows is not the operator's doing."""
        self._rolling.discard(name)

    def _check_roll(self, before: Object, after: Object) -> None:
        self._rolling = {name for name in self._rolling if not self._is_back(name)}
        if template_hash(before) == template_hash(after) or not self._serves(before):
            return
        others = self._rolling - {name_of(after)}
        assert not others, f"{name_of(after)} serves and is rolled while {others} are down"
        self._rolling.add(name_of(after))

    def _is_back(self, name: str) -> bool:
        found = self.objects.get(("default", Ref("Deployment", name)))
        return found is None or self._serves(found)

    def _serves(self, deployment: Object) -> bool:
        pods = pods_of(self, deployment)
        return any(is_ready(pod) and is_of_template(pod, deployment) for pod in pods)

    def _check_shrink(self, before: Object, after: Object) -> None:
        try:
            resource = parse(self.seen or self.of_kind(KIND)[0])
        except SpecError:
            return
        number, cells = after["spec"]["replicas"], len(draft_cells(resource))
        wanted = drafts_of_cell(resource.spec.draft.replicas, cells, cell_of(after))
        assert number >= wanted, f"{name_of(after)} has {number} replicas, {wanted} are wanted"
        if number >= before["spec"]["replicas"]:
            return
        pods = pods_of(self, after)
        gone = first_to_go(pods, len(pods) - number) if len(pods) > number else []
        serving = [name_of(pod) for pod in gone if is_ready(pod) and not self._is_done(pod)]
        spared = [name_of(pod) for pod in pods if pod not in gone and self._is_done(pod)]
        assert not (serving and spared), f"{serving} go while {spared} had drained"
        assert not (serving and self.is_seen), f"{serving} go and were not drained"

    def _is_done(self, pod: Object) -> bool:
        deadline = drain_deadline_of(pod)
        return name_of(pod) in self.drained or (deadline is not None and deadline <= self.now)
