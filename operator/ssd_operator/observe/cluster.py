"""The cluster as a reconcile sees it: a few verbs, the kinds we touch, and what can go wrong.

Pure; ``api_server.py`` is the real thing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from ssd.errors import SSDError
from ssd_operator.api.spec import API_VERSION, KIND, PLURAL, Object
from ssd_operator.observe.diff import Place
from ssd_operator.observe.facts import Ref
from ssd_operator.status.events import Event

Key = tuple[str, str]
"""Namespace and name of a resource."""


@dataclass(frozen=True, slots=True)
class ServedKind:
    """Where a kind is served."""

    api_version: str
    plural: str
    is_optional: bool = False
    """Whether a cluster may do without; such kinds are read, not watched."""

    @property
    def group(self) -> str:
        """API group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """Version in the group."""
        return self.api_version.rpartition("/")[2]

    @property
    def root(self) -> str:
        """Path of the group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Path of a collection, an object, or a subresource of one; no namespace means all."""
        where = ["namespaces", namespace] if namespace else []
        parts = [self.root, *where, self.plural, name, subresource]
        return "/".join(part for part in parts if part)


RESOURCE = ServedKind(API_VERSION, PLURAL)
KINDS: Mapping[str, ServedKind] = {
    KIND: RESOURCE,
    "ServiceAccount": ServedKind("v1", "serviceaccounts"),
    "NetworkPolicy": ServedKind("networking.k8s.io/v1", "networkpolicies"),
    "Service": ServedKind("v1", "services"),
    "Deployment": ServedKind("apps/v1", "deployments"),
    "PodDisruptionBudget": ServedKind("policy/v1", "poddisruptionbudgets"),
    "HorizontalPodAutoscaler": ServedKind("autoscaling/v2", "horizontalpodautoscalers"),
    "ScaledObject": ServedKind("keda.sh/v1alpha1", "scaledobjects", is_optional=True),
    "PodMonitor": ServedKind("monitoring.coreos.com/v1", "podmonitors", is_optional=True),
    "Pod": ServedKind("v1", "pods"),
    "EndpointSlice": ServedKind("discovery.k8s.io/v1", "endpointslices"),
    "Event": ServedKind("v1", "events"),
}
"""Kinds that we read or write."""
WATCHED_KINDS = tuple(
    kind for kind, served in KINDS.items() if kind != "Event" and not served.is_optional
)
OPTIONAL_KINDS = tuple(kind for kind, served in KINDS.items() if served.is_optional)


class ClusterError(SSDError):
    """A call to the API server failed.

    Attributes:
        retry_after_seconds: what the server asked for; 0 where it asked for nothing.
    """

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class MissingError(ClusterError):
    """404: the object, its namespace or its kind is not there."""


class ConflictError(ClusterError):
    """409: somebody was faster; look again."""


class RefusedError(ClusterError):
    """400, 422: the object is wrong, and will be until the resource changes."""


class ForbiddenError(ClusterError):
    """401, 403: no right to it; or its namespace is going away, see ``is_leaving``."""

    def __init__(self, message: str, *, is_leaving: bool = False) -> None:
        super().__init__(message)
        self.is_leaving = is_leaving


class BusyError(ClusterError):
    """429, 5xx, no answer in time, no connection: the same call may work later."""


_LEAVING_CAUSE = "NamespaceTerminating"
_ERRORS: Mapping[int, type[ClusterError]] = {
    HTTPStatus.BAD_REQUEST: RefusedError,
    HTTPStatus.NOT_FOUND: MissingError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: RefusedError,
    HTTPStatus.UNPROCESSABLE_ENTITY: RefusedError,
    HTTPStatus.TOO_MANY_REQUESTS: BusyError,
}


