"""A gateway on a real port, in front of targets whose answers a test scripts."""

import asyncio
import contextlib
import hashlib
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from hypothesis import strategies as st
from openai import AsyncOpenAI
from tests.processes import ProcessUnderTest, running
from tests.served import serving

from ssd.errors import NotReadyError
from ssd.ports import SystemClock
from ssd.rpc import codec
from ssd.rpc.codec import GenerateCall, ModelInfo
from ssd.types import FinishReason, GenerationChunk, Mode, SpeculationStatistics, Usage
from ssd.v1 import generate_pb2, generate_pb2_grpc
from ssd_gateway.gateway import Gateway
from ssd_gateway.schemas import MISSING_FEATURES, WITHOUT_EFFECT, ChatRequest, CompletionRequest
from ssd_gateway.settings import GatewaySettings

INFO = ModelInfo(
    model="demo",
    family="llama",
    num_parameters=1,
    vocab_size=257,
    max_model_len=64,
    dtype="float32",
    attention_backend="cpu",
    device="cpu",
    version="0",
    tokenizer_fingerprint="f",
    lookahead=3,
    branches=8,
    active_drafts=1,
    max_num_seqs=4,
    deterministic=False,
    dtype_reason="set explicitly",
    max_text_bytes=1 << 20,
    tool_format="hermes",
)
JSON_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)
HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/Place"}},
            "required": ["place"],
            "$defs": {"Place": {"type": "string"}},
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
# Bodies of requests, most of which are not valid.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from([0, 1, 2, 0.5, "auto", "user", "text", "json_schema", "speculative"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "include_usage", "5", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
FIELDS = sorted(
    {alias for kind in (ChatRequest, CompletionRequest) for alias in kind.model_fields}
    | MISSING_FEATURES.keys()
    | WITHOUT_EFFECT
)
BODIES = st.builds(
    lambda valid, other: valid | other,
    st.sampled_from(
        [{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}, {"prompt": [1, 2]}, {}]
    ),
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), VALUES, max_size=4),
)
Answer = Callable[[GenerateCall], AsyncIterator[GenerationChunk]]


async def spells(
    call: GenerateCall, words: tuple[str, ...] = ("a ", "b ", "c")
) -> AsyncGenerator[GenerationChunk, None]:
    """A word in each chunk; the last one ends each continuation."""
    for choice in range(call.sampling.n):
        for number, word in enumerate(words):
            is_last = number == len(words) - 1
            yield GenerationChunk(
                token_ids=(number,),
                text=word,
                choice=choice,
                seed=7 if number == 0 else None,
                finish_reason=FinishReason.LENGTH if is_last else None,
                usage=Usage(prompt_tokens=5, completion_tokens=len(words)) if is_last else None,
                statistics=SpeculationStatistics(mode=Mode.SPECULATIVE, rounds=3)
                if is_last
                else None,
            )


