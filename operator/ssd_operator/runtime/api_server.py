"""The cluster behind an API server, by kubernetes-asyncio: paths, patches, deadlines, errors."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp
from kubernetes_asyncio import client, config

from ssd.errors import SetupError
from ssd_operator.api.spec import API_VERSION, GROUP, RESOURCE_KINDS, VERSION, Object
from ssd_operator.children.objects import KINDS, OPERATOR
from ssd_operator.observe.cluster import (
    BusyError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    MissingError,
    Ref,
    RefusedError,
    ref_of,
)
from ssd_operator.observe.object_cache import LABELS, whole
from ssd_operator.runtime import metrics

CALL_SECONDS = 15.0
"""Longest call; the API server gives up on its own webhooks after ten."""
PAGE_LENGTH = 500
"""Objects of a list that come with one call."""
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"
_ERRORS: Mapping[int, type[ClusterError]] = {
    HTTPStatus.BAD_REQUEST: RefusedError,
    HTTPStatus.FORBIDDEN: ForbiddenError,
    HTTPStatus.NOT_FOUND: MissingError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: RefusedError,
    HTTPStatus.UNPROCESSABLE_ENTITY: RefusedError,
}


class _Place(NamedTuple):
    """Path of a call, and the resource for its metric."""

    path: str
    plural: str


class ApiServer:
    """``Cluster`` on an API server. Asyncio loop."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    async def get(self, namespace: str, ref: Ref) -> Object | None:
        """See ``Cluster``."""
        with contextlib.suppress(MissingError):
            return await self._call("GET", _place(ref.kind, namespace, ref.name))
        return None

    async def list_all(self, kind: str, namespace: str) -> tuple[list[Object], int]:
        """See ``Cluster``."""
        place, objects = _place(kind, namespace), list[Object]()
        query = {"limit": str(PAGE_LENGTH)}
        query |= {} if kind in RESOURCE_KINDS else {"labelSelector": LABELS}
        while True:
            page = await self._call("GET", place, query=query)
            metadata = page.get("metadata") or {}
            if "resourceVersion" not in metadata:
                raise BusyError(f"GET {place.path}: no list: {page.get('message', '')}")
            objects += [whole(kind, item) for item in page.get("items") or ()]
            query["continue"] = metadata.get("continue", "")
            if not query["continue"]:
                return objects, int(metadata["resourceVersion"])

    async def apply(self, wanted: Object, uid: str = "", subresource: str = "") -> Object:
        """See ``Cluster``."""
        ref, metadata = ref_of(wanted), wanted["metadata"]
        if uid:
            wanted = wanted | {"metadata": metadata | {"uid": uid}}
        place = _place(ref.kind, metadata["namespace"], ref.name, subresource)
        query = {"fieldManager": OPERATOR, "force": "true"}
        return await self._call("PATCH", place, wanted, _APPLY, query=query)

    async def patch(
        self, namespace: str, ref: Ref, changes: Object, subresource: str = ""
    ) -> Object:
        """See ``Cluster``."""
        place = _place(ref.kind, namespace, ref.name, subresource)
        return await self._call("PATCH", place, changes, _MERGE, query={"fieldManager": OPERATOR})

    async def delete(self, namespace: str, ref: Ref, uid: str) -> None:
        """See ``Cluster``."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        with contextlib.suppress(MissingError):
            await self._call("DELETE", _place(ref.kind, namespace, ref.name), options)

    async def create(self, thing: Object) -> None:
        """See ``Cluster``."""
        await self._call("POST", _place(thing["kind"], thing["metadata"]["namespace"]), thing)

    async def served_schema(self, kind: str) -> Object:
        """The schema of a kind of ours that the API server serves, ``properties`` outermost.

        Raises:
            ClusterError: the API server does not answer, or does not serve the kind.
        """
        place, schemas = _Place(f"/openapi/v3/apis/{API_VERSION}", KINDS[kind].plural), {}
        with contextlib.suppress(MissingError):
            document = await self._call("GET", place)
            schemas = document.get("components", {}).get("schemas", {})
        identity = {"group": GROUP, "version": VERSION, "kind": kind}
        for schema in schemas.values():
            if identity in schema.get("x-kubernetes-group-version-kind", []):
                return dict(schema)
        raise MissingError(
            f"the cluster does not serve {kind} of {API_VERSION}; "
            "apply the CRDs (charts/ssd/files/crd.yaml) or install the chart with crds.install=true"
        )

    async def _call(
        self,
        verb: str,
        place: _Place,
        body: Object | None = None,
        media_type: str = _JSON,
        *,
        query: Mapping[str, str] | None = None,
    ) -> Object:
        """Send a request; every status but success becomes the ``ClusterError`` that fits."""
        request, code = f"{verb} {place.path}", "none"
        try:
            async with asyncio.timeout(CALL_SECONDS):
                answer = await self._api.call_api(
                    place.path,
                    verb,
                    query_params=list((query or {}).items()),
                    header_params={"Content-Type": media_type, "Accept": _JSON},
                    body=body,
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                )
                code = str(answer.status)
                content = _decoded(await answer.read())
        except TimeoutError as error:
            raise BusyError(f"{request}: no answer within {CALL_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise BusyError(f"{request}: {error}") from error
        finally:
            metrics.API_REQUESTS_TOTAL.labels(verb, place.plural, code).inc()
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise _error(answer.status, content, request, answer.headers.get("Retry-After", ""))
        return content


@contextlib.asynccontextmanager
async def connect() -> AsyncIterator[ApiServer]:
    """The cluster of this pod; elsewhere the one that ``KUBECONFIG`` names.

    Raises:
        SetupError: there is neither of the two.
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


def _place(kind: str, namespace: str, name: str = "", subresource: str = "") -> _Place:
    """Place of a collection, an object, or a part of one; no namespace means all."""
    api_version, plural = KINDS[kind]
    root = "apis" if "/" in api_version else "api"
    where = ["namespaces", namespace] if namespace else []
    parts = ["", root, api_version, *where, plural, name, subresource]
    return _Place("/".join(parts).rstrip("/"), plural)


def _error(code: int, answer: Object, request: str, retry_after: str) -> ClusterError:
    """The error of an answer whose status is not success; see ``Status`` of Kubernetes."""
    message = f"{request}: {code} {answer.get('message', '')}".rstrip()
    causes = (answer.get("details") or {}).get("causes") or []
    # A write with the uid of another object: the uid cannot change.
    if any(cause.get("field") == "metadata.uid" for cause in causes):
        return ConflictError(message)
    if any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        return MissingError(message)
    seconds = float(retry_after) if retry_after.isdecimal() else 0.0
    return _ERRORS.get(code, BusyError)(message, seconds)


def _decoded(content: bytes) -> dict[str, Any]:
    """An answer that should be an object; proxies answer with other texts."""
    try:
        answer = json.loads(content)
    except ValueError:
        return {"message": content[:200].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {"message": str(answer)[:200]}
