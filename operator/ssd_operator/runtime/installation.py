"""What Helm runs once, in the operator's image: ``helm test``, and the Job of an uninstall.

``python -m ssd_operator.runtime.installation`` takes ``check URL [NAMESPACE]``: the operator at URL
is ready; with a namespace, the API server accepts a good resource there and rejects a bad one (both
are dry runs). ``sample NAMESPACE``: the embedded pair serves one request. ``delete
[NAMESPACE...]``: all resources there, or everywhere, are gone.
"""

import asyncio
import contextlib
import copy
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client import ApiException, CustomObjectsApi

from ssd.errors import NotReadyError, SetupError, SSDError
from ssd.rpc.client import TargetClient
from ssd.telemetry import configure_logging, get_logger
from ssd.types import SamplingParams
from ssd_operator.api.spec import API_VERSION, GROUP, KIND, PLURAL, VERSION, Object
from ssd_operator.children.names import TARGET_PORT, UNTOUCHED_NAMESPACE

READY_SECONDS = 45.0
"""``helm test`` right after ``helm install`` finds the operator this much later at the latest."""
SERVING_SECONDS = 180.0
"""The embedded pair loads in seconds; the rest is for its pods to be scheduled."""
GONE_SECONDS = 180.0
"""Resources carry no finalizer of ours; one that another's holds is named after this long."""
_POLL_SECONDS = 1.0
_NAME = "ssd-sample"
_SAMPLE: Object = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": _NAME},
    "spec": {
        "accelerator": "cpu",
        "target": {"source": {"uri": "demo://target"}},
        "draft": {"source": {"uri": "demo://draft"}},
    },
}

_log = get_logger(__name__)


async def check_ready(url: str, seconds: float = READY_SECONDS) -> None:
    """Return once the operator answers 200.

    Raises:
        NotReadyError: it does not within the time.
    """

    async def problem() -> str:
        try:
            async with aiohttp.request("GET", url, timeout=aiohttp.ClientTimeout(2)) as answer:
                is_ready = answer.status == HTTPStatus.OK
                return "" if is_ready else await answer.text() or f"status {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return str(error) or "no answer"

    await _wait(problem, seconds, f"the operator at {url} is not ready")
    _log.info("operator_ready", url=url)


async def check_admission(api: CustomObjectsApi, namespace: str) -> None:
    """Send a good and a bad resource to the API server; neither is stored.

    Raises:
        SetupError: it rejects the good one, accepts the bad one, or rejects it for another reason.
    """
    good, bad = _SAMPLE, copy.deepcopy(_SAMPLE)
    bad["spec"]["accelerator"] = "abacus"
    rejection = await _rejection(api, namespace, good)
    if rejection is not None:
        raise SetupError(f"the API server rejects a good {KIND}: {rejection}")
    rejection = await _rejection(api, namespace, bad)
    if rejection is None:
        raise SetupError(f"the API server accepts accelerator abacus: is the CRD of {GROUP} old?")
    if "spec.accelerator" not in rejection:
        raise SetupError(f"the API server rejects accelerator abacus for: {rejection}")
    _log.info("admission_checked", namespace=namespace)


async def serve_sample(
    api: CustomObjectsApi,
    namespace: str,
    generate: Callable[[str], Awaitable[str]],
    seconds: float = SERVING_SECONDS,
) -> None:
    """Create the embedded pair, send it one request, and delete it in any case.

    Args:
        api: the cluster.
        namespace: where to serve.
        generate: requests a text of an endpoint.
        seconds: longest wait for Ready.

    Raises:
        NotReadyError: it does not become Ready; contains the condition.
        SetupError: its text is empty.
    """

    async def problem() -> str:
        live = await api.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, _NAME)
        conditions = live.get("status", {}).get("conditions", [])
        ready: Object = next((each for each in conditions if each["type"] == "Ready"), {})
        if ready.get("status") == "True":
            return ""
        return f"{ready.get('reason', 'no status yet')} {ready.get('message', '')}".strip()

    await api.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, _SAMPLE)
    try:
        await _wait(problem, seconds, f"{KIND} {_NAME} is not Ready")
        text = await generate(f"{_NAME}.{namespace}.svc:{TARGET_PORT}")
        if not text:
            raise SetupError(f"{KIND} {_NAME} is Ready and its text is empty")
        _log.info("sample_served", characters=len(text))
    finally:
        await _delete(api, namespace, _NAME)