async def endless(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
    """A token, and then nothing until the request is cancelled."""
    yield GenerationChunk(token_ids=(1,), text="a")
    await asyncio.Event().wait()


def refusing(error: Exception) -> Answer:
    """An answer that is this error."""

    async def refuses(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        no_chunks: tuple[GenerationChunk, ...] = ()
        for chunk in no_chunks:
            yield chunk
        raise error

    return refuses


@dataclass
class ScriptedTarget(generate_pb2_grpc.GenerateServiceServicer):
    """A target on a real port, without a model."""

    answer: Answer = spells
    info: ModelInfo = INFO
    reason: str = ""
    """Why it is not ready; empty while it is."""
    calls: list[GenerateCall] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    """The header ``traceparent`` of each call; empty if it is missing."""
    num_cancelled: int = 0
    address: str = ""

    def reset(self) -> None:
        """Forget all calls, and answer as a new target does."""
        self.answer, self.num_cancelled = spells, 0
        for each in (self.calls, self.request_ids, self.traces):
            each.clear()

    async def Generate(  # noqa: N802 - the rpc's name
        self,
        request: generate_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        call = codec.generate_call(request)
        self.calls.append(call)
        metadata = dict(context.invocation_metadata() or ())
        self.request_ids.append(str(metadata.get("x-request-id", "")))
        self.traces.append(str(metadata.get("traceparent", "")))
        try:
            async for chunk in self.answer(call):
                yield codec.generate_response(chunk)
        except (asyncio.CancelledError, GeneratorExit):
            # The second one if the server was sending a chunk.
            self.num_cancelled += 1
            raise

    async def GetModelInfo(  # noqa: N802 - the rpc's name
        self, _request: object, _context: object
    ) -> generate_pb2.GetModelInfoResponse:
        if self.reason:
            raise NotReadyError(self.reason)
        return codec.model_info_response(self.info)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["ScriptedTarget"]:
        async with serving(self) as server:
            self.address = f"127.0.0.1:{server.port}"
            yield self


@dataclass
class Front:
    """A running gateway."""

    base: str
    gateway: Gateway

    def client(self, key: str = "none", *, max_retries: int = 0) -> AsyncOpenAI:
        """Return the official client of its API."""
        return AsyncOpenAI(base_url=f"{self.base}/v1", api_key=key, max_retries=max_retries)


@contextlib.asynccontextmanager
async def fronting(*targets: ScriptedTarget, **settings: object) -> AsyncIterator[Front]:
    """Run a gateway in front of these targets until the end of the block."""
    async with contextlib.AsyncExitStack() as stack:
        for target in targets:
            await stack.enter_async_context(target.serving())
        addresses = tuple(target.address for target in targets) or ("127.0.0.1:1",)
        values = {"port": 0, "targets": addresses, "drain_seconds": 1.0, **settings}
        gateway = Gateway(GatewaySettings(**values), SystemClock())  # type: ignore[arg-type]
        serve = asyncio.create_task(gateway.run())
        try:
            await asyncio.wait_for(gateway.is_listening.wait(), 10)
            num_ready = sum(not target.reason for target in targets)
            await asyncio.wait_for(gateway.targets.wait_ready(num_ready), 10)
            yield Front(f"http://127.0.0.1:{gateway.port}", gateway)
        finally:
            gateway.drain()
            await serve


@contextlib.asynccontextmanager
async def gateway_of(
    target: ProcessUnderTest, *flags: str
) -> AsyncIterator[tuple[ProcessUnderTest, AsyncOpenAI]]:
    """Run a gateway as a process, and the official client of its API; inside, it is ready."""
    own = ("--targets", target.grpc_address, "--port", "0")
    async with running("ssd_gateway", *own, *flags) as process:
        await process.until("ready")
        base = f"http://{process.http_address}/v1"
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            yield process, client


def keys_file(folder: Path, **keys: str) -> str:
    """Write a file of API keys by name; return its path."""
    lines = (f"{name}:{hashlib.sha256(key.encode()).hexdigest()}\n" for name, key in keys.items())
    (folder / "keys").write_text("".join(lines))
    return str(folder / "keys")


def raw(
    front: Front, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of a request without the client library."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        names.setdefault("content-type", "application/json")
    request = urllib.request.Request(front.base + path, data=body, headers=names)
    try:
        answer = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as refusal:
        answer = refusal
    with answer:
        found = {k.lower(): v for k, v in answer.headers.items()}
        return answer.status, found, answer.read().decode()


async def get(front: Front, path: str, body: bytes | None = None, **headers: str) -> Any:
    return await asyncio.to_thread(raw, front, path, body, **headers)


async def sample(front: Front, name: str) -> float:
    """A sample of the metrics, by its name with labels."""
    _, _, page = await get(front, "/metrics")
    return float(page.partition(f"\n{name} ")[2].split()[0])


async def until_running(front: Front, number: int) -> None:
    """Wait until this number of requests runs."""
    async with asyncio.timeout(10):
        while await sample(front, "ssd_gateway_running_requests") != number:
            pass


async def post(front: Front, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a completion request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
    writer.write(JSON_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    return reader, writer
