"""What Helm runs once, in the operator's image: ``helm test``, and the Job of an uninstall.

``python -m ssd_operator.runtime.installation`` takes ``check URL``: the operator at URL is ready.
``sample NAMESPACE [SECRET...]``: the embedded pair serves one request; the Secrets are for pulling
its images. ``delete [NAMESPACE...]``: all resources there, or everywhere, are gone.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from itertools import product

import aiohttp

from ssd.errors import NotReadyError, SetupError, SSDError
from ssd.observability.log import configure_logging, get_logger
from ssd.rpc.client import TargetClient
from ssd.types import SamplingParams
from ssd_operator.api.spec import API_VERSION, KIND, RESOURCE_KINDS, Object
from ssd_operator.children.objects import TARGET_PORT
from ssd_operator.observe.cluster import Cluster, ForbiddenError, MissingError, Ref, ref_of
from ssd_operator.observe.pod_state import condition_of
from ssd_operator.runtime.api_server import connect
from ssd_operator.settings import UNTOUCHED_NAMESPACE

READY_SECONDS = 45.0
"""``helm test`` right after ``helm install`` finds the operator this much later at the latest."""
SERVING_SECONDS = 180.0
"""The embedded pair loads in seconds; the rest is for its pods to be scheduled."""
GONE_SECONDS = 180.0
"""Resources carry no finalizer of ours; one that another's holds is named after this long."""
POLL_SECONDS = 1.0
"""Pause between two questions to the API server or a target."""
_SAMPLE = Ref(KIND, "ssd-sample")

_log = get_logger(__name__)


async def check_ready(url: str, seconds: float = READY_SECONDS) -> None:
    """Return once the operator answers 200."""

    async def problem() -> str:
        try:
            async with aiohttp.request("GET", url, timeout=aiohttp.ClientTimeout(2)) as answer:
                is_ready = answer.status == HTTPStatus.OK
                return "" if is_ready else await answer.text() or f"status {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return str(error) or "no answer"

    await _wait(problem, seconds, f"the operator at {url} is not ready")


async def serve_sample(
    cluster: Cluster,
    namespace: str,
    generate: Callable[[str], Awaitable[str]],
    *,
    pull_secrets: Sequence[str] = (),
    seconds: float = SERVING_SECONDS,
) -> None:
    """Create the embedded pair, send it one request, and delete it in any case.

    Raises:
        NotReadyError: it does not become Ready; contains the condition.
        SetupError: its text is empty.
    """

    async def problem() -> str:
        ready = condition_of(await cluster.get(namespace, _SAMPLE) or {}, "Ready")
        message = f"{ready.get('reason', 'no status yet')} {ready.get('message', '')}".strip()
        return "" if ready.get("status") == "True" else message

    # A test that was interrupted has left it.
    await _delete_sample(cluster, namespace)

    async def is_left() -> str:
        return "" if await cluster.get(namespace, _SAMPLE) is None else "a finalizer may hold it"

    await _wait(is_left, GONE_SECONDS, f"{KIND} {_SAMPLE.name} of an earlier test is there")
    await cluster.create(_sample(namespace, pull_secrets))
    try:
        await _wait(problem, seconds, f"{KIND} {_SAMPLE.name} is not Ready")
        text = await generate(f"{_SAMPLE.name}.{namespace}.svc:{TARGET_PORT}")
        if not text:
            raise SetupError(f"{KIND} {_SAMPLE.name} is Ready and its text is empty")
        _log.info("sample_served", characters=len(text))
    finally:
        await _delete_sample(cluster, namespace)


async def _delete_sample(cluster: Cluster, namespace: str) -> None:
    if (live := await cluster.get(namespace, _SAMPLE)) is not None:
        await cluster.delete(namespace, _SAMPLE, live["metadata"]["uid"])


async def delete_all(
    cluster: Cluster, namespaces: Sequence[str], seconds: float = GONE_SECONDS
) -> None:
    """Delete all resources of some namespaces, or of all, and wait until they are gone.

    The garbage collector deletes their pods, without an operator. A namespace that was deleted is
    forbidden, because its RoleBinding is gone; it is logged.

    Raises:
        ForbiddenError: no namespace may be listed; perhaps all of them were deleted.
    """
    forbidden, listed_once = set[str](), set[str]()

    async def listed(kind: str, namespace: str) -> list[Object]:
        try:
            found = (await cluster.list_all(kind, namespace))[0]
            listed_once.add(namespace)
            return found
        except MissingError:  # they were deleted with their definition
            return []
        except ForbiddenError as error:
            if namespace not in forbidden:
                forbidden.add(namespace)
                _log.warning("namespace_left_out", namespace=namespace, error=str(error))
            if not listed_once and forbidden >= {*(namespaces or ("",))}:
                raise
            return []

    async def problem() -> str:
        left = []
        for kind, namespace in product(sorted(RESOURCE_KINDS), namespaces or ("",)):
            for resource in await listed(kind, namespace):
                where, ref = resource["metadata"]["namespace"], ref_of(resource)
                if where != UNTOUCHED_NAMESPACE:
                    with contextlib.suppress(MissingError):
                        await cluster.delete(where, ref, resource["metadata"]["uid"])
                    left.append((where, ref.name))
        return str(left) if left else ""

    await _wait(problem, seconds, "a finalizer may hold resources")


def _sample(namespace: str, pull_secrets: Sequence[str] = ()) -> Object:
    spec: Object = {
        "accelerator": "cpu",
        "target": {"source": {"uri": "demo://target"}},
        "draft": {"source": {"uri": "demo://draft"}},
        "podTemplate": {"imagePullSecrets": [{"name": secret} for secret in pull_secrets]},
    }
    metadata = {"name": _SAMPLE.name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


async def _wait(problem: Callable[[], Awaitable[str]], seconds: float, complaint: str) -> None:
    """Return once there is no problem; one that is left after this time is a NotReadyError."""
    last = ""
    try:
        async with asyncio.timeout(seconds):
            while last := await problem():  # noqa: ASYNC110  the other end is a server
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError as error:
        message = f"{complaint} after {seconds:g} s: {last}".removesuffix(": ")
        raise NotReadyError(message) from error


async def _generate(endpoint: str) -> str:
    async with TargetClient(endpoint) as target:
        await target.wait_ready(30.0)
        sampling = SamplingParams(temperature=0.0, max_tokens=16)
        return "".join([chunk.text async for chunk in target.generate("def fib(n):", sampling)])


async def _run(arguments: Sequence[str]) -> None:
    match arguments:
        case ["check", url]:
            await check_ready(url)
        case ["sample", namespace, *secrets]:
            async with connect() as cluster:
                await serve_sample(cluster, namespace, _generate, pull_secrets=secrets)
        case ["delete", *namespaces]:
            async with connect() as cluster:
                await delete_all(cluster, namespaces)
        case _:
            raise SetupError(f"expected check, sample or delete, found {list(arguments)}")
    _log.info("done", command=" ".join(arguments))


def main() -> None:
    """Run one command; the exit code is 0, or 1 with the reason in the log."""
    configure_logging("text", "installation")
    try:
        asyncio.run(_run(sys.argv[1:]))
    except SSDError as error:
        _log.error("failed", reason=str(error))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
