"""One pass over one resource: observe, plan, carry out, report. Level-triggered.

A plan is carried out call by call: one that is refused does not stop the others.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from ssd.observability.log import get_logger
from ssd_operator.api.parse import SpecError, parse
from ssd_operator.api.spec import API_VERSION, Object, Resource
from ssd_operator.observe.cluster import (
    BusyError,
    Cluster,
    ClusterError,
    ConflictError,
    ForbiddenError,
    Key,
    MissingError,
    Ref,
    RefusedError,
    ref_of,
)
from ssd_operator.observe.diff import removal, replacement
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.observe.pod_state import address_of, is_ours, is_terminating, name_of
from ssd_operator.observe.snapshot import Snapshot, observe
from ssd_operator.policy.apply_failures import (
    MOST_REPAIRS,
    Interruption,
    Results,
    contest,
    deferred_again,
    merged,
    refusal,
    still_deferred,
)
from ssd_operator.policy.drain import Drain, victim_annotations
from ssd_operator.policy.plan import PassPlan, PlanState, plan
from ssd_operator.policy.scaling import Decision
from ssd_operator.runtime import metrics
from ssd_operator.runtime.engine_client import Engines
from ssd_operator.runtime.work_queue import RESYNC_SECONDS, PartialError
from ssd_operator.settings import UNTOUCHED_NAMESPACE, OperatorSettings
from ssd_operator.status.pass_result import PassResult
from ssd_operator.status.report import (
    PassReport,
    event_object,
    report_deleted,
    report_invalid,
    report_pass,
)

FAILING_SECONDS = 30.0
"""Calls that fail for longer are reported in the status; for less, the API server is busy."""

_log = get_logger(__name__)


@dataclass(slots=True)
class Reconciler:
    """Carries out what ``plan`` decides. Asyncio loop; one pass a key at a time."""

    cluster: Cluster
    cache: ObjectCache
    engines: Engines
    settings: OperatorSettings
    now: Callable[[], float]
    """Seconds since the epoch."""
    _states: dict[Key, PlanState] = field(default_factory=dict, init=False)

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
        cached = self.cache.resource(key)
        if cached is None or is_terminating(cached):
            self._forget(key)
            if cached is not None and cached["metadata"].get("finalizers"):
                await self._publish_deletion(key, cached)
            return None
        uid = cached["metadata"]["uid"]
        if key not in self._states or self._states[key].uid != uid:
            self._forget(key)
            self._states[key] = PlanState(uid=uid)
        try:
            return await self._pass(key, cached)
        except MissingError as error:
            _log.info("namespace_missing", error=str(error))
        return RESYNC_SECONDS

    async def _publish_deletion(self, key: Key, cached: Object) -> None:
        """Write that a resource is being deleted, and not what its status was before."""
        self._states[key] = PlanState(uid=cached["metadata"]["uid"])
        report = report_deleted(cached, self._states[key], self.now())
        if await self._publish(key, cached, report):
            self._states.pop(key)

    async def _pass(self, key: Key, cached: Object) -> float | None:
        try:
            resource = parse(cached)
        except SpecError as error:
            invalid = report_invalid(cached, str(error), self._states[key], self.now())
            return RESYNC_SECONDS if await self._publish(key, cached, invalid) else None
        snapshot = await self._observe(key, cached, resource)
        decided = plan(snapshot, self.settings, self._states[key])
        if decided.is_writing and not await self._exists(key, cached):
            self._drop(key, cached)
            return None
        results = await self._carry_out(snapshot, decided)
        self._follow(snapshot)
        result = PassResult(
            snapshot=replace(snapshot, now=self.now()),
            plan=decided,
            results=results,
            state=self._states[key],
        )
        report = report_pass(result)
        if not await self._publish(key, cached, report):
            return None
        if results.interruption is not None:
            raise results.interruption.error
        retries = [call.retry_at - self.now() for call in results.deferred_calls.values()]
        again_after = min(decided.again_after, report.again_after, *retries)
        if results.failed_calls:
            message = "; ".join(map(str, results.failed_calls.values()))
            can_write = bool(results.applied or snapshot.children)
            raise PartialError(message, again_after, can_write=can_write)
        return again_after

    async def _observe(self, key: Key, cached: Object, resource: Resource) -> Snapshot:
        """Return what is known of the resource's objects and of its engines."""
        snapshot = await observe(
            self.cluster, self.cache, self.settings, cached, resource, self.now()
        )
        pools, drains = self.engines.state(key)
        if resource.is_pool:
            # Each target is followed once, under the key of its own resource.
            states = map(self.engines.state, self.cache.linked(key))
            pools = {pod: report for reports, _ in states for pod, report in reports.items()}
        errors = self.engines.errors(key)
        return replace(snapshot, pools=pools, call_errors=errors, drains=drains)

    async def _carry_out(self, snapshot: Snapshot, decided: PassPlan) -> Results:
        """Execute a plan; calls without an answer for long count as failed."""
        state = decided.state
        results = Results(
            failures=dict(state.failures),
            repairs=dict(state.repairs),
            deferred_calls=dict(state.deferred_calls),
        )
        executor = PlanExecutor(self.cluster, self.cache, self.engines, snapshot, results)
        await executor.carry_out(decided)
        since = None
        if results.interruption is not None:
            since = self.now() if state.failing_since is None else state.failing_since
            if self.now() - since >= FAILING_SECONDS:
                results.failed_calls[results.interruption.ref] = results.interruption.error
        self._states[snapshot.resource.key] = replace(
            state,
            failures=results.failures,
            repairs=results.repairs,
            deferred_calls=results.deferred_calls,
            failing_since=since,
        )
        return results

    def _follow(self, snapshot: Snapshot) -> None:
        """Poll the engines of the targets that are ready; a pool has none of its own."""
        followed = () if snapshot.resource.is_pool else snapshot.ready_targets
        addresses = ((name_of(pod), address_of(pod)) for pod in followed)
        targets = {name: address for name, address in addresses if address is not None}
        self.engines.follow(snapshot.resource.key, targets, set(map(name_of, snapshot.pods)))

    async def _publish(self, key: Key, cached: Object, report: PassReport) -> bool:
        """Write the status, if it changed, and the Events; return whether the resource exists.

        A refused status is logged. A later pass writes it again.
        """
        if report.is_written:
            identity = {"name": name_of(cached), "namespace": key[0]}
            status = {"apiVersion": API_VERSION, "kind": cached["kind"], "metadata": identity}
            status["status"] = report.status
            try:
                answer = await self.cluster.apply(status, self._states[key].uid, "status")
            except MissingError:
                if await self._exists(key, cached):
                    raise  # an API server that restarts may not serve the kind for a moment
                self._drop(key, cached)
                return False
            except RefusedError as error:  # a rule or webhook; the Events are what remains
                _log.warning("status_refused", error=str(error))
            else:
                self.cache.put(answer)
        metrics.set_conditions(key, report.status.get("conditions") or ())
        self._states[key] = report.state
        for event in report.events:
            try:
                await self.cluster.create(event_object(cached, event, self.now()))
            except ClusterError as error:
                _log.warning("event_lost", reason=event.reason, error=str(error))
        return True

    async def _exists(self, key: Key, cached: Object) -> bool:
        """Whether a resource of the cache still exists and is not being deleted.

        It is read before the first write of a pass. The garbage collector deletes children of an
        owner that does not exist, and after each deletion a pass would make them again.
        """
        live = await self.cluster.get(key[0], ref_of(cached))
        if live is None or live["metadata"]["uid"] != cached["metadata"]["uid"]:
            return False
        return not is_terminating(live)

    def _drop(self, key: Key, cached: Object) -> None:
        """Drop a resource that is gone, although the watch has not reported it yet."""
        self.cache.mark_deleted(cached)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        self.engines.follow(key, {}, frozenset())
        self._states.pop(key, None)
        metrics.set_conditions(key, ())


