"""A target without a model: its services on a real port; a test does what the step thread does."""

import asyncio
from types import SimpleNamespace
from typing import Any, Self, cast

import grpc.aio
from opentelemetry.trace import NoOpTracerProvider, TracerProvider

from ssd.engine.target_runner import TargetRunner
from ssd.rpc.server import RpcServer
from ssd.testing.clock import FakeClock
from ssd.testing.tokenizer import ByteTokenizer
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.sequence import Sequence
from ssd_target.serving.request_handler import RequestHandler
from ssd_target.serving.servicer import GenerateServicer
from ssd_target.serving.streams import Wakeups
from ssd_target.settings import TargetSettings

MAX_MODEL_LEN = 64
MAX_SECONDS = 60.0


class TargetWithoutModel:
    """Call ``open`` as the target does when its model is loaded."""

    def __init__(
        self,
        settings: TargetSettings,
        provider: TracerProvider | None = None,
        started_at: float = 0,
    ) -> None:
        self.clock = FakeClock(started_at)
        self.inbox = Inbox()
        self.wakeups = Wakeups(asyncio.get_running_loop())
        self.handler = RequestHandler(
            settings, ByteTokenizer(), None, self.inbox, self.wakeups, self.clock
        )
        self.server = RpcServer("127.0.0.1", 0)
        tracer = (provider or NoOpTracerProvider()).get_tracer("ssd_target")
        GenerateServicer(settings, self.handler, int, tracer, self.clock).add_to(self.server)

    async def __aenter__(self) -> Self:
        """Serve, and connect ``channel``."""
        await self.server.start()
        self.channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(0)

    def open(self, num_token_ids: int = 256) -> None:
        engine = SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, num_token_ids=num_token_ids, block_size=16
        )
        self.handler.open(cast(TargetRunner, SimpleNamespace(engine=engine)))

    async def arrival(self) -> Sequence:
        """The next request that arrives at the step thread."""
        async with asyncio.timeout(MAX_SECONDS):
            while True:
                await asyncio.to_thread(self.inbox.wait, MAX_SECONDS)
                for event in self.inbox.drain():
                    if isinstance(event, Sequence):
                        return event
