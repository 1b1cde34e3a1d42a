"""The cluster behind an API server, by kubernetes-asyncio: paths, patches, deadlines, errors."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config

from ssd.errors import SetupError
from ssd_operator.api.spec import API_VERSION, KIND, Object
from ssd_operator.children.names import MANAGED_BY_LABEL, OPERATOR
from ssd_operator.children.objects import digest
from ssd_operator.observe.cluster import (
    KINDS,
    OPTIONAL_KINDS,
    RESOURCE,
    BusyError,
    ClusterError,
    ConflictError,
    Key,
    MissingError,
    RefusedError,
    ServedKind,
    error_of,
    ref_of,
)
from ssd_operator.observe.diff import Place
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.pod_state import to_text
from ssd_operator.runtime import metrics
from ssd_operator.status.events import Event

CALL_SECONDS = 15.0
"""Longest call; the API server gives up on its own webhooks after ten."""
PAGE_LENGTH = 500
"""Objects of a list that come with one call."""
LONGEST_EVENT = 1024
"""Characters of an Event's message that an API server takes."""
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"
_JSON = "application/json"
_JSON_PATCH = "application/json-patch+json"
_METADATA = f"{_JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Of each object of a list nothing but its metadata."""


class ApiServer:
    """``Cluster`` on an API server. Asyncio loop."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    async def get(self, namespace: str, ref: Ref) -> Object | None:
        """See ``Cluster``."""
        kind = KINDS[ref.kind]
        with contextlib.suppress(MissingError):
            found = await self._call("GET", kind, kind.path(namespace, ref.name))
            return {"apiVersion": kind.api_version, "kind": ref.kind} | found
        return None

    async def uids(self, kind: str, namespace: str) -> frozenset[str]:
        """See ``Cluster``."""
        selector = "" if kind == KIND else f"{MANAGED_BY_LABEL}={OPERATOR}"
        pages = self._pages(KINDS[kind], namespace, PAGE_LENGTH, selector)
        return frozenset([each["uid"] async for page in pages for each in page])

    async def apply(self, wanted: Object, uid: str = "") -> Object:
        """See ``Cluster``."""
        ref, namespace = ref_of(wanted), wanted["metadata"]["namespace"]
        if uid:
            wanted = wanted | {"metadata": wanted["metadata"] | {"uid": uid}}
        kind = KINDS[ref.kind]
        path = kind.path(namespace, ref.name)
        try:
            return await self._apply(kind, path, wanted)
        except RefusedError as refusal:
            # An apply keeps the entries that others put into a list beside ours, and together they
            # may be refused: two ports of one name. A merge patch puts our lists in their place.
            # Without a uid the object may have another owner, whose lists must stay.
            if not uid:
                raise
            with contextlib.suppress(ClusterError):
                query = {"fieldManager": OPERATOR}
                return await self._call("PATCH", kind, path, _MERGE, wanted, query=query)
            raise refusal from None

    async def prune(self, live: Object, places: Sequence[Place]) -> Object:
        """See ``Cluster``."""
        ref, metadata = ref_of(live), live["metadata"]
        kind = KINDS[ref.kind]
        patch = [_operation("test", ("metadata", "uid"), live)]
        for place in places:
            patch += [_operation("test", place, live), _operation("remove", place, live)]
        path = kind.path(metadata["namespace"], ref.name)
        try:
            return await self._call(
                "PATCH", kind, path, _JSON_PATCH, patch, query={"fieldManager": OPERATOR}
            )
        except RefusedError as error:
            # A test that fails gets the same code as a policy that refuses an unchanged object.
            found = await self.get(metadata["namespace"], ref)
            version = "resourceVersion"
            if found is not None and found["metadata"].get(version) == metadata.get(version):
                raise
            raise ConflictError(str(error)) from error

    async def delete(self, namespace: str, ref: Ref, uid: str) -> None:
        """See ``Cluster``."""
        kind = KINDS[ref.kind]
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        with contextlib.suppress(MissingError):
            await self._call("DELETE", kind, kind.path(namespace, ref.name), body=options)

    async def annotate_pod(
        self, namespace: str, name: str, annotations: Mapping[str, str]
    ) -> Object | None:
        """See ``Cluster``."""
        kind = KINDS["Pod"]
        body = {"metadata": {"annotations": dict(annotations)}}
        with contextlib.suppress(MissingError):
            return await self._call("PATCH", kind, kind.path(namespace, name), _MERGE, body)
        return None

    async def adopt_pod(self, namespace: str, name: str, uid: str, owner: Object) -> Object | None:
        """See ``Cluster``."""
        kind = KINDS["Pod"]
        body = {"metadata": {"uid": uid, "ownerReferences": [owner]}}
        with contextlib.suppress(MissingError):
            return await self._call("PATCH", kind, kind.path(namespace, name), _STRATEGIC, body)
        return None

    async def patch_status(self, namespace: str, name: str, status: Object) -> Object | None:
        """See ``Cluster``."""
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name},
            "status": status,
        }
        with contextlib.suppress(MissingError):
            return await self._apply(RESOURCE, RESOURCE.path(namespace, name, "status"), body)
        return None

    async def patch_scale(self, namespace: str, name: str, replicas: int) -> None:
        """See ``Cluster``."""
        path = RESOURCE.path(namespace, name, "scale")
        with contextlib.suppress(MissingError):
            await self._call("PATCH", RESOURCE, path, _MERGE, {"spec": {"replicas": replicas}})

    async def post_event(self, about: Object, event: Event, seconds: float) -> None:
        """See ``Cluster``."""
        kind, owner = KINDS["Event"], about["metadata"]
        when = to_text(seconds)
        told = {"reason": event.reason, "message": event.message[:LONGEST_EVENT]}
        # One object a telling: nothing is counted up, so nothing has to be read first.
        name = f"{owner['name']}.{digest({'about': owner['uid'], 'at': seconds, **told}, 16)}"
        body = {
            "apiVersion": kind.api_version,
            "kind": "Event",
            "metadata": {"name": name, "namespace": owner["namespace"]},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": owner["name"],
                "namespace": owner["namespace"],
                "uid": owner["uid"],
                "resourceVersion": owner.get("resourceVersion", ""),
            },
            **told,
            "type": str(event.severity),
            "source": {"component": OPERATOR},
            "reportingComponent": OPERATOR,
            "firstTimestamp": when,
            "lastTimestamp": when,
            "count": 1,
        }
        await self._call("POST", kind, kind.path(owner["namespace"]), body=body)

    async def optional_kinds(self) -> frozenset[str]:
        """See ``Cluster``."""
        found = [name for name in OPTIONAL_KINDS if await self.is_served(name)]
        return frozenset(found)

    async def is_served(self, name: str) -> bool:
        """Whether the cluster knows a kind.

        Raises:
            ClusterError: it cannot be told.
        """
        kind = KINDS[name]
        with contextlib.suppress(MissingError):
            served = await self._call("GET", kind, kind.root)
            return any(each.get("name") == kind.plural for each in served.get("resources", []))
        return False

    async def list_keys(self, kind: str, namespace: str, *, most: int = 0) -> set[Key]:
        """Namespaces and names of a kind's objects.

        Args:
            kind: as in a manifest.
            namespace: empty for all.
            most: how many are enough; 0 for all.

        Raises:
            ClusterError: they cannot be listed.
        """
        keys = set[Key]()
        async for page in self._pages(KINDS[kind], namespace, most or PAGE_LENGTH):
            keys |= {(each["namespace"], each["name"]) for each in page}
            if most:
                break
        return keys

    async def served_schema(self) -> Object:
        """The schema of SSDDeployments that the API server serves, ``properties`` outermost.

        Raises:
            ClusterError: it does not answer, or does not serve them.
        """
        document = await self._call("GET", RESOURCE, f"/openapi/v3{RESOURCE.root}")
        schemas = document.get("components", {}).get("schemas", {})
        identity = {"group": RESOURCE.group, "version": RESOURCE.version, "kind": KIND}
        for schema in schemas.values():
            if identity in schema.get("x-kubernetes-group-version-kind", []):
                return dict(schema)
        raise MissingError(f"the API server does not serve {KIND} of {API_VERSION}")

    async def _pages(
        self, kind: ServedKind, namespace: str, length: int, selector: str = ""
    ) -> AsyncIterator[list[Object]]:
        """The metadata of a kind's objects, a page a call."""
        query = {"limit": str(length)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self._call("GET", kind, kind.path(namespace), _METADATA, query=query)
            yield [each["metadata"] for each in page.get("items") or []]
            query["continue"] = page.get("metadata", {}).get("continue", "")
            if not query["continue"]:
                return

    async def _apply(self, kind: ServedKind, path: str, body: Object) -> Object:
        query = {"fieldManager": OPERATOR, "force": "true"}
        return await self._call("PATCH", kind, path, _APPLY, body, query=query)

    async def _call(
        self,
        verb: str,
        kind: ServedKind,
        path: str,
        media_type: str = _JSON,
        body: Object | list[Object] | None = None,
        *,
        query: Mapping[str, str] | None = None,
    ) -> Object:
        """Call, and make an error of every answer that is none.

        Args:
            verb: HTTP method.
            kind: for the counter.
            path: of the URL.
            media_type: of the body; of the answer if there is no body.
            body: to be sent.
            query: of the URL.

        Raises:
            ClusterError: the leaf that fits.
        """
        what, code = f"{verb} {path}", "none"
        sent, wished = (_JSON, media_type) if body is None else (media_type, _JSON)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                answer = await self._api.call_api(
                    path,
                    verb,
                    query_params=list((query or {}).items()),
                    header_params={"Content-Type": sent, "Accept": wished},
                    body=body,
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                )
                code = str(answer.status)
                content = _decoded(await answer.read())
        except TimeoutError as error:
            raise BusyError(f"{what}: no answer within {CALL_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise BusyError(f"{what}: {error}") from error
        finally:
            metrics.API_REQUESTS_TOTAL.labels(verb, kind.plural, code).inc()
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise error_of(answer.status, content, what, answer.headers.get("Retry-After", ""))
        return content


@contextlib.asynccontextmanager
async def connect() -> AsyncIterator[ApiServer]:
    """The cluster of this pod; elsewhere the one that ``KUBECONFIG`` names.

    Raises:
        SetupError: neither is there.
    """
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        try:
            await config.load_kube_config(client_configuration=settings)
        except config.ConfigException as error:
            raise SetupError(f"no cluster: not in a pod, and {error}") from error
    async with client.ApiClient(settings) as api:
        yield ApiServer(api)


async def check_served(api: ApiServer) -> None:
    """Refuse to start on a cluster that does not know the resource.

    Raises:
        SetupError: the CRD is missing.
        ClusterError: the API server does not say.
    """
    if not await api.is_served(KIND):
        raise SetupError(
            f"the cluster does not serve {KIND} of {API_VERSION}; "
            "apply the CRD (charts/ssd/files/crd.yaml) or install the chart with crds.install=true"
        )


def _operation(verb: str, place: Place, live: Object) -> Object:
    """An operation of a JSON patch on what is at a place."""
    value: Any = live
    for step in place:
        value = value[step]
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in place)
    operation = {"op": verb, "path": "".join(f"/{step}" for step in steps)}
    return operation | ({"value": value} if verb == "test" else {})


def _decoded(content: bytes) -> dict[str, Any]:
    """An answer that should be an object; proxies answer in other tongues."""
    try:
        found = json.loads(content)
    except ValueError:
        return {"message": content[:200].decode(errors="replace")}
    return found if isinstance(found, dict) else {"message": str(found)[:200]}
