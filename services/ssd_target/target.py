"""The target process as one object: how it starts, serves, drains and ends.

``ssd.life_cycle`` describes the common part. A drain, which SIGTERM, SIGINT or ``Drain`` begins,
refuses new requests and lets the running ones finish.
"""

import asyncio
from dataclasses import replace

from ssd.life_cycle import LifeCycle
from ssd.ports import Clock, Tokenizer
from ssd.rpc.bounds import PromptBounds
from ssd.rpc.call_guard import ServerLimits
from ssd.rpc.pool_codec import PoolStatus
from ssd.step_thread import StepThread, Watchdog
from ssd.telemetry import DESIRED_DRAFT_REPLICAS, get_logger
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


class Target:
    """Everything the process holds. Asyncio loop.

    ``run`` returns after the drain, which ``drain`` begins.
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
        watchdog = Watchdog(clock)
        loader = ModelLoader(step, inbox, self._pool, self._wakeups, clock, watchdog)
        thread = StepThread(loader.load, inbox.close, step.cpus)
        self._life_cycle = LifeCycle(thread, watchdog, clock, settings.drain_seconds)

    def drain(self, seconds: float | None = None) -> int:
        """Begin to drain; returns the number of requests that run or wait now.

        Args:
            seconds: limit of the drain; None takes that of the settings. The first call counts.
        """
        self._life_cycle.start_draining(seconds)
        return self._handler.num_requests

    async def run(self) -> None:
        """Serve until ``drain`` is called.

        Raises:
            SetupError: the process cannot start.
            TimeoutError: the step thread did not end after the drain.
            Exception: what the step thread crashed with.
        """
        DESIRED_DRAFT_REPLICAS.set_function(self._desired_draft_replicas)
        admin = AdminServicer(self._pool_status, drain=self.drain)
        servicers = (GenerateServicer(self._settings, self._handler, self._pool), admin)
        async with self._life_cycle.listening(
            "target", self._settings, servicers, self._limits, count_failure
        ):
            try:
                runner = await self._life_cycle.load()
                if runner is not None:
                    self._handler.open(runner, self._wakeups)
                    await self._serve()
            finally:
                admin.close()

    async def _serve(self) -> None:
        links = asyncio.create_task(self._links.run())
        links.add_done_callback(note_end_of_links)
        try:
            await self._life_cycle.serve(self._finish_requests, self._cancel_requests)
        finally:
            links.cancel()
            await asyncio.gather(links, return_exceptions=True)

    async def _finish_requests(self) -> None:
        _log.info("draining", requests=self._handler.num_requests)
        self._handler.close()
        await self._handler.wait_until_idle()

    async def _cancel_requests(self) -> None:
        self._inbox.close()
        await self._handler.wait_until_idle()

    def _pool_status(self) -> PoolStatus:
        now = self._clock.now()
        status = pool_status(self._links.reports(), self._pool, now, self._me.weights_fingerprint)
        return replace(status, dtype=self._engine.dtype, dtype_reason=self._engine.dtype_reason)

    def _desired_draft_replicas(self) -> float:
        return self._pool_status().desired_draft_replicas


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
