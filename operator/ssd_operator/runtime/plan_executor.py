"""Carries a plan out, call by call: one that is refused does not stop the others."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ssd.observability.log import get_logger
from ssd_operator.api.spec import KIND, Object, Resource
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
from ssd_operator.observe.diff import removal
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.observe.pod_state import is_ours, name_of
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.apply_failures import (
    MOST_REPAIRS,
    Repairs,
    Results,
    contest,
    merged,
    refusal,
)
from ssd_operator.policy.drain import Drain, victim_annotations
from ssd_operator.policy.plan import PassPlan
from ssd_operator.policy.scaling import Decision
from ssd_operator.runtime import metrics
from ssd_operator.runtime.engine_client import Engines

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExecutor:
    """Carries out what was decided on one resource in one pass. Asyncio loop."""

    cluster: Cluster
    cache: ObjectCache
    engines: Engines
    snapshot: Snapshot
    repairs: Repairs
    results: Results
    """With the failures of earlier passes that still hold; those of this pass are added."""

    async def carry_out(self, decided: PassPlan) -> None:
        """Write objects, drains and the number, then delete what is not wanted any more.

        Raises:
            ForbiddenError: the namespace is being deleted.
            MissingError: it is gone, or a kind is not served any more.
        """
        # A pod that has its mark drains, also if a call of this pass fails.
        self.engines.drain(self.key, [each for each in decided.drains.drains if not each.is_new])
        for ref, call in self._calls(decided):
            try:
                await call()
            except (RefusedError, ForbiddenError) as error:
                if isinstance(error, ForbiddenError) and error.is_namespace_terminating:
                    raise
                self.results.forbidden[ref] = str(error)
                _log.warning("object_refused", object=str(ref), error=str(error))
            except (BusyError, ConflictError) as error:
                self.results.interruption = ref, error
                if isinstance(error, ConflictError):
                    await self._drop_if_gone(ref)
                return

    @property
    def resource(self) -> Resource:
        """Whose objects are written."""
        return self.snapshot.resource

    @property
    def key(self) -> Key:
        """Namespace and name of the resource."""
        return self.resource.namespace, self.resource.name

    def _calls(self, decided: PassPlan) -> Iterator[tuple[Ref, Callable[[], Awaitable[None]]]]:
        """The calls about each object, in order."""
        for each in decided.apply:
            yield (ref := ref_of(each)), partial(self._apply, each, decided.wanted[ref])
        pods = {name_of(pod): pod for pod in self.snapshot.pods}
        for drain in decided.drains.drains:
            if drain.is_new:
                yield Ref("Pod", drain.pod), partial(self._drain, pods[drain.pod], drain)
        for name in decided.drains.delete_pods:
            yield Ref("Pod", name), partial(self._delete, pods[name])
        if decided.scale is not None:
            yield Ref(KIND, self.resource.name), partial(self._scale, decided.scale)
        for ref in decided.delete:
            yield ref, partial(self._delete, self.snapshot.children[ref])

    async def _drop_if_gone(self, ref: Ref) -> None:
        """Drop an object whose deletion no watch has reported: every pass would end at it."""
        known = self.cache.children(self.key).get(ref)
        if known is not None:
            with contextlib.suppress(ClusterError):
                found = await self.cluster.get(self.resource.namespace, ref)
                if found is None or found["metadata"]["uid"] != known["metadata"]["uid"]:
                    self.cache.mark_deleted(known)

    async def _apply(self, sent: Object, wanted: Object) -> None:
        """Write an object; ``sent`` has the live template while the template waits."""
        ref, snapshot = ref_of(wanted), self.snapshot
        live = snapshot.children.get(ref)
        try:
            if live is None:
                await self._check_name(ref)
            # Only the child that was observed: another object may have its name by now.
            uid = "" if live is None else live["metadata"]["uid"]
            answer = await self._write(sent, uid)
        except (RefusedError, ForbiddenError) as error:
            if isinstance(error, ForbiddenError) and (
                ref.kind != "Pod" or error.is_namespace_terminating
            ):
                raise
            self.results.failures[ref] = refusal(wanted, error, snapshot)
            _log.warning("object_refused", object=str(ref), error=str(error))
            return
        _log.info("applied", object=str(ref))
        self.cache.put(answer)
        self.results.stored[ref] = answer
        failure = contest(sent, wanted, answer, snapshot, self.repairs)
        if failure is not None:
            held = self.results.failures.get(ref)
            if held is None and len(self.repairs[ref].times) <= MOST_REPAIRS:
                _log.warning("apply_reverted", object=str(ref), error=failure.message)
            self.results.failures[ref] = merged(held, failure)
        if failure is None or live is None:
            self.results.applied.add(ref)

    async def _write(self, sent: Object, uid: str) -> Object:
        """Apply an object; returns it as it is stored.

        An apply keeps the items that others put into a list beside ours. If we own the list as a
        whole, a merge patch removes them. If the items are refused together (two ports of one
        name), a merge patch puts our lists in the place of theirs, and the apply is repeated: only
        an apply removes what is not wanted any more. Without a uid the object may have another
        owner.
        """
        ref, namespace = ref_of(sent), self.resource.namespace
        only = {"metadata": {"uid": uid}}
        try:
            answer = await self.cluster.apply(sent, uid)
        except RefusedError as refusal:
            if not uid:
                raise
            try:
                await self.cluster.patch(namespace, ref, sent | only)
            except ClusterError:
                raise refusal from None
            answer = await self.cluster.apply(sent, uid)
        if uid and (changes := removal(answer, sent)):
            answer = await self.cluster.patch(namespace, ref, changes | only)
            _log.info("pruned", object=str(ref))
        return answer

    async def _check_name(self, ref: Ref) -> None:
        """Read the name of a new object: an apply takes over what is there.

        Raises:
            RefusedError: an object of another owner has it.
        """
        found = await self.cluster.get(self.resource.namespace, ref)
        if found is not None and not is_ours(found, self.resource.uid):
            raise RefusedError(f"{ref} belongs to another owner; rename or remove it")

    async def _drain(self, pod: Object, drain: Drain) -> None:
        """Mark a pod, then start its drain: a restarted operator only sees the mark.

        Without it the pod would stay and accept no session.
        """
        metadata = {
            "uid": pod["metadata"]["uid"],
            "annotations": victim_annotations(drain.deadline),
        }
        with contextlib.suppress(MissingError):
            ref, changes = ref_of(pod), {"metadata": metadata}
            self.cache.put(await self.cluster.patch(self.resource.namespace, ref, changes))
        self.engines.drain(self.key, [drain])

    async def _scale(self, decision: Decision) -> None:
        changes = {"spec": {"replicas": decision.replicas}}
        ref = Ref(KIND, self.resource.name)
        await self.cluster.patch(self.resource.namespace, ref, changes, subresource="scale")
        self.results.is_scaled = True
        is_up = decision.replicas > self.resource.spec.draft.replicas
        metrics.SCALE_TOTAL.labels("up" if is_up else "down", str(decision.reason)).inc()
        _log.info("scaled", replicas=decision.replicas)

    async def _delete(self, thing: Object) -> None:
        ref = ref_of(thing)
        await self.cluster.delete(self.resource.namespace, ref, thing["metadata"]["uid"])
        self.cache.mark_deleted(thing)
        _log.info("deleted", object=str(ref))