async def delete_all(
    api: CustomObjectsApi, namespaces: Sequence[str], seconds: float = GONE_SECONDS
) -> None:
    """Delete the resources of some namespaces, or of all, and wait until they are gone.

    The garbage collector deletes their pods, without an operator.

    Raises:
        NotReadyError: some are still there; names them.
    """
    for namespace, name in await _resources(api, namespaces):
        await _delete(api, namespace, name)
        _log.info("deleted", namespace=namespace, resource=name)

    async def problem() -> str:
        left = await _resources(api, namespaces)
        return str(left) if left else ""

    await _wait(problem, seconds, "a finalizer may hold resources")


async def _resources(api: CustomObjectsApi, namespaces: Sequence[str]) -> list[tuple[str, str]]:
    """(namespace, name) of each; without namespaces, of all that an operator may watch."""
    try:
        if namespaces:
            lists = [
                await api.list_namespaced_custom_object(GROUP, VERSION, each, PLURAL)
                for each in namespaces
            ]
        else:
            lists = [await api.list_cluster_custom_object(GROUP, VERSION, PLURAL)]
    except ApiException as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return []  # they were deleted with their definition
    found = [item["metadata"] for each in lists for item in each["items"]]
    return [
        (each["namespace"], each["name"])
        for each in found
        if each["namespace"] != UNTOUCHED_NAMESPACE
    ]


async def _delete(api: CustomObjectsApi, namespace: str, name: str) -> None:
    try:
        await api.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
    except ApiException as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise


async def _rejection(api: CustomObjectsApi, namespace: str, body: Object) -> str | None:
    """The API server's message about a resource; None if it is accepted."""
    try:
        await api.create_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, body, dry_run="All"
        )
    except ApiException as error:
        return str(json.loads(error.body)["message"]) if error.body else str(error)
    return None


async def _wait(problem: Callable[[], Awaitable[str]], seconds: float, complaint: str) -> None:
    """Return once there is no problem any more."""
    last = ""
    try:
        async with asyncio.timeout(seconds):
            while last := await problem():  # noqa: ASYNC110  the other end is a server
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        message = f"{complaint} after {seconds:g} s: {last}".removesuffix(": ")
        raise NotReadyError(message) from error


async def _generate(endpoint: str) -> str:
    async with TargetClient(endpoint) as target:
        await target.wait_ready(30.0)
        sampling = SamplingParams(temperature=0.0, max_tokens=16)
        return "".join([chunk.text async for chunk in target.generate("def fib(n):", sampling)])


@contextlib.asynccontextmanager
async def _cluster() -> AsyncIterator[CustomObjectsApi]:
    """The API of the cluster that this process runs in."""
    config.load_incluster_config()  # type: ignore[no-untyped-call]
    async with client.ApiClient() as api_client:
        yield CustomObjectsApi(api_client)


async def _run(arguments: Sequence[str]) -> None:
    match arguments:
        case ["check", url, *namespaces] if len(namespaces) <= 1:
            await check_ready(url)
            for namespace in namespaces:
                async with _cluster() as api:
                    await check_admission(api, namespace)
        case ["sample", namespace]:
            async with _cluster() as api:
                await serve_sample(api, namespace, _generate)
        case ["delete", *namespaces]:
            async with _cluster() as api:
                await delete_all(api, namespaces)
        case _:
            raise SetupError(f"expected check, sample or delete, found {list(arguments)}")


def main() -> None:
    """Run one command; the exit code is 0, or 1 with the reason in the log."""
    configure_logging("text", "installation")
    try:
        asyncio.run(_run(sys.argv[1:]))
    except (SSDError, ApiException) as error:
        _log.error("failed", reason=str(error))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
