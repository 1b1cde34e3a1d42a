"""After any sequence of changes and failures, a resource converges and nothing is written."""

import contextlib
import copy
from collections.abc import Coroutine, Iterator
from itertools import count
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.unit.ssd_operator.checked_cluster import CheckedCluster
from tests.unit.ssd_operator.memory_cluster import LostAnswerError
from tests.unit.ssd_operator.resources import SETTINGS, replicas_of
from tests.unit.ssd_operator.world import KEY, RESOURCE, World

from ssd_operator.api.parse import parse
from ssd_operator.api.spec import Object
from ssd_operator.children.manifests import wanted
from ssd_operator.children.objects import WATCHED_KINDS
from ssd_operator.observe.cluster import (
    BusyError,
    ClusterError,
    ConflictError,
    MissingError,
    Ref,
    RefusedError,
    ref_of,
)
from ssd_operator.observe.diff import matches

ResultT = TypeVar("ResultT")
INDEX = st.integers(0, 30)
IMAGE = st.sampled_from(["localhost/a:1", "localhost/b:1"])
COMPONENT = st.sampled_from(["target", "draft"])
ERRORS = (
    MissingError("404"),
    ConflictError("409"),
    RefusedError("422"),
    BusyError("429", 3.0),
    BusyError("500"),
    LostAnswerError("no answer in time"),
)
MOST_ALONE = 3
"""Passes that may write although nothing but the operator moved."""
MOST_ROUNDS = 40
_PLAIN = settings(
    stateful_step_count=12,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),  # explaining traces it all
)


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of a coroutine that never waits. An event loop for each would take longer."""
    try:
        work.send(None)
    except StopIteration as end:
        result: ResultT = end.value
        return result
    raise AssertionError("the coroutine waits")


class Disturbances(RuleBasedStateMachine):
    """One resource, its operator, and all other writers of its objects."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(draft={"replicas": 3})
        assert isinstance(self.world.cluster, CheckedCluster)
        self.cluster = self.world.cluster
        self.taken: set[Ref] = set()
        """Names of children that other objects have."""
        self.numbers = count(1)
        self.was_refused = False
        self.num_steps = 0
        self.length = 1
        """Disturbances between two checks."""

    @initialize(
        cells=st.integers(1, 3), sharing=st.sampled_from(["Cell", "Pool"]), length=st.integers(1, 8)
    )
    def begin(self, cells: int, sharing: str, length: int) -> None:
        self.length = length
        self.world.edit_spec(target={"replicas": cells}, draft={"sharing": sharing})
        self.calm_down()

    # ---- the user

    @rule(number=st.integers(0, 4))
    def scale_drafts(self, number: int) -> None:
        self.world.edit_spec(draft={"replicas": number})

    @rule(number=st.integers(1, 3))
    def scale_cells(self, number: int) -> None:
        self.world.edit_spec(target={"replicas": number})

    @rule(image=IMAGE, component=COMPONENT)
    def change_an_image(self, image: str, component: str) -> None:
        self.world.edit_spec(**{component: {"image": image}})

    @rule(number=st.integers(2, 4))
    def change_what_all_pods_have(self, number: int) -> None:
        self.world.edit_spec(speculation={"lookahead": number})

    # ---- other writers

    @precondition(lambda self: self.children())
    @rule(index=INDEX, is_taken=st.booleans())
    def delete_a_child(self, index: int, *, is_taken: bool) -> None:
        ref = self.pick(index)
        self.cluster.touched(ref.name)
        if is_taken:
            self.world.take_name(ref)
            self.taken.add(ref)
        else:
            self.world.remove(ref)

    @precondition(lambda self: self.children())
    @rule(index=INDEX, labels=st.sampled_from([{}, {"app.kubernetes.io/name": "theirs"}]))
    def edit_labels(self, index: int, labels: dict[str, str]) -> None:
        with self.world.edited(self.pick(index)) as child:
            child["metadata"]["labels"] = child["metadata"]["labels"] | labels if labels else {}

    @rule(image=IMAGE, component=COMPONENT, has_followed=st.booleans())
    def edit_templates(self, image: str, component: str, *, has_followed: bool) -> None:
        for ref in self.children("Deployment"):
            if component in ref.name:
                with self.edited_deployment(ref) as spec:
                    spec["template"]["spec"]["containers"][0]["image"] = image
        if has_followed:
            self.world.controllers.settle()

    @precondition(lambda self: self.children("Deployment"))
    @rule(index=INDEX, has_followed=st.booleans())
    def add_a_variable_and_pause(self, index: int, *, has_followed: bool) -> None:
        with self.edited_deployment(self.pick(index, "Deployment")) as spec:
            spec["paused"] = True
            container = spec["template"]["spec"]["containers"][0]
            container["env"] = [{"name": f"EXTRA_{next(self.numbers)}"}, *container["env"]]
        if has_followed:
            self.world.controllers.settle()

    @precondition(lambda self: self.children("Service"))
    @rule(index=INDEX)
    def add_a_key_to_a_selector(self, index: int) -> None:
        with self.world.edited(self.pick(index, "Service")) as service:
            service["spec"].setdefault("selector", {})["extra"] = "x"

    @precondition(lambda self: self.children("Deployment"))
    @rule(index=INDEX, number=st.integers(0, 5))
    def edit_replicas(self, index: int, number: int) -> None:
        with self.edited_deployment(self.pick(index, "Deployment")) as spec:
            spec["replicas"] = number

    # ---- what breaks

    @precondition(lambda self: self.engines())
    @rule(index=INDEX, how=st.sampled_from(["evicted", "killed", "unready"]))
    def lose_a_pod(self, index: int, how: str) -> None:
        pods = self.engines()
        pod = pods[index % len(pods)]
        if how == "evicted":
            self.world.remove(ref_of(pod))
        elif how == "killed":
            self.world.controllers.kill(pod)
        else:
            self.world.controllers.make_unready(pod)

    @rule()
    def lose_preflights(self) -> None:
        for pod in self.world.controllers.preflights():
            self.world.remove(ref_of(pod))

    @rule()
    def let_pods_recover(self) -> None:
        self.world.controllers.broken.clear()

    @rule()
    def restart_the_operator(self) -> None:
        self.world.restart()
        self.world.catch_up()  # passes begin when all is listed

    @rule(num_good=st.integers(0, 6), error=st.sampled_from(ERRORS))
    def let_a_call_fail(self, num_good: int, error: ClusterError) -> None:
        self.cluster.failures = [*(None for _ in range(num_good)), error]
        self.was_refused |= isinstance(error, RefusedError)

    # ---- time

    @rule(kinds=st.sets(st.sampled_from(sorted(WATCHED_KINDS))))
    def pass_with_a_stale_index(self, kinds: set[str]) -> None:
        self.world.catch_up(kinds)
        self.run_pass(is_seen=False)

    @rule()
    def pass_with_a_fresh_index(self) -> None:
        self.world.catch_up()
        self.run_pass(is_seen=True)

    @rule(number=st.integers(1, 4))
    def let_controllers_work(self, number: int) -> None:
        for _ in range(number):
            self.world.controllers.step()

    @rule()
    def let_drains_end(self) -> None:
        self.finish_drains()

    @rule(seconds=st.sampled_from([1.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.now += seconds

    @invariant()
    def disturbances_end(self) -> None:
        self.num_steps += 1
        if self.num_steps % self.length == 0:
            self.calm_down()

    # ---- what must hold

    def calm_down(self) -> None:
        """Wait until the resource has converged, without further disturbances."""
        self.world.controllers.broken.clear()
        self.cluster.failures = []
        for ref in self.taken:
            self.world.remove(ref)
        self.taken.clear()
        if self.was_refused:  # not sent again before the resource is edited
            self.world.edit_spec(observability={"traceRatio": f"0.{next(self.numbers)}"})
            self.was_refused = False
        self.come_to_rest()
        self.check_that_all_is_well()
        self.check_that_idling_writes_nothing()

    def come_to_rest(self) -> None:
        num_alone = 0
        for _ in range(MOST_ROUNDS):
            num_writes = len(self.cluster.writes)
            self.idle(2.0)
            has_drained = self.finish_drains()
            has_moved = self.world.controllers.settle() or has_drained
            if not has_moved and len(self.cluster.writes) == num_writes:
                return
            num_alone += not has_moved
            assert num_alone <= MOST_ALONE, self.cluster.writes[-5:]
        raise AssertionError(f"no rest: {self.cluster.writes[-5:]}")

    def check_that_all_is_well(self) -> None:
        resource = parse(self.world[RESOURCE])
        for child in wanted(resource, SETTINGS, replicas_of(resource)):
            assert matches(self.world[ref_of(child)], child), ref_of(child)
        assert len(self.world.ready_pods("target")) == resource.spec.num_cells
        assert len(self.world.ready_pods("draft")) == resource.spec.draft.replicas
        for kind in ("Ready", "DraftReady", "Progressing", "SpecValid", "ResourcesOwned"):
            assert self.world.condition(kind)[0] == "True", kind
        assert self.world.condition("Progressing")[1] == "UpToDate"

    def check_that_idling_writes_nothing(self) -> None:
        self.idle(61.0)  # measurements of links may be written once a minute
        num_writes = len(self.cluster.writes)
        self.idle(61.0)
        self.world.restart()
        self.idle(61.0)
        assert self.cluster.writes[num_writes:] == []

    # ---- how

    def idle(self, seconds: float) -> None:
        self.cluster.now += seconds
        self.world.catch_up()
        self.run_pass(is_seen=True)

    def run_pass(self, *, is_seen: bool) -> None:
        self.world.report_links()
        self.cluster.is_seen = is_seen
        self.cluster.seen = copy.deepcopy(self.world.cache.resource(KEY) or {})
        again_after = run(self.world.try_pass())
        assert again_after > 0, "passes would follow each other at once"
        self.cluster.is_seen = False

    def finish_drains(self) -> bool:
        has_finished = self.world.engines.finish()
        self.cluster.drained |= self.world.drains.keys()
        return has_finished

    def children(self, kind: str = "") -> list[Ref]:
        """Without preflights, which come and go."""
        refs = [ref for ref in self.world.children() if ref.kind != "Pod"]
        return [ref for ref in refs if kind in ("", ref.kind)]

    def engines(self) -> list[Object]:
        preflights = self.world.controllers.preflights()
        return [pod for pod in self.cluster.of_kind("Pod") if pod not in preflights]

    def pick(self, index: int, kind: str = "") -> Ref:
        refs = self.children(kind)
        return refs[index % len(refs)]

    @contextlib.contextmanager
    def edited_deployment(self, ref: Ref) -> Iterator[Object]:
        """The spec of a Deployment; what the controllers do next is not the operator's doing."""
        self.cluster.touched(ref.name)
        with self.world.edited(ref) as found:
            yield found["spec"]


@pytest.mark.timeout(60)
def test_a_resource_converges_after_disturbances() -> None:
    run_state_machine_as_test(Disturbances, settings=settings(_PLAIN, max_examples=8))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_resource_converges_after_many_long_sequences_of_disturbances() -> None:
    many = settings(_PLAIN, max_examples=300, stateful_step_count=30)
    run_state_machine_as_test(Disturbances, settings=many)
