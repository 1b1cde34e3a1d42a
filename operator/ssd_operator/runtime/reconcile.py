"""One pass over one resource: look, plan, carry out. Level-triggered; no old against new."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ssd.telemetry import get_logger
from ssd_operator.api.parse import SpecError, carried_on, parse
from ssd_operator.api.spec import KIND, Object, Resource
from ssd_operator.children.config import OperatorConfig
from ssd_operator.children.names import (
    COMPONENT_LABEL,
    UNTOUCHED_NAMESPACE,
    Component,
    is_engine_pod,
    is_released,
    maker_of,
)
from ssd_operator.observe.cluster import (
    Cluster,
    ClusterError,
    ForbiddenError,
    Key,
    MissingError,
    is_owned_by,
)
from ssd_operator.observe.facts import Observed, Ref
from ssd_operator.observe.object_cache import ObjectCache, is_of_former, is_ours
from ssd_operator.observe.optional_children import OptionalChildren, ServedKinds
from ssd_operator.observe.pod_state import endpoints_of, is_leaving, is_ready, name_of, to_seconds
from ssd_operator.observe.snapshot import Planned
from ssd_operator.policy.apply_failures import ApplyFailures, Repairs
from ssd_operator.policy.plan import Memory, Plan, plan
from ssd_operator.runtime.engines import Engines
from ssd_operator.runtime.execution import Cut, Execution
from ssd_operator.runtime.work_queue import DEBOUNCE_SECONDS, RESYNC_SECONDS
from ssd_operator.status.events import due, status_events
from ssd_operator.status.fleet_metrics import FleetMetrics
from ssd_operator.status.status import status_of, status_of_invalid
from ssd_operator.status.status_change import needs_write

PATIENCE_SECONDS = 30.0
"""Calls that fail for longer are told of in the status; for less, the API server is busy."""

_log = get_logger(__name__)


@dataclass(slots=True)
class _Record:
    """What is remembered of one resource; nothing of it is needed to be right."""

    uid: str
    resource: Resource | None = None
    """As it was read last."""
    spec_problem: tuple[str, str] | None = None
    """Why it cannot be read as it is now: reason and message."""
    memory: Memory = field(default_factory=Memory)
    children: frozenset[Ref] = frozenset()
    """Those of the last pass."""
    optional: OptionalChildren = field(default_factory=OptionalChildren)
    repairs: Repairs = field(default_factory=Repairs)
    is_announced: bool = False
    """Whether a status was written, or tried to, before anything was made."""
    failing_since: float | None = None
    """First of the latest passes that were all cut short by a call without an answer."""

    def heed(self, cut: Cut | None, failures: ApplyFailures, now: float) -> None:
        """Learn how a pass ended; a trouble that lasts becomes a setback, which is told of."""
        if cut is None:
            self.failing_since = None
            return
        if self.failing_since is None:
            self.failing_since = now
        if now - self.failing_since >= PATIENCE_SECONDS:
            failures.forbidden[cut.ref] = str(cut.error)


class Reconciler:
    """Carries out what ``plan`` decides. Asyncio loop; one pass a key at a time."""

    def __init__(
        self,
        cluster: Cluster,
        view: ObjectCache,
        engines: Engines,
        config: OperatorConfig,
        now: Callable[[], float],
    ) -> None:
        """Remember the parts; ``now`` is in seconds since the epoch."""
        self._cluster = cluster
        self._view = view
        self._engines = engines
        self._config = config
        self._now = now
        self._records: dict[Key, _Record] = {}
        self._fleet_metrics = FleetMetrics()
        self._served = ServedKinds(cluster, now)

    async def reconcile(self, key: Key) -> float | None:
        """One pass.

        Returns:
            Seconds after which the resource wants to be looked at again, None if it is gone.

        Raises:
            ClusterError: a call failed; what was done so far stays, the next pass goes on.
        """
        if key[0] == UNTOUCHED_NAMESPACE:
            _log.warning("namespace_untouched", reason=f"nothing is written in {key[0]}")
            return None
        found = self._view.resource(key)
        if found is None or is_leaving(found):
            self._forget(key)
            return None
        record = self._records.get(key)
        if record is None or record.uid != found["metadata"]["uid"]:
            self._forget(key)
            record = self._records[key] = _Record(found["metadata"]["uid"])
        resource = _read(found, record)
        if resource is None:
            return await self._refuse(key, found, record)
        if self._is_new(key, found, record):
            return await self._announce(key, found, resource, record)
        try:
            return await self._bring_about(key, found, resource, record)
        except (ForbiddenError, MissingError) as error:
            if isinstance(error, ForbiddenError) and not error.is_leaving:
                raise
            # What is missing may also be an optional kind that was served ten minutes ago.
            self._served.doubt()
            _log.info("namespace_leaves", error=str(error))
            return RESYNC_SECONDS

    def _forget(self, key: Key) -> None:
        self._engines.forget(key)
        self._view.forget(key)
        self._records.pop(key, None)
        self._fleet_metrics.drop(key)

    async def _is_gone(self, key: Key, found: Object) -> bool:
        """Whether a resource that the watch still shows is gone; asked before a pass's first write.

        The garbage collector removes what is made for an owner that does not exist, and its
        events would have it made again, for ever.
        """
        live = await self._cluster.get(key[0], Ref(KIND, key[1]))
        if live is not None and live["metadata"]["uid"] == found["metadata"]["uid"]:
            return is_leaving(live)
        self._view.bury(found)
        self._forget(key)
        return True

    async def _refuse(self, key: Key, found: Object, record: _Record) -> float | None:
        """Tell that a resource cannot be read, and never could; what it made before us goes on."""
        problem = record.spec_problem
        assert problem is not None
        now, old = self._now(), found.get("status") or {}
        status = status_of_invalid(old, found["metadata"]["generation"], problem, now)
        if not needs_write(old, status, now - record.memory.written_at):
            self._fleet_metrics.put(key, status)
            return RESYNC_SECONDS
        return await self._report(key, found, status, record)

    def _is_new(self, key: Key, found: Object, record: _Record) -> bool:
        """Whether a resource has no status and no children yet."""
        return not (found.get("status") or record.is_announced or self._view.children(key))

    async def _announce(
        self, key: Key, found: Object, resource: Resource, record: _Record
    ) -> float | None:
        """Write the first status, and make nothing.

        Children take a dozen calls. Of many resources that were created at once, the last would
        have no status until all the others have theirs.
        """
        record.is_announced = True  # also where it fails: a status is not worth a resource
        status = status_of(resource, Observed(), Planned(), self._now())
        is_there = await self._report(key, found, status, record) is not None
        return DEBOUNCE_SECONDS if is_there else None

    async def _report(
        self, key: Key, found: Object, status: Object, record: _Record
    ) -> float | None:
        """Write a status and its Events, and nothing else; None if the resource is gone."""
        now, memory = self._now(), record.memory
        self._fleet_metrics.put(key, status)
        events, log = due(status_events(found.get("status") or {}, status), memory.told, now)
        memory = replace(memory, told=log, written_at=now)
        if await self._is_gone(key, found):
            return None
        await self._publish(key, found, Plan(status=status, events=events, memory=memory))
        record.memory = memory
        return RESYNC_SECONDS

    async def _bring_about(
        self, key: Key, found: Object, resource: Resource, record: _Record
    ) -> float | None:
        observed = await self._observe(key, found, resource, record)
        decided = plan(resource, observed, self._config, record.memory, self._now())
        if decided.is_writing and await self._is_gone(key, found):
            return None
        observed, is_other = await self._look_at_names(
            key, resource, observed, _unseen(observed, decided, record)
        )
        if is_other:
            decided = plan(resource, observed, self._config, record.memory, self._now())
        cut: Cut | None = None
        if not resource.spec.paused:
            self._engines.keep(key, {name_of(pod) for pod in observed.pods})
            execution = Execution(
                cluster=self._cluster,
                view=self._view,
                engines=self._engines,
                now=self._now,
                key=key,
                resource=resource,
                observed=observed,
                optional=record.optional,
                failures=ApplyFailures.of(decided.memory),
                repairs=record.repairs,
            )
            cut = await execution.carry_out(decided)
            record.heed(cut, execution.failures, self._now())
            if cut is not None or execution.failures != ApplyFailures.of(decided.memory):
                memory, observed = _heeding(execution.failures, cut, record.memory, observed)
                decided = plan(resource, observed, self._config, memory, self._now())
            record.children = frozenset(observed.children)
        self._engines.follow(key, _hosts(observed))
        self._fleet_metrics.put(key, decided.judged)
        await self._publish(key, found, decided)
        record.memory = decided.memory
        if cut is not None:
            raise cut.error
        if observed.forbidden:
            raise ForbiddenError("; ".join(observed.forbidden.values()))
        return decided.again_after

    async def _observe(
        self, key: Key, found: Object, resource: Resource, record: _Record
    ) -> Observed:
        seen = self._view.children(key)
        served = await self._served.get()
        await record.optional.read(self._cluster, resource, served, self._now())
        children = {
            ref: each
            for ref, each in seen.items()
            if (is_owned_by if ref.kind == "Pod" else is_ours)(each, resource.uid)
        }
        return Observed(
            children={**children, **record.optional.found},
            pods=tuple(
                each
                for ref, each in seen.items()
                if ref.kind == "Pod"
                and ref not in children
                and is_engine_pod(each, resource.name)
                and not _is_older(each, found, children.get(Ref("Deployment", maker_of(each))))
            ),
            released=tuple(each for each in seen.values() if is_released(each, resource)),
            endpoints=endpoints_of(
                resource.name, (each for ref, each in seen.items() if ref.kind == "EndpointSlice")
            ),
            pools=self._engines.pools(key),
            drains=self._engines.drains(key),
            optional_apis=served - record.optional.forbidden | {"HorizontalPodAutoscaler"},
            unreadable=record.optional.forbidden,
            spec_problem=record.spec_problem,
            status=found.get("status") or {},
        )

    async def _look_at_names(
        self, key: Key, resource: Resource, observed: Observed, unseen: Iterable[Ref]
    ) -> tuple[Observed, bool]:
        """Read by name: the watch sees only what carries our label.

        Returns:
            What is observed with that, and whether anything was found.
        """
        children, foreign, leaving = dict(observed.children), set[Ref](), set[Ref]()
        for ref in unseen:
            found = await self._cluster.get(key[0], ref)
            if found is None:
                continue
            if is_ours(found, resource.uid):
                children[ref] = found
            elif is_of_former(found, resource.name, resource.uid):
                leaving.add(ref)
            else:
                foreign.add(ref)
        is_other = len(children) > len(observed.children) or bool(foreign or leaving)
        observed = replace(
            observed, children=children, foreign=frozenset(foreign), leaving=frozenset(leaving)
        )
        return observed, is_other

    async def _publish(self, key: Key, found: Object, decided: Plan) -> None:
        """Status and Events."""
        if decided.status is not None:
            answer = await self._cluster.patch_status(*key, decided.status)
            if answer is not None:
                self._view.remember(key, answer)
        for event in decided.events:
            try:
                await self._cluster.post_event(found, event, self._now())
            except ClusterError as error:
                _log.warning("event_lost", reason=event.reason, error=str(error))


def _read(found: Object, record: _Record) -> Resource | None:
    """What is asked for; of a resource that cannot be read, what was asked for last."""
    try:
        record.resource, record.spec_problem = parse(found), None
    except SpecError as error:
        record.spec_problem = error.reason, error.message
        if record.resource is not None:
            record.resource = carried_on(record.resource, found)
    return record.resource


def _is_older(pod: Object, resource: Object, deployment: Object | None) -> bool:
    """Whether a pod is of a former resource of this name: nothing that is ours was there before it.

    One that is older than the resource alone came with a Deployment that was left for us to adopt;
    one that is older than its Deployment alone was adopted by that.
    """
    makers = [resource] if deployment is None else [resource, deployment]
    return all(_made_at(pod) < _made_at(each) for each in makers)


def _made_at(thing: Object) -> float:
    return to_seconds(thing["metadata"].get("creationTimestamp")) or 0.0


def _unseen(observed: Observed, decided: Plan, record: _Record) -> list[Ref]:
    """What would be created; and what was there or has pods, and is neither seen nor wanted.

    The latter is gone, or somebody stripped its labels and it would stay for ever.
    """
    makers = {Ref("Deployment", maker_of(pod)) for pod in observed.pods if not is_leaving(pod)}
    vanished = (record.children | makers) - observed.children.keys() - set(decided.missing)
    return [*decided.missing, *sorted(vanished)]


def _heeding(
    failures: ApplyFailures, cut: Cut | None, memory: Memory, observed: Observed
) -> tuple[Memory, Observed]:
    """Memory and snapshot, once some of what was decided did not come about."""
    memory = replace(memory, rejected=failures.rejected, reverted=failures.reverted)
    return memory, replace(observed, forbidden=failures.forbidden, is_cut_short=cut is not None)


def _hosts(observed: Observed) -> dict[str, str]:
    """Addresses of the targets that serve, by pod."""
    return {
        name_of(pod): pod["status"]["podIP"]
        for pod in observed.pods
        if is_ready(pod)
        and pod["metadata"]["labels"].get(COMPONENT_LABEL) == str(Component.TARGET)
        and pod["status"].get("podIP")
    }