@dataclass(frozen=True, slots=True)
class PlanExecutor:
    """Carries out what was decided on one resource in one pass. Asyncio loop."""

    cluster: Cluster
    cache: ObjectCache
    engines: Engines
    snapshot: Snapshot
    results: Results
    """Failures of earlier passes that still hold, then also the failures of this pass."""

    async def carry_out(self, decided: PassPlan) -> None:
        """Write objects, drains and the number, then delete what is not wanted any more.

        Raises:
            MissingError: the namespace is gone, or a kind is not served any more.
        """
        # A pod that has its mark drains, also if a call of this pass fails.
        self.engines.drain(
            self.snapshot.resource.key,
            [drain for drain in decided.drains.drains if not drain.is_new],
        )
        calls, results = dict(self._calls(decided)), self.results
        results.deferred_calls = still_deferred(results.deferred_calls, calls, self.snapshot)
        # A pass that is interrupted reports the deferred calls too.
        results.failed_calls = {ref: failed.error for ref, failed in results.deferred_calls.items()}
        for ref, call in calls.items():
            deferred = results.deferred_calls.get(ref)
            if deferred is not None and self.snapshot.now < deferred.retry_at:
                continue
            try:
                await call()
                results.deferred_calls.pop(ref, None)
                results.failed_calls.pop(ref, None)
            except (RefusedError, ForbiddenError) as error:
                if ref.kind != self.snapshot.resource.kind:
                    again = deferred_again(ref, deferred, error, self.snapshot)
                    results.deferred_calls[ref] = again
                results.failed_calls[ref] = error
                _log.warning("call_failed", object=str(ref), error=str(error))
            except (BusyError, ConflictError) as error:
                results.interruption = Interruption(ref, error)
                if isinstance(error, ConflictError):
                    await self._drop_if_gone(ref)
                return

    def _calls(self, decided: PassPlan) -> Iterator[tuple[Ref, Callable[[], Awaitable[None]]]]:
        """The calls about each object, in order."""
        for sent in decided.apply:
            yield (ref := ref_of(sent)), partial(self._apply, sent, decided.wanted[ref])
        pods = {name_of(pod): pod for pod in self.snapshot.pods}
        for drain in decided.drains.drains:
            if drain.is_new:
                yield Ref("Pod", drain.pod), partial(self._drain, pods[drain.pod], drain)
        for name in decided.drains.delete_pods:
            yield Ref("Pod", name), partial(self._delete, pods[name])
        if decided.scale is not None:
            ref = Ref(self.snapshot.resource.kind, self.snapshot.resource.name)
            yield ref, partial(self._scale, ref, decided.scale)
        for ref in decided.delete:
            yield ref, partial(self._delete, self.snapshot.children[ref])

    async def _drop_if_gone(self, ref: Ref) -> None:
        """Drop an object whose deletion no watch has reported: every pass would end at it."""
        cached = self.cache.children(self.snapshot.resource.key).get(ref)
        if cached is not None:
            with contextlib.suppress(ClusterError):
                live = await self.cluster.get(self.snapshot.resource.namespace, ref)
                if live is None or live["metadata"]["uid"] != cached["metadata"]["uid"]:
                    self.cache.mark_deleted(cached)

    async def _apply(self, sent: Object, wanted: Object) -> None:
        """Write an object; ``sent`` has the live template while the template waits."""
        ref, snapshot = ref_of(wanted), self.snapshot
        live = snapshot.children.get(ref)
        try:
            if live is None:
                # An apply takes over what is there.
                existing = await self.cluster.get(snapshot.resource.namespace, ref)
                if existing is not None and not is_ours(existing, snapshot.resource.uid):
                    raise RefusedError(f"{ref} belongs to another owner; rename or remove it")
            answer = await self._write(sent, live)
        except (RefusedError, ForbiddenError) as error:
            if isinstance(error, ForbiddenError) and ref.kind != "Pod":
                raise
            self.results.failures[ref] = refusal(wanted, error, snapshot)
            _log.warning("object_refused", object=str(ref), error=str(error))
            return
        _log.info("applied", object=str(ref))
        self.cache.put(answer)
        self.results.stored[ref] = answer
        failure = contest(sent, wanted, answer, snapshot, self.results.repairs)
        if failure is not None:
            held = self.results.failures.get(ref)
            if held is None and len(self.results.repairs[ref].times) <= MOST_REPAIRS:
                _log.warning("apply_reverted", object=str(ref), error=failure.message)
            self.results.failures[ref] = merged(held, failure)
        if failure is None or live is None:
            self.results.applied.add(ref)

    async def _write(self, sent: Object, live: Object | None) -> Object:
        """Apply an object; returns it as it is stored.

        An apply keeps the fields and items that others put beside ours. If we own a list as a
        whole, a merge patch removes theirs. If the API server refuses both together (two ports of
        one name, rollingUpdate beside Recreate), a merge patch removes those, and the apply is
        repeated: only an apply removes what is not wanted any more. An object that was not
        observed may have another owner.
        """
        ref, namespace = ref_of(sent), self.snapshot.resource.namespace
        # Only the child that was observed is written: another object may have its name by now.
        uid = "" if live is None else live["metadata"]["uid"]
        only = {"metadata": {"uid": uid}}
        try:
            answer = await self.cluster.apply(sent, uid)
        except RefusedError as refusal:
            if live is None:
                raise
            try:
                await self.cluster.patch(namespace, ref, replacement(live, sent) | only)
            except ClusterError:
                raise refusal from None
            answer = await self.cluster.apply(sent, uid)
        if uid and (changes := removal(answer, sent)):
            answer = await self.cluster.patch(namespace, ref, changes | only)
            _log.info("pruned", object=str(ref))
        return answer

    async def _drain(self, pod: Object, drain: Drain) -> None:
        """Mark a pod, then start its drain: a restarted operator only sees the mark.

        Without the mark, the pod would stay and accept no session.
        """
        metadata = {
            "uid": pod["metadata"]["uid"],
            "annotations": victim_annotations(drain.deadline),
        }
        with contextlib.suppress(MissingError):
            ref, changes = ref_of(pod), {"metadata": metadata}
            self.cache.put(await self.cluster.patch(self.snapshot.resource.namespace, ref, changes))
        self.engines.drain(self.snapshot.resource.key, [drain])

    async def _scale(self, ref: Ref, decision: Decision) -> None:
        resource, changes = self.snapshot.resource, {"spec": {"replicas": decision.replicas}}
        await self.cluster.patch(resource.namespace, ref, changes, subresource="scale")
        self.results.is_scaled = True
        is_up = decision.replicas > resource.spec.draft.replicas
        metrics.SCALE_TOTAL.labels("up" if is_up else "down", str(decision.reason)).inc()
        _log.info("scaled", replicas=decision.replicas)

    async def _delete(self, thing: Object) -> None:
        ref = ref_of(thing)
        await self.cluster.delete(self.snapshot.resource.namespace, ref, thing["metadata"]["uid"])
        self.cache.mark_deleted(thing)
        _log.info("deleted", object=str(ref))
