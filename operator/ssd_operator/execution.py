"""Carries a plan out, call by call: one that is refused does not stop the others."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ssd.telemetry import get_logger
from ssd_operator import metrics
from ssd_operator.cluster import (
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
from ssd_operator.engines import Engines
from ssd_operator.facts import Observed, Ref
from ssd_operator.optional_children import OptionalChildren
from ssd_operator.plan import Plan
from ssd_operator.pod_state import name_of
from ssd_operator.scaling import Decision
from ssd_operator.setbacks import Setbacks, rejection_of, reversion_of
from ssd_operator.spec import KIND, Object, Resource
from ssd_operator.view import View

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
    view: View
    engines: Engines
    now: Callable[[], float]
    """Seconds since the epoch."""
    key: Key
    resource: Resource
    observed: Observed
    optional: OptionalChildren
    setbacks: Setbacks = field(default_factory=Setbacks)
    """What was in the way before and still is; what comes to it is added."""

    async def carry_out(self, decided: Plan) -> Cut | None:
        """Objects, drains, the number, then what is not wanted any more.

        Returns:
            What cut it short; None if every call was answered.

        Raises:
            ForbiddenError: the namespace goes away.
            MissingError: it is gone, or a kind is not served any more.
        """
        try:
            for wanted in decided.apply:
                await self._apply(wanted)
            await self._drain(decided)
            if decided.scale is not None:
                await self._scale(decided.scale)
            for ref in decided.delete:
                await self._delete(ref, self.observed.children[ref])
        except _CutError as cut:
            return Cut(cut.ref, cut.error)
        return None

    async def _apply(self, wanted: Object) -> None:
        ref = ref_of(wanted)
        with self._noting(ref, wanted):
            answer = await self._apply_to(wanted, self.observed.children.get(ref))
            _log.info("applied", object=_title(ref))
            self._remember(wanted, answer)

    async def _apply_to(self, wanted: Object, live: Object | None) -> Object:
        """Apply to the child that was seen: meanwhile its name may be somebody else's.

        Raises:
            ConflictError: it is; the next pass reads what is there.
        """
        if live is None:
            return await self.cluster.apply(wanted)
        uid, ref = live["metadata"]["uid"], ref_of(wanted)
        try:
            return await self.cluster.apply(wanted, uid)
        except ConflictError:
            now = await self.cluster.get(self.key[0], ref)
            if now is None or now["metadata"]["uid"] != uid:
                self.view.bury(live)
                self.optional.found.pop(ref, None)
            raise

    def _remember(self, wanted: Object, answer: Object) -> None:
        ref = ref_of(wanted)
        self.setbacks.reverted.pop(ref, None)
        reversion = reversion_of(wanted, answer, self.resource.generation)
        if reversion is not None:
            _log.warning("apply_reverted", object=_title(ref), error=reversion.message)
            self.setbacks.reverted[ref] = reversion
        if KINDS[ref.kind].is_optional:
            self.optional.remember(answer)
        else:
            self.view.remember(self.key, answer)

    async def _drain(self, decided: Plan) -> None:
        pods = {name_of(pod): pod for pod in self.observed.pods}
        for mark in decided.drains.marks:
            with self._noting(Ref("Pod", mark.pod)):
                answer = await self.cluster.annotate_pod(self.key[0], mark.pod, mark.annotations)
                if answer is None:
                    self.view.bury(pods[mark.pod])
                else:
                    self.view.remember(self.key, answer)
        self.engines.drain(self.key, decided.drains.calls)
        for pod in decided.drains.delete_pods:
            await self._delete(Ref("Pod", pod), pods[pod])

    async def _scale(self, decision: Decision) -> None:
        with self._noting(Ref(KIND, self.resource.name)):
            await self.cluster.patch_scale(*self.key, decision.replicas)
            is_up = decision.replicas > self.resource.spec.draft.replicas
            metrics.SCALE_TOTAL.labels("up" if is_up else "down", str(decision.reason)).inc()
            _log.info("scaled", replicas=decision.replicas)

    async def _delete(self, ref: Ref, thing: Object) -> None:
        with self._noting(ref):
            await self.cluster.delete(self.key[0], ref, thing["metadata"]["uid"])
            self.optional.found.pop(ref, None)
            _log.info("deleted", object=_title(ref))

    @contextlib.contextmanager
    def _noting(self, ref: Ref, wanted: Object | None = None) -> Iterator[None]:
        """Keep what the API server has against a call, and go on with the next."""
        try:
            yield
        except (RefusedError, ForbiddenError) as error:
            if isinstance(error, ForbiddenError) and error.is_leaving:
                raise
            is_forbidden = isinstance(error, ForbiddenError) and ref.kind != "Pod"
            if wanted is None or is_forbidden:
                self.setbacks.forbidden[ref] = str(error)
            else:
                generation, now = self.resource.generation, self.now()
                rejection = rejection_of(wanted, error, self.observed, generation, now)
                self.setbacks.rejected[ref] = rejection
            _log.warning("object_refused", object=_title(ref), error=str(error))
        except (BusyError, ConflictError) as error:
            raise _CutError(ref, error) from error


class _CutError(Exception):
    """On its way to the end of a pass."""

    def __init__(self, ref: Ref, error: ClusterError) -> None:
        super().__init__(str(error))
        self.ref = ref
        self.error = error


def _title(ref: Ref) -> str:
    return f"{ref.kind}/{ref.name}"
