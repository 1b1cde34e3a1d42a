"""The cluster as a pass sees it: its calls and their errors. Pure."""

from dataclasses import dataclass
from typing import Protocol

from ssd.errors import SSDError
from ssd_operator.api.spec import Object

Key = tuple[str, str]
"""Namespace and name of a resource."""


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """An object of the resource's namespace. ``kind`` as in a manifest."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


class ClusterError(SSDError):
    """A call to the API server failed.

    Attributes:
        retry_after_seconds: value of the header Retry-After; 0 without one.
    """

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class MissingError(ClusterError):
    """404: no such object, namespace or kind; 403: the namespace is being deleted."""


class ConflictError(ClusterError):
    """409: another writer was faster, or the object is not the one that was meant."""


class RefusedError(ClusterError):
    """400, 413, 422: the object is wrong, and stays so until the resource changes."""


class ForbiddenError(ClusterError):
    """403: no right to it, a quota or a policy."""


class BusyError(ClusterError):
    """401, 429, 5xx, no answer in time, no connection: the same call may succeed later.

    The kubelet renews the token of a pod, so a 401 is no sign of missing rights.
    """


class Cluster(Protocol):
    """The calls of a pass. Asyncio loop; every call has a deadline.

    Any method raises ``ClusterError``: ``BusyError``, ``ForbiddenError``, and what it names.
    """

    async def get(self, namespace: str, ref: Ref) -> Object | None:
        """An object as it is now; None where there is none."""

    async def list_all(self, kind: str, namespace: str) -> tuple[list[Object], int]:
        """Objects of a kind in a namespace or, if empty, in all, and the version of the list.

        Of kinds other than the resource's, only objects that carry our label are listed.
        """

    async def apply(self, wanted: Object, uid: str = "", subresource: str = "") -> Object:
        """Set these fields of an object or its subresource, and remove those that we set earlier.

        ``uid`` is that of the object that is meant. If it is empty, the object is made, or the one
        that is there is taken over.

        Raises:
            RefusedError: the object is wrong.
            ConflictError: the one that is meant is gone, is being deleted, or was made again.
            MissingError: its namespace is gone, or the object of the subresource.
        """

    async def patch(
        self, namespace: str, ref: Ref, changes: Object, subresource: str = ""
    ) -> Object:
        """Merge changes into an object: keys that are null are removed, lists replaced.

        With a uid or a resource version in ``metadata``, only that object is changed. Returns the
        object as it is stored.

        Raises:
            ConflictError: the object is another one, or of another version.
            MissingError: it is gone.
            RefusedError: a rule or a policy forbids the changes.
        """

    async def delete(self, namespace: str, ref: Ref, uid: str) -> None:
        """Delete this very object; nothing happens if it is gone already."""

    async def create(self, thing: Object) -> None:
        """Make an object whose name is new.

        Raises:
            RefusedError: the object is wrong.
            ConflictError: the name is taken.
        """


def ref_of(thing: Object) -> Ref:
    """Kind and name of an object."""
    return Ref(str(thing["kind"]), str(thing["metadata"]["name"]))
