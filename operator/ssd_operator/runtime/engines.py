"""The seam to what runs in the pods."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from ssd_operator.observe.cluster import Key
from ssd_operator.observe.facts import DrainFact, PoolFact
from ssd_operator.policy.drain import DrainCall


class Engines(Protocol):
    """Targets and drafts as a pass sees them: facts that are there. Asyncio loop; never waits."""

    def pools(self, key: Key) -> Mapping[str, PoolFact]:
        """The last answers of a resource's targets, by pod."""
        ...

    def drains(self, key: Key) -> Mapping[str, DrainFact]:
        """Drains of a resource's drafts, by pod."""
        ...

    def follow(self, key: Key, targets: Mapping[str, str]) -> None:
        """Ask these targets of a resource, host by pod, and no others."""
        ...

    def drain(self, key: Key, calls: Iterable[DrainCall]) -> None:
        """Tell drafts to drain; those that have been told go on."""
        ...

    def keep(self, key: Key, pods: AbstractSet[str]) -> None:
        """Forget the drains of all other pods."""
        ...

    def forget(self, key: Key) -> None:
        """A resource is gone: end all that is done for it."""
        ...
