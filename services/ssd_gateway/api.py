"""The endpoints that generate text: read a body, run its calls, write an object or events."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from ssd import __version__
from ssd.errors import ContextLengthError, FieldError, RequestError, SSDError, UnsupportedError
from ssd.observability import log
from ssd.ports import Clock
from ssd.tasks import merged
from ssd.types import GenerationChunk
from ssd_gateway.body import BodyBudget, ClientLeftError, Share, read_body, while_connected
from ssd_gateway.deadlines import Deadlines
from ssd_gateway.json_text import blocks, encoded, pieces
from ssd_gateway.metrics import BROKEN_STREAMS_TOTAL, FIRST_TOKEN_SECONDS
from ssd_gateway.parser import BodyLimits, RequestParser
from ssd_gateway.problems import problem
from ssd_gateway.responses import Assembly, Format, StreamAssembly, WholeAssembly
from ssd_gateway.schemas import AnyRequest, PreparedRequest
from ssd_gateway.targets import TargetPool

STATUS_KEY = "ssd.status"
"""Key of the scope: the status for metrics, if it is not that of the response."""
CLIENT_KEY = "ssd.client"
"""Key of the scope: who sends the request, the name of an API key or an address."""
CLIENT_LEFT = 499
HOLD_SECONDS = 1.0
"""Maximum time for which a stream of several prompts waits for the first tokens of each. An error
of one is the response until then. Refusals take less; the queue of a target can take longer."""
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect the events.
    (b"x-accel-buffering", b"no"),
]
AnyAssembly = TypeVar("AnyAssembly", bound=Assembly)
_log = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[AnyRequest]):
    """An endpoint as an ASGI application. Asyncio loop.

    ``budget`` and ``parser`` are those of all endpoints.
    """

    budget: BodyBudget
    parser: RequestParser
    max_body_bytes: int
    deadlines: Deadlines
    targets: TargetPool
    clock: Clock
    kind: type[AnyRequest]
    form: Format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            SSDError: the request failed before the response began.
        """
        try:
            limits = BodyLimits.of_models(
                self.targets.models().values(),
                self.max_body_bytes,
                self.kind.max_prompts,
            )
            with self.budget.share(scope[CLIENT_KEY]) as share:
                body = await read_body(scope, receive, limits.num_bytes, share)
                request = await self.parser.prepare(self.kind, body, limits)
                # Frees the JSON. The prompt stays in memory until the end of the request.
                del body
                share.keep(request.prompt_bytes)
                if request.stream:
                    await while_connected(receive, self._stream(request, send))
                else:
                    content = await while_connected(receive, self._whole(request, share))
                    await send_whole(content, send)
        except ClientLeftError:
            scope[STATUS_KEY] = CLIENT_LEFT

    async def _whole(self, request: PreparedRequest, share: Share) -> dict[str, Any]:
        assembly = self._assembly(WholeAssembly, request)
        async with self.deadlines.bound(), aclosing(self._run(request)) as chunks:
            async for prompt, chunk in chunks:
                share.take(assembly.add(prompt, chunk), is_running=True)
        return assembly.whole()

    async def _stream(self, request: PreparedRequest, send: Send) -> None:
        assembly = self._assembly(StreamAssembly, request)
        events = EventStream(send)
        try:
            async with self.deadlines.bound(), aclosing(self._run(request)) as chunks:
                async for prompt, chunk in chunks:
                    await events.write(assembly.add(prompt, chunk))
                if request.includes_usage:
                    await events.write([assembly.usage()])
                await events.end()
        except Exception as error:
            if not events.has_begun:
                raise
            if not isinstance(error, RequestError):
                # The others are errors of the client, in one of several prompts.
                BROKEN_STREAMS_TOTAL.inc()
            _log.info("stream_broken", error=type(error).__name__, reason=str(error))
            await events.fail(error)
            if not isinstance(error, SSDError):
                # A bug, for the server's log.
                raise

    def _assembly(self, kind: type[AnyAssembly], request: PreparedRequest) -> AnyAssembly:
        info = self.targets.model(request.model)
        head = {
            "id": self.form.id_prefix + secrets.token_hex(12),
            "object": self.form.name,
            "created": int(datetime.now(UTC).timestamp()),
            "model": info.model,
            # The same seed gives the same text while the version stays.
            "system_fingerprint": f"ssd-{__version__}",
        }
        is_whole = not request.stream
        new_reader = partial(request.tool_use.reader, info.tool_format, is_whole=is_whole)
        # Refuses tools of a model whose format is not known before the request runs.
        new_reader()
        return kind(head, self.form, request, new_reader)

    async def _run(
        self, request: PreparedRequest
    ) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        """Yield the chunks of the calls of a request, with the index of the call."""
        arrived_at: float | None = self.clock.now()
        calls = request.calls
        # With echo, the first chunk of a continuation is a copy of the prompt.
        copies = {
            (prompt, choice)
            for prompt, call in enumerate(calls)
            for choice in range(call.sampling.n if call.sampling.echo else 0)
        }
        streams = [self._call(request, prompt) for prompt in range(len(calls))]
        hold_seconds = HOLD_SECONDS if request.stream else 0.0
        async with aclosing(merged(streams, hold_seconds=hold_seconds)) as chunks:
            async for prompt, chunk in chunks:
                if (prompt, chunk.choice) in copies:
                    copies.remove((prompt, chunk.choice))
                elif arrived_at is not None and chunk.token_ids:
                    FIRST_TOKEN_SECONDS.observe(self.clock.now() - arrived_at)
                    arrived_at = None
                yield prompt, chunk

    async def _call(
        self, request: PreparedRequest, prompt: int
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of one call. Its errors name fields of the body."""
        generating = self.targets.generate(request.calls[prompt], log.request_id.get())
        try:
            async with aclosing(generating) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (FieldError, UnsupportedError) as error:
            name = request.name(prompt, error.field)
            raise type(error)(name, error.description) from error
        except ContextLengthError as error:
            error.field = request.name(prompt, error.field)
            raise


class EventStream:
    """Server-sent events of one response; the first event begins it. Asyncio loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def write(self, objects: Iterable[dict[str, Any]]) -> None:
        """Send objects as events, in one message."""
        await self._write(b"".join(map(_event, objects)), is_last=False)

    async def end(self) -> None:
        """Send the event that ends a complete stream."""
        await self._write(b"data: [DONE]\n\n", is_last=True)

    async def fail(self, error: Exception) -> None:
        """End the stream with an error object, which clients raise."""
        _, body = problem(error, log.request_id.get())
        await self._write(_event(body), is_last=True)

    async def _write(self, body: bytes, *, is_last: bool) -> None:
        if not body:
            return
        if not self.has_begun:
            self.has_begun = True
            start = {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + encoded(content) + b"\n\n"


async def send_whole(content: dict[str, Any], send: Send) -> None:
    """Send an object with held JSON as a response. Other requests are served between blocks."""
    num_bytes = sum(map(len, pieces(content)))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % num_bytes)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for block in blocks(content):
        await send({"type": "http.response.body", "body": block, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
