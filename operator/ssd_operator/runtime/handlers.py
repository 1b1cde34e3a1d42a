"""The handlers of kopf: indices, which the object cache reads, and events, which queue passes.

*Decision*: passes run from our own work queue. *Because* change handlers make kopf write
annotations into resources, and timers and daemons add a finalizer; with indices and events alone
it writes nothing, and the indices are complete before the first event is handled (tried with 1.45).
*Revisit when* kopf can run handlers without writing.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from time import monotonic
from typing import Any

import kopf

from ssd_operator.api.spec import KIND, Object
from ssd_operator.children.names import MANAGED_BY_LABEL, OPERATOR
from ssd_operator.children.objects import KINDS
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.object_cache import ObjectCache, key_of, owner_key

REQUEST_SECONDS = 30.0
EXIT_SECONDS = 25.0
"""Less than the grace period of the operator's pod."""
_KINDS = {(served.group, served.version, served.plural): kind for kind, served in KINDS.items()}


def watch_settings() -> kopf.OperatorSettings:
    """Settings with which kopf writes nothing and needs no right beyond ours."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.process.ultimate_exiting_timeout = EXIT_SECONDS
    settings.persistence.diffbase_storage = _NoEssence()
    # A removed label arrives as a deletion; the next pass finds the object by name.
    settings.watching.label_selectors[lambda each: _kind(each) not in (None, KIND)] = (
        f"{MANAGED_BY_LABEL}={OPERATOR}"
    )
    # They carry the labels of their Services, and clients use the one that is not headless.
    headless = "!service.kubernetes.io/headless"
    settings.watching.label_selectors[lambda each: _kind(each) == "EndpointSlice"] = headless
    return settings


class _NoEssence(kopf.DiffBaseStorage):
    """Stores nothing to compare with: otherwise kopf copies each object twice at each event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Keep nothing."""


def make_registry(
    kinds: AbstractSet[str],
    start: Callable[[ObjectCache], None],
    wake: Callable[[Key, bool], None],
    relist: Callable[[], None],
) -> kopf.OperatorRegistry:
    """Make the handlers.

    Args:
        kinds: those that are watched.
        start: called once, before any event, with the cache that the indices fill.
        wake: called when a pass is due; with whether the spec of the resource was changed.
        relist: the watch has begun again and does not report what was deleted meanwhile.
    """
    # All are coroutines: kopf runs plain functions in threads, and what they call is of the loop.
    registry = kopf.OperatorRegistry()
    caches: list[ObjectCache] = []
    children = kinds - {KIND}
    generations: dict[Key, int] = {}

    @kopf.on.login(registry=registry)
    async def log_in(**context: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**context) or kopf.login_with_kubeconfig(**context)

    @kopf.on.startup(registry=registry)
    async def begin(**context: Any) -> None:
        caches.append(ObjectCache(context["resources"], context["children"], monotonic, kinds))
        start(caches[0])

    @kopf.index(lambda resource: _kind(resource) == KIND, id="resources", registry=registry)
    async def index_resource(body: kopf.Body, resource: Any, **_: Any) -> dict[Key, Object]:
        found = _plain(body, resource)
        return {(found["metadata"]["namespace"], found["metadata"]["name"]): found}

    @kopf.index(lambda resource: _kind(resource) in children, id="children", registry=registry)
    async def index_child(body: kopf.Body, resource: Any, **_: Any) -> dict[Key | None, Object]:
        found = _plain(body, resource)
        return {owner_key(found): found}

    @kopf.on.event(lambda resource: _kind(resource) in kinds, registry=registry)
    async def handle_event(event: Any, resource: Any, **_: Any) -> None:
        found = _plain(event["object"], resource)
        if event["type"] is None:
            relist()
        caches[0].replace_answers(found)
        if event["type"] == "DELETED":
            caches[0].mark_deleted(found)
        if (key := key_of(found)) is None:
            return
        is_changed = found["kind"] == KIND and _is_changed(generations, key, found, event["type"])
        wake(key, is_changed)

    return registry


def _is_changed(generations: dict[Key, int], key: Key, resource: Object, event: str | None) -> bool:
    """Whether an event brings a new generation of a resource, after an earlier event of it."""
    before = generations.pop(key, None)
    if event != "DELETED":
        generations[key] = resource["metadata"]["generation"]
    return before is not None and generations.get(key, before) != before


def _kind(resource: Any) -> str | None:
    """The kind of a resource that kopf has discovered; None for one that is not of ours."""
    return _KINDS.get((resource.group, resource.version, resource.plural))


def _plain(body: Mapping[str, Any], resource: Any) -> Object:
    """The object as a plain dict; items of a list come without their kind.

    ``managedFields`` is half of an object's size, and nothing here reads it. It is removed from
    kopf's own copy: at the start kopf holds every object until the last one is indexed.
    """
    kind = _KINDS[resource.group, resource.version, resource.plural]
    body["metadata"].pop("managedFields", None)
    return {**body, "kind": kind, "apiVersion": KINDS[kind].api_version}
