"""Carries a plan out, call by call: one that is refused does not stop the others."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from ssd.telemetry import get_logger
from ssd_operator.api.spec import KIND, Object, Resource
from ssd_operator.children.objects import owner_reference
from ssd_operator.observe.cluster import (
    KINDS,
    BusyError,
    Cluster,
    ClusterError,
    ConflictError,
    ForbiddenError,
    Key,
    RefusedError,
    ref_of,
)
from ssd_operator.observe.diff import Place, surplus
from ssd_operator.observe.facts import Observed, Ref
from ssd_operator.observe.object_cache import ObjectCache, is_ours
from ssd_operator.observe.optional_children import OptionalChildren
from ssd_operator.observe.pod_state import name_of
from ssd_operator.policy.apply_failures import (
    ApplyFailures,
    Repairs,
    contest_of,
    rejection_of,
    reversion_of,
)
from ssd_operator.policy.drain import Mark
from ssd_operator.policy.plan import Plan
from ssd_operator.policy.scaling import Decision
from ssd_operator.runtime import metrics
from ssd_operator.runtime.engines import Engines

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Cut:
    """The call that ended a pass before its time."""

    ref: Ref
    error: ClusterError
    """No answer, a busy server, or somebody who was faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Carries out what was decided on one resource in one pass. Asyncio loop."""

    cluster: Cluster
    view: ObjectCache
    engines: Engines
    now: Callable[[], float]
    """Seconds since the epoch."""
    key: Key
    resource: Resource
    observed: Observed
    optional: OptionalChildren
    failures: ApplyFailures = field(default_factory=ApplyFailures)
    """What was in the way before and still is; what comes to it is added."""
    repairs: Repairs = field(default_factory=Repairs)

    async def carry_out(self, decided: Plan) -> Cut | None:
        """Objects, drains, the number, then what is not wanted any more.

        Returns:
            What cut it short; None if every call was answered.

        Raises:
            ForbiddenError: the namespace goes away.
            MissingError: it is gone, or a kind is not served any more.
        """
        for ref, call in self._calls(decided):
            try:
                await call()
            except (RefusedError, ForbiddenError) as error:
                if isinstance(error, ForbiddenError) and error.is_leaving:
                    raise
                self.failures.forbidden[ref] = str(error)
                _log.warning("object_refused", object=_title(ref), error=str(error))
            except (BusyError, ConflictError) as error:
                return Cut(ref, error)
        return None

    def _calls(self, decided: Plan) -> Iterator[tuple[Ref, Callable[[], Awaitable[None]]]]:
        """What is to be called about which object, in order."""
        for wanted in decided.apply:
            yield ref_of(wanted), partial(self._apply, wanted)
        for pod in decided.adopt:
            yield Ref("Pod", name_of(pod)), partial(self._adopt, pod)
        pods = {name_of(pod): pod for pod in self.observed.pods}
        for mark in decided.drains.marks:
            yield Ref("Pod", mark.pod), partial(self._mark, mark, pods[mark.pod])
        self.engines.drain(self.key, decided.drains.calls)
        for name in decided.drains.delete_pods:
            ref = Ref("Pod", name)
            yield ref, partial(self._delete, ref, pods[name])
        if decided.scale is not None:
            yield Ref(KIND, self.resource.name), partial(self._scale, decided.scale)
        for ref in decided.delete:
            yield ref, partial(self._delete, ref, self.observed.children[ref])

    async def _apply(self, wanted: Object) -> None:
        ref = ref_of(wanted)
        try:
            answer = await self._apply_to(wanted, self.observed.children.get(ref))
            if places := surplus(answer, wanted):
                answer = await self.cluster.prune(answer, places)
                _log.info("pruned", object=_title(ref), places=list(map(_path, places)))
        except RefusedError as error:
            self._reject(wanted, error)
        except ForbiddenError as error:
            if ref.kind != "Pod" or error.is_leaving:
                raise
            self._reject(wanted, error)
        else:
            _log.info("applied", object=_title(ref))
            self._remember(wanted, answer)

    def _reject(self, wanted: Object, error: RefusedError | ForbiddenError) -> None:
        ref, generation, now = ref_of(wanted), self.resource.generation, self.now()
        rejection = rejection_of(wanted, error, self.observed, generation, now)
        self.failures.rejected[ref] = rejection
        _log.warning("object_refused", object=_title(ref), error=str(error))

    async def _apply_to(self, wanted: Object, live: Object | None) -> Object:
        """Apply to the child that was seen: meanwhile its name may be somebody else's.

        Raises:
            ConflictError: it is; the next pass reads what is there.
        """
        ref = ref_of(wanted)
        if live is None:
            return await self._create(wanted)
        uid = live["metadata"]["uid"]
        try:
            return await self.cluster.apply(wanted, uid)
        except ConflictError:
            now = await self.cluster.get(self.key[0], ref)
            if now is None or now["metadata"]["uid"] != uid:
                self.view.bury(live)
                self.optional.found.pop(ref, None)
            raise

    async def _create(self, wanted: Object) -> Object:
        """Make an object whose name was free when it was asked for.

        Raises:
            ConflictError: another resource was faster.
        """
        try:
            return await self.cluster.apply(wanted)
        except RefusedError as error:
            found = await self.cluster.get(self.key[0], ref_of(wanted))
            if found is None or is_ours(found, self.resource.uid):
                raise
            raise ConflictError(f"{_title(ref_of(wanted))} has another owner: {error}") from error

    async def _adopt(self, pod: Object) -> None:
        """The pod is deleted with its resource, though its ReplicaSet has let it go."""
        owner = owner_reference(self.resource) | {"controller": False, "blockOwnerDeletion": False}
        name, uid = name_of(pod), pod["metadata"]["uid"]
        answer = await self.cluster.adopt_pod(self.key[0], name, uid, owner)
        if answer is None:
            self.view.bury(pod)
        else:
            _log.warning("pod_released", pod=name)
            self.view.remember(self.key, answer)

    def _remember(self, wanted: Object, answer: Object) -> None:
        ref = ref_of(wanted)
        self.failures.reverted.pop(ref, None)
        live, generation = self.observed.children.get(ref), self.resource.generation
        reversion = reversion_of(wanted, answer, generation)
        if self.repairs.note(wanted, live, self.now()) and reversion is None:
            reversion = contest_of(wanted, live, generation, self.now())
        if reversion is not None:
            _log.warning("apply_reverted", object=_title(ref), error=reversion.message)
            self.failures.reverted[ref] = reversion
        if KINDS[ref.kind].is_optional:
            self.optional.remember(answer)
        else:
            self.view.remember(self.key, answer)

    async def _mark(self, mark: Mark, pod: Object) -> None:
        answer = await self.cluster.annotate_pod(self.key[0], mark.pod, mark.annotations)
        if answer is None:
            self.view.bury(pod)
        else:
            self.view.remember(self.key, answer)

    async def _scale(self, decision: Decision) -> None:
        await self.cluster.patch_scale(*self.key, decision.replicas)
        is_up = decision.replicas > self.resource.spec.draft.replicas
        metrics.SCALE_TOTAL.labels("up" if is_up else "down", str(decision.reason)).inc()
        _log.info("scaled", replicas=decision.replicas)

    async def _delete(self, ref: Ref, thing: Object) -> None:
        await self.cluster.delete(self.key[0], ref, thing["metadata"]["uid"])
        self.optional.found.pop(ref, None)
        _log.info("deleted", object=_title(ref))


def _path(place: Place) -> str:
    return ".".join(map(str, place))


def _title(ref: Ref) -> str:
    return f"{ref.kind}/{ref.name}"
