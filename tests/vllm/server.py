"""vLLM's HTTP server as a process under test."""

import asyncio
import json
import ssl
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port

from ssd.rpc.client import TargetClient
from ssd.rpc.pool_codec import PoolStatus

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL = ROOT / "services/ssd/demo/weights/target"
MAX_SECONDS = 120.0
LOOKAHEAD = 6
GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}
VARIABLES = {
    "PYTHONPATH": ROOT / "services",
    "LD_PRELOAD": PYTHON.parents[1] / "lib/libiomp5.so",
    "VLLM_CPU_KVCACHE_SPACE": 1,
    "HF_HUB_OFFLINE": 1,
}
SPECULATION = {
    "method": "custom_class",
    "model": "ssd_vllm.Proposer",
    "num_speculative_tokens": LOOKAHEAD,
}


def command(*arguments: object, **variables: object) -> list[str]:
    """Return a command that runs vLLM's interpreter with its environment variables."""
    settings = (f"{name}={value}" for name, value in (VARIABLES | variables).items())
    return ["env", *settings, str(PYTHON), *map(str, arguments)]


class Server:
    """A server that answers, with its admin port."""

    def __init__(self, port: int, admin_port: int, ca: str = "") -> None:
        self.port = port
        self._url = f"{'https' if ca else 'http'}://127.0.0.1:{port}"
        self._context = ssl.create_default_context(cafile=ca) if ca else None
        self.admin_address = f"127.0.0.1:{admin_port}"

    def complete(self, request: Mapping[str, Any], **headers: str) -> list[dict[str, Any]]:
        """Return the choices of a completion; fails with the HTTP error."""
        with self._open(self._request(request, **headers)) as answer:
            choices: list[dict[str, Any]] = json.load(answer)["choices"]
            return choices

    def abort(self, request: Mapping[str, Any]) -> None:
        """Read the first event of a stream, then leave."""
        with self._open(self._request({**request, "stream": True})) as answer:
            assert answer.readline().startswith(b"data: {")

    def metrics(self) -> dict[str, float]:
        """Return all samples of /metrics by name and labels; labels of vLLM are dropped."""
        with self._open(f"{self._url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        found = {}
        for line in lines:
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name.partition("{")[0] if name.startswith("vllm:") else name] = float(value)
        return found

    def _open(self, request: str | urllib.request.Request) -> Any:
        return urllib.request.urlopen(request, context=self._context)

    def _request(self, request: Mapping[str, Any], **headers: str) -> urllib.request.Request:
        body = {"model": "base", "return_token_ids": True, **request}
        return urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", **headers},
        )


async def until(client: TargetClient, is_reached: Callable[[PoolStatus], bool]) -> PoolStatus:
    """Watch the pool until it has a state."""
    async with asyncio.timeout(MAX_SECONDS), aclosing(client.watch_pool()) as states:
        async for state in states:
            if is_reached(state):
                return state
    raise AssertionError("the server has stopped")


def is_active(pool: PoolStatus) -> bool:
    return pool.links[0].state == "active"


@contextmanager
def serving(
    adapter: Path | None, *flags: str, ca: str = "", cpus: str = "", **plugin: Any
) -> Iterator[Server]:
    """Start vLLM; ``plugin`` has settings of it, none: the worker without speculation.

    With ``ca``, its port has the certificate of the plugin, which this authority has signed.
    ``cpus`` are those of each rank and replica, as ``VLLM_CPU_OMP_THREADS_BIND``.
    """
    port, admin_port = free_port(), free_port()
    module = "ssd_vllm" if plugin else "vllm.entrypoints.openai.api_server"
    if adapter is not None:
        flags += ("--enable-lora", "--lora-modules", f"tuned={adapter}", "--max-lora-rank", "8")
    if ca:
        files = plugin["tls_certificate"], plugin["tls_key"]
        flags += ("--ssl-certfile", files[0], "--ssl-keyfile", files[1])
    settings = {"admin_port": admin_port, "draft_deadline_ms": 100, **plugin} if plugin else {}
    speculation = ("--speculative-config", json.dumps(SPECULATION)) if plugin else ()
    with tempfile.TemporaryDirectory() as metrics:
        process = subprocess.Popen(
            command(
                *("-m", module, "--model", MODEL, "--port", port),
                *("--served-model-name", "base", "--dtype", "float32", "--enforce-eager"),
                *("--max-model-len", 512, "--max-num-seqs", 8, "--max-num-batched-tokens", 64),
                # A small model would write white space up to the maximum length.
                *("--structured-outputs-config", json.dumps(GRAMMARS)),
                *("--worker-cls", "ssd_vllm.Worker", *speculation),
                *("--additional-config", json.dumps({"ssd": settings}), *flags),
                PROMETHEUS_MULTIPROC_DIR=metrics,
                **({"VLLM_CPU_OMP_THREADS_BIND": cpus} if cpus else {}),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        try:
            log = []
            for line in process.stdout:
                log.append(line)
                if "Application startup complete" in line:
                    break
            else:
                raise AssertionError("".join(log[-30:]))
            # A process stops at a full pipe.
            reader = threading.Thread(target=process.stdout.read, daemon=True)
            reader.start()
            yield Server(port, admin_port, ca)
        finally:
            process.terminate()
            process.wait(timeout=60)
            with process:
                """Closes its pipe."""