def error_of(code: int, answer: Object, what: str, retry_after: str = "") -> ClusterError:
    """The error of an answer.

    Args:
        code: HTTP status, 300 or more.
        answer: the ``Status`` object that came, empty if none did.
        what: the call, for the message.
        retry_after: the header.
    """
    message = f"{what}: {code} {answer.get('message', '')}".rstrip()
    causes = (answer.get("details") or {}).get("causes") or []
    if code == HTTPStatus.UNPROCESSABLE_ENTITY and _is_of_another(causes):
        return ConflictError(message)
    if code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        is_leaving = any(cause.get("reason") == _LEAVING_CAUSE for cause in causes)
        return ForbiddenError(message, is_leaving=is_leaving)
    seconds = float(retry_after) if retry_after.isdecimal() else 0.0
    return _ERRORS.get(code, BusyError)(message, seconds)


def _is_of_another(causes: Sequence[Object]) -> bool:
    """Whether the object is not the one that was meant: of a write, its uid cannot change."""
    return any(cause.get("field") == "metadata.uid" for cause in causes)


class Cluster(Protocol):
    """What a reconcile does to a cluster. Asyncio loop; every call has a deadline.

    Any method raises ``ClusterError``: ``BusyError``, ``ForbiddenError``, and what it names.
    """

    async def get(self, namespace: str, ref: Ref) -> Object | None:
        """An object as it is now; None where there is none."""
        ...

    async def uids(self, kind: str, namespace: str) -> frozenset[str]:
        """Of all objects of a kind that are watched, in a namespace or, if empty, in all."""
        ...

    async def apply(self, wanted: Object, uid: str = "") -> Object:
        """Make an object have these fields, and none of ours beside them.

        Args:
            wanted: the object.
            uid: of the one that is meant; empty makes one, or takes the one that is there.

        Raises:
            RefusedError: the object is wrong.
            ConflictError: the one that is meant is gone, or it is being deleted or made anew.
            MissingError: its namespace is gone.
        """
        ...

    async def prune(self, live: Object, places: Sequence[Place]) -> Object:
        """Remove parts of this very object that an apply leaves alone, since others wrote them.

        Args:
            live: the object as it was seen.
            places: of the parts, the last item of a list first.

        Raises:
            ConflictError: the object is another one, or something else is there.
            MissingError: it is gone.
            RefusedError: a policy keeps the parts.
        """
        ...

    async def delete(self, namespace: str, ref: Ref, uid: str) -> None:
        """Delete this very object; nothing happens if it is gone already."""
        ...

    async def annotate_pod(
        self, namespace: str, name: str, annotations: Mapping[str, str]
    ) -> Object | None:
        """Add annotations to a pod; None if it is gone."""
        ...

    async def adopt_pod(self, namespace: str, name: str, uid: str, owner: Object) -> Object | None:
        """Add an owner to a pod, beside those that it has; None if it is gone.

        Raises:
            ConflictError: the pod of this name is another one.
        """
        ...

    async def patch_status(self, namespace: str, name: str, status: Object) -> Object | None:
        """Make this the status of a resource; None if it is gone.

        Raises:
            RefusedError: the schema has no place for it.
        """
        ...

    async def patch_scale(self, namespace: str, name: str, replicas: int) -> None:
        """Write the number of drafts of a resource; nothing happens if it is gone.

        Raises:
            RefusedError: a rule of the resource forbids this number.
        """
        ...

    async def post_event(self, about: Object, event: Event, seconds: float) -> None:
        """Tell of something that happened to a resource at a time (seconds since the epoch)."""
        ...

    async def optional_kinds(self) -> frozenset[str]:
        """Of the optional kinds, those that are served now."""
        ...


def ref_of(thing: Object) -> Ref:
    """Kind and name of an object."""
    return Ref(str(thing["kind"]), str(thing["metadata"]["name"]))


def is_owned_by(thing: Object, uid: str) -> bool:
    """Whether a resource is an object's controller."""
    owners: list[Any] = thing["metadata"].get("ownerReferences") or []
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)
