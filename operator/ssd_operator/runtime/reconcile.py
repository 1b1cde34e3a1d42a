"""One pass over one resource: observe, plan, carry out, report. Level-triggered."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ssd.observability.log import get_logger
from ssd_operator.api.parse import SpecError, parse
from ssd_operator.api.spec import API_VERSION, KIND, Object, Resource
from ssd_operator.observe.cluster import (
    Cluster,
    ClusterError,
    ForbiddenError,
    Key,
    MissingError,
    Ref,
    RefusedError,
)
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.observe.observer import observe
from ssd_operator.observe.pod_state import Address, address_of, is_terminating, name_of
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.apply_failures import Repairs, Results
from ssd_operator.policy.plan import PlanState, plan
from ssd_operator.runtime import metrics
from ssd_operator.runtime.engine_client import Engines
from ssd_operator.runtime.plan_executor import PlanExecutor
from ssd_operator.runtime.work_queue import RESYNC_SECONDS
from ssd_operator.settings import UNTOUCHED_NAMESPACE, OperatorSettings
from ssd_operator.status.events import event_object
from ssd_operator.status.pass_result import PassResult, ReportState
from ssd_operator.status.report import PassReport, report_invalid, report_pass

FAILING_SECONDS = 30.0
"""Calls that fail for longer are reported in the status; for less, the API server is busy."""

_log = get_logger(__name__)


@dataclass(slots=True)
class _Record:
    """What is remembered of one resource. Without it a pass is slower, and still correct."""

    uid: str
    planned: PlanState = field(default_factory=PlanState)
    reported: ReportState = field(default_factory=ReportState)
    repairs: Repairs = field(default_factory=dict)
    failing_since: float | None = None
    """First of the latest passes that were all interrupted by a call without an answer."""


class Reconciler:
    """Carries out what ``plan`` decides. Asyncio loop; one pass a key at a time."""

    def __init__(
        self,
        cluster: Cluster,
        cache: ObjectCache,
        engines: Engines,
        settings: OperatorSettings,
        now: Callable[[], float],
    ) -> None:
        """Construct it; ``now`` is in seconds since the epoch."""
        self._cluster = cluster
        self._cache = cache
        self._engines = engines
        self._settings = settings
        self._now = now
        self._records: dict[Key, _Record] = {}

    async def reconcile(self, key: Key) -> float | None:
        """One pass.

        Returns:
            Seconds after which another pass is due, None if the resource is gone.

        Raises:
            ClusterError: a call failed; what was done so far stays, the next pass continues.
        """
        if key[0] == UNTOUCHED_NAMESPACE:
            _log.warning("namespace_untouched", reason=f"nothing is written in {key[0]}")
            return None
        found = self._cache.resource(key)
        if found is None or is_terminating(found):
            self._end_record(key)
            return None
        record = self._records.get(key)
        if record is None or record.uid != found["metadata"]["uid"]:
            self._end_record(key)
            record = self._records[key] = _Record(found["metadata"]["uid"])
        try:
            return await self._pass(key, found, record)
        except ForbiddenError as error:
            if not error.is_namespace_terminating:
                raise
            _log.info("namespace_terminating", error=str(error))
        except MissingError as error:
            _log.info("namespace_missing", error=str(error))
        return RESYNC_SECONDS

    async def _pass(self, key: Key, found: Object, record: _Record) -> float | None:
        try:
            resource = parse(found)
        except SpecError as error:
            invalid = report_invalid(found, str(error), record.reported, self._now())
            is_there = await self._publish(key, found, record, invalid)
            return RESYNC_SECONDS if is_there else None
        return await self._converge(key, found, resource, record)

    async def _converge(
        self, key: Key, found: Object, resource: Resource, record: _Record
    ) -> float | None:
        snapshot = replace(
            await observe(self._cluster, self._cache, self._settings, found, resource, self._now()),
            pools=self._engines.pools(key),
            drains=self._engines.drains(key),
        )
        decided = plan(snapshot, self._settings, record.planned)
        if decided.is_writing and not await self._exists(key, found):
            self._drop(key, found)
            return None
        results = Results(failures=dict(decided.state.failures))
        execution = PlanExecutor(
            cluster=self._cluster,
            cache=self._cache,
            engines=self._engines,
            snapshot=snapshot,
            repairs=record.repairs,
            results=results,
        )
        await execution.carry_out(decided)
        self._add_interruption(record, results)
        self._engines.follow(key, _addresses(snapshot), set(map(name_of, snapshot.pods)))
        record.planned = replace(decided.state, failures=results.failures)
        report = report_pass(
            PassResult(
                snapshot=replace(snapshot, now=self._now()),
                plan=decided,
                results=results,
                before=record.reported,
            )
        )
        if not await self._publish(key, found, record, report):
            return None
        if results.interruption is not None:
            raise results.interruption[1]
        if results.forbidden:
            raise ForbiddenError("; ".join(results.forbidden.values()))
        return min(decided.again_after, report.again_after)

    async def _publish(self, key: Key, found: Object, record: _Record, report: PassReport) -> bool:
        """Write the status, if it changed, and the Events; whether the resource is still there.

        A refused status is logged. A later pass writes it again.
        """
        if report.is_written:
            identity = {"name": key[1], "namespace": key[0]}
            kind = {"apiVersion": API_VERSION, "kind": KIND, "metadata": identity}
            try:
                answer = await self._cluster.apply(
                    {**kind, "status": report.status}, record.uid, "status"
                )
            except MissingError:
                if await self._exists(key, found):
                    raise  # an API server that restarts may not serve the kind for a moment
                self._drop(key, found)
                return False
            except RefusedError as error:  # a rule or webhook; the Events are what remains
                _log.warning("status_refused", error=str(error))
            else:
                self._cache.put(answer)
        metrics.set_conditions(key, report.status.get("conditions") or ())
        record.reported = report.state
        for event in report.events:
            try:
                await self._cluster.create(event_object(found, event, self._now()))
            except ClusterError as error:
                _log.warning("event_lost", reason=event.reason, error=str(error))
        return True

    async def _exists(self, key: Key, found: Object) -> bool:
        """Whether a resource of the cache still exists and is not being deleted.

        It is read before the first write of a pass. The garbage collector deletes children of an
        owner that does not exist, and after each deletion a pass would make them again.
        """
        live = await self._cluster.get(key[0], Ref(KIND, key[1]))
        if live is None or live["metadata"]["uid"] != found["metadata"]["uid"]:
            return False
        return not is_terminating(live)

    def _drop(self, key: Key, found: Object) -> None:
        """Drop a resource that is gone, although the watch has not reported it yet."""
        self._cache.mark_deleted(found)
        self._end_record(key)

    def _end_record(self, key: Key) -> None:
        self._engines.follow(key, {}, frozenset())
        self._records.pop(key, None)
        metrics.set_conditions(key, ())

    def _add_interruption(self, record: _Record, results: Results) -> None:
        """Add an error that has interrupted passes for long to what is reported."""
        if results.interruption is None:
            record.failing_since = None
            return
        ref, error = results.interruption
        if record.failing_since is None:
            record.failing_since = self._now()
        if self._now() - record.failing_since >= FAILING_SECONDS:
            results.forbidden[ref] = str(error)


def _addresses(snapshot: Snapshot) -> dict[str, Address]:
    """Addresses of the targets that serve, by pod."""
    found = {name_of(pod): address_of(pod) for pod in snapshot.ready_targets}
    return {name: address for name, address in found.items() if address is not None}
