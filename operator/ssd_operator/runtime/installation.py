"""What Helm runs once, in the operator's image: ``helm test``, and the Job of an uninstall.

``python -m ssd_operator.runtime.installation``, with ``check URL [NAMESPACE]``: the operator at URL
is
ready; with a namespace, the API server takes a good resource there and refuses a bad one (both
are dry runs). ``sample NAMESPACE``: the embedded pair serves one request. ``delete
[NAMESPACE...]``: all resources there, or everywhere, are gone.
"""

import asyncio
import contextlib
import copy
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus

from kubernetes_asyncio import client, config
from kubernetes_asyncio.client import ApiException, CustomObjectsApi

from ssd.errors import NotReadyError, SetupError, SSDError
from ssd.rpc.client import TargetClient
from ssd.telemetry import configure_logging, get_logger
from ssd.types import SamplingParams
from ssd_operator.api.spec import API_VERSION, GROUP, KIND, PLURAL, VERSION, Object
from ssd_operator.children.names import UNTOUCHED_NAMESPACE

READY_SECONDS = 45.0
"""``helm test`` right after ``helm install`` finds the operator this much later at the latest."""
SERVING_SECONDS = 180.0
"""The embedded pair loads in seconds; the rest is for its pods to be scheduled."""
GONE_SECONDS = 180.0
"""Resources carry no finalizer of ours; one that another's holds is named after this long."""
_POLL_SECONDS = 1.0
_SAMPLE: Object = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "ssd-sample"},
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

    async def is_ready() -> bool:
        return await asyncio.to_thread(_answers, url)

    await _until(is_ready, seconds, f"the operator at {url} is not ready")
    _log.info("operator_ready", url=url)


async def check_admission(api: CustomObjectsApi, namespace: str) -> None:
    """Let the API server judge a good and a bad resource; neither is stored.

    Raises:
        SetupError: it refuses the good one, takes the bad one, or refuses it for another reason.
    """
    good, bad = copy.deepcopy(_SAMPLE), copy.deepcopy(_SAMPLE)
    bad["spec"]["accelerator"] = "abacus"
    refusal = await _refusal(api, namespace, good)
    if refusal is not None:
        raise SetupError(f"the API server refuses a good {KIND}: {refusal}")
    refusal = await _refusal(api, namespace, bad)
    if refusal is None:
        raise SetupError(f"the API server takes accelerator abacus: is the CRD of {GROUP} current?")
    if "spec.accelerator" not in refusal:
        raise SetupError(f"the API server refuses accelerator abacus with other words: {refusal}")
    _log.info("admission_checked", namespace=namespace)


async def serve_sample(
    api: CustomObjectsApi,
    namespace: str,
    generate: Callable[[str], Awaitable[str]],
    seconds: float = SERVING_SECONDS,
) -> None:
    """Create the embedded pair, ask it once, delete it whatever happens.

    Args:
        api: the cluster.
        namespace: where to serve.
        generate: asks the endpoint for a text.
        seconds: longest wait for Ready.

    Raises:
        NotReadyError: it does not become Ready; carries the condition's words.
        SetupError: it wrote nothing.
    """
    name = _SAMPLE["metadata"]["name"]
    heard = ""

    async def is_ready() -> bool:
        nonlocal heard
        live = await api.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
        conditions = live.get("status", {}).get("conditions", [])
        ready: Object = next((each for each in conditions if each["type"] == "Ready"), {})
        heard = f"{ready.get('reason', 'no status yet')} {ready.get('message', '')}".strip()
        return bool(ready.get("status") == "True")

    await api.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, _SAMPLE)
    try:
        await _until(is_ready, seconds, f"{KIND} {name} is not Ready", lambda: heard)
        text = await generate(f"{name}.{namespace}.svc:50051")
        if not text:
            raise SetupError(f"{KIND} {name} is Ready and wrote nothing")
        _log.info("sample_served", characters=len(text))
    finally:
        await _delete(api, namespace, name)


async def delete_all(
    api: CustomObjectsApi, namespaces: Sequence[str], seconds: float = GONE_SECONDS
) -> None:
    """Delete the resources of some namespaces, or of all, and wait until they are gone.

    Their pods are the garbage collector's, which needs no operator.

    Raises:
        NotReadyError: some are still there; names them.
    """
    left = await _resources(api, namespaces)
    for namespace, name in left:
        await _delete(api, namespace, name)
        _log.info("deleted", namespace=namespace, resource=name)

    async def is_gone() -> bool:
        nonlocal left
        left = await _resources(api, namespaces)
        return not left

    await _until(is_gone, seconds, "a finalizer may hold resources", lambda: str(left))


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
        return []  # with their definition they all went
    return [
        (item["metadata"]["namespace"], item["metadata"]["name"])
        for each in lists
        for item in each["items"]
        if item["metadata"]["namespace"] != UNTOUCHED_NAMESPACE
    ]


async def _delete(api: CustomObjectsApi, namespace: str, name: str) -> None:
    try:
        await api.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
    except ApiException as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise


async def _refusal(api: CustomObjectsApi, namespace: str, body: Object) -> str | None:
    """What the API server has against a resource; None if nothing."""
    try:
        await api.create_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, body, dry_run="All"
        )
    except ApiException as error:
        return str(json.loads(error.body)["message"]) if error.body else str(error)
    return None


async def _until(
    is_done: Callable[[], Awaitable[bool]],
    seconds: float,
    complaint: str,
    detail: Callable[[], str] = lambda: "",
) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not await is_done():  # noqa: ASYNC110  the other end is a server
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        message = f"{complaint} after {seconds:g} s: {detail()}".removesuffix(": ")
        raise NotReadyError(message) from error


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False


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
        case ["check", url]:
            await check_ready(url)
        case ["check", url, namespace]:
            await check_ready(url)
            async with _cluster() as api:
                await check_admission(api, namespace)
        case ["sample", namespace]:
            async with _cluster() as api:
                await serve_sample(api, namespace, _generate)
        case ["delete", *namespaces]:
            async with _cluster() as api:
                await delete_all(api, namespaces)
        case _:
            raise SetupError(f"check, sample or delete is wanted, found {list(arguments)}")


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
