"""The target process as one object: how it starts, serves, drains and ends.

Life cycle: bind the ports, load on the step thread, serve; after SIGTERM, SIGINT or ``Drain``
refuse what is new, let what runs finish, close. Ports come first, so that a taken one is known
before gigabytes are loaded; what is asked while the model loads is answered UNAVAILABLE.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from ssd.ports import Clock, Tokenizer
from ssd.process import StepThread, Watchdog
from ssd.rpc.bounds import PromptBounds
from ssd.rpc.call_guard import ServerLimits
from ssd.rpc.http import ProbeServer
from ssd.rpc.pool_codec import PoolStatus
from ssd.rpc.server import RpcServer, join_address
from ssd.telemetry import DESIRED_DRAFT_REPLICAS, get_logger, metrics_of
from ssd.text.chat_template import load_template
from ssd.types import WIRE_VERSION, LinkHello, LinkPolicy, Peer
from ssd_target.decoding.inbox import Inbox
from ssd_target.drafts.dialer import LinkDialer
from ssd_target.drafts.link_quality import LinkRequirement
from ssd_target.drafts.pool import DraftPool, PoolSettings
from ssd_target.drafts.status import pool_status
from ssd_target.serving.request_handler import DeskSettings, RequestHandler
from ssd_target.serving.servicer import AdminServicer, GenerateServicer, count_failure
from ssd_target.serving.streams import Wakeups
from ssd_target.settings import TargetSettings
from ssd_target.step_thread import ModelLoader, StepSettings

_log = get_logger("ssd_target")
_CALLS_AT_LEAST = 64
"""Calls of one method that are served at a time, whatever the queue. Of ``Generate`` there can be
twice as many as run and wait: some are refused, some have ended and are still being read."""
_LAST_WORDS_SECONDS = 5.0
"""After the drain: time for cancelled requests to be told."""


class Target:
    """Everything the process holds. Asyncio loop.

    ``run`` returns when it has left; ``leave`` begins the drain.
    """

    def __init__(
        self,
        settings: TargetSettings,
        step: StepSettings,
        tokenizer: Tokenizer,
        clock: Clock,
        me: Peer,
    ) -> None:
        self._settings = settings
        self._me = me
        self._engine = step.engine
        self._clock = clock
        self._leaving = asyncio.Event()
        self._drain_seconds = settings.drain_seconds
        inbox = Inbox(settings.max_queue + settings.max_num_seqs)
        self._inbox = inbox
        num_token_ids = step.engine.num_token_ids or tokenizer.vocab_size
        self._pool = DraftPool(pool_settings(settings, num_token_ids), clock)
        self._links = LinkDialer(
            self._pool,
            settings.drafts,
            hello(settings, tokenizer.fingerprint, num_token_ids, me),
            policy(settings),
            requirement=requirement(settings),
        )
        self._limits = server_limits(settings, step, tokenizer)
        template = load_template(step.folder)
        self._handler = RequestHandler(desk_settings(settings), tokenizer, template, inbox, clock)
        self._wakeups = Wakeups(asyncio.get_running_loop())
        self._watchdog = Watchdog(clock)
        life = ModelLoader(step, inbox, self._pool, self._wakeups, clock, self._watchdog)
        self._step = StepThread(life.load, inbox.close, step.cpus)

    def leave(self) -> None:
        """Begin to drain, for as long as the settings say; once is enough."""
        self._leaving.set()

    def drain(self, seconds: float) -> int:
        """Begin to drain, for so long at most; returns the requests running or waiting now."""
        if not self._leaving.is_set():
            self._drain_seconds = seconds
            self._leaving.set()
        return self._handler.num_requests

    async def run(self) -> None:
        """Serve until ``leave`` is called.

        Raises:
            SetupError: the process cannot start.
            TimeoutError: the step thread did not end after the drain.
            Exception: what the step thread crashed with.
        """
        started_at = self._clock.now()
        DESIRED_DRAFT_REPLICAS.set_function(self._desired_draft_replicas)
        async with self._listening() as server:
            self._step.start()
            await self._first_of(self._step.loaded, self._step.ended)
            if not self._step.loaded.done():
                return
            self._handler.open(self._step.loaded.result(), self._wakeups)
            server.set_serving(True)
            _log.info("ready", seconds=round(self._clock.now() - started_at, 3))
            links = asyncio.create_task(self._links.run())
            links.add_done_callback(note_end_of_links)
            try:
                await self._first_of(self._step.ended)
                if self._step.ended.done():
                    self._step.ended.result()
                server.set_serving(False)
                await self._drain()
            finally:
                links.cancel()
                await asyncio.gather(links, return_exceptions=True)

    async def _first_of(self, *events: "asyncio.Future[Any]") -> None:
        """Wait for one of the events, or until told to leave."""
        leaving = asyncio.create_task(self._leaving.wait())
        await asyncio.wait({*events, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()

    async def _drain(self) -> None:
        """Let running requests finish, within bounds, then end the step thread."""
        _log.info("draining", requests=self._handler.num_requests)
        self._handler.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._handler.wait_until_idle()
        self._inbox.close()
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._handler.wait_until_idle()
                # Shielded: a time-out must not cancel the future that the thread will set.
                await asyncio.shield(self._step.ended)
        except TimeoutError as error:
            raise TimeoutError(
                f"the step thread did not end within {_LAST_WORDS_SECONDS:g} s after the drain"
            ) from error

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[RpcServer]:
        """Both ports are bound inside."""
        settings = self._settings
        metrics = metrics_of("target")
        probes = ProbeServer(
            settings.host, settings.http_port, self._is_live, self._is_ready, metrics
        )
        server = RpcServer(
            settings.host,
            settings.port,
            reflection=settings.reflection,
            limits=self._limits,
            on_failure=count_failure,
        )
        GenerateServicer(settings, self._handler, self._pool).add_to(server)
        admin = AdminServicer(self._pool_status, drain=self.drain)
        admin.add_to(server)
        try:
            probes.start()
            await server.start()
            _log.info(
                "listening",
                grpc=join_address(settings.host, server.port),
                http=join_address(settings.host, probes.port),
            )
            yield server
        finally:
            admin.close()
            await server.stop()
            probes.close()

    def _pool_status(self) -> PoolStatus:
        now = self._clock.now()
        status = pool_status(self._links.reports(), self._pool, now, self._me.weights_fingerprint)
        return replace(status, dtype=self._engine.dtype, dtype_reason=self._engine.dtype_reason)

    def _desired_draft_replicas(self) -> float:
        return self._pool_status().desired_draft_replicas

    def _is_live(self) -> bool:
        return not self._step.ended.done() and not self._watchdog.is_stuck

    def _is_ready(self) -> tuple[bool, str]:
        if self._step.ended.done():
            return False, "the step thread has ended"
        if self._leaving.is_set():
            return False, "draining"
        return (True, "ready") if self._handler.is_open else (False, "loading")


def note_end_of_links(links: "asyncio.Task[None]") -> None:
    """Say that a bug ended the links; requests run plain from then on."""
    if not links.cancelled() and (crash := links.exception()) is not None:
        _log.error("links_crashed", error=repr(crash))


def hello(
    settings: TargetSettings, tokenizer_fingerprint: str, num_token_ids: int, me: Peer
) -> LinkHello:
    """What drafts are told of this target; each link puts its own epoch in."""
    return LinkHello(
        wire_version=WIRE_VERSION,
        vocab_size=num_token_ids,
        tokenizer_fingerprint=tokenizer_fingerprint,
        lookahead=settings.lookahead,
        branches=settings.branches,
        channel="grpc",
        epoch=0,
        peer=me,
    )


def policy(settings: TargetSettings) -> LinkPolicy:
    """How drafts are to choose outcomes."""
    return LinkPolicy(fan_out_policy=settings.fan_out, fan_out=settings.fan_out_split)


def requirement(settings: TargetSettings) -> LinkRequirement:
    """What links must be to be used."""
    return LinkRequirement(
        transport=settings.require_transport,
        max_round_trip_seconds=settings.max_round_trip_us / 1e6,
    )


def pool_settings(settings: TargetSettings, num_token_ids: int) -> PoolSettings:
    """The pool's share of the settings."""
    return PoolSettings(
        lookahead=settings.lookahead,
        branches=settings.branches,
        num_token_ids=num_token_ids,
        deadline_seconds=settings.draft_deadline_ms / 1000,
        is_adaptive=settings.adaptive_deadline,
        may_quarantine=settings.quarantine,
        backup=settings.backup,
    )


def desk_settings(settings: TargetSettings) -> DeskSettings:
    """The front handler's share of the settings."""
    return DeskSettings(
        stream_stall_seconds=settings.stream_stall_seconds,
        stream_buffer_tokens=settings.stream_buffer_tokens,
        max_queue=settings.max_queue,
        max_num_seqs=settings.max_num_seqs,
    )


def server_limits(
    settings: TargetSettings, step: StepSettings, tokenizer: Tokenizer
) -> ServerLimits:
    """What callers can make the server hold."""
    bounds = PromptBounds.of_model(step.engine.max_model_len, tokenizer.longest_token_bytes)
    return ServerLimits(
        message_bytes=bounds.message_bytes,
        calls=2 * (settings.max_num_seqs + settings.max_queue) + _CALLS_AT_LEAST,
    )
