"""The target process as one object: it loads, serves, drains and ends.

``ssd.runtime.life_cycle`` describes the common part. SIGTERM, SIGINT and ``Drain`` start a drain:
the target refuses new requests and finishes the running ones.
"""

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import asdict
from functools import partial

from ssd import __version__
from ssd.errors import SettingsError
from ssd.model_files.local_model import LocalModel
from ssd.observability.log import get_logger
from ssd.observability.metrics import DESIRED_DRAFT_REPLICAS, OPEN_SESSIONS
from ssd.observability.tracing import exported_spans
from ssd.pool.dialer import LinkDialer
from ssd.pool.handshake import LinkTerms, SetUpChannel
from ssd.pool.metrics import publish_mode
from ssd.pool.pool import DraftPool
from ssd.pool.round_log import RoundLog
from ssd.pool.status import pool_status
from ssd.ports import Clock
from ssd.rpc.admin_servicer import AdminServicer
from ssd.rpc.bounds import PromptBounds
from ssd.rpc.call_guard import ServerLimits
from ssd.rpc.codec import SpeculationChange
from ssd.rpc.link import GRPC
from ssd.rpc.pool_codec import PoolStatus
from ssd.runtime.life_cycle import LifeCycle
from ssd.runtime.step_thread import StepThread, Watchdog
from ssd.text.chat_template import load_template
from ssd.types import WIRE_VERSION, Hello, LinkSettings, Peer
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.ports import LoopContext
from ssd_target.models import TargetModels
from ssd_target.rank_processes import RankProcesses
from ssd_target.serving.request_handler import RequestHandler
from ssd_target.serving.servicer import GenerateServicer, count_failure
from ssd_target.serving.streams import Wakeups
from ssd_target.settings import TargetSettings
from ssd_target.step_thread import load_target

_log = get_logger("ssd_target")
_MIN_CALLS = 64
"""Minimum bound of concurrent calls of one method. ``Generate`` can have twice as many calls as
running and waiting requests: some are being refused, some have ended and are still being read."""
_MIN_CONNECTIONS = 1024
_LAST_MESSAGES_SECONDS = 1.0
"""Time for the last messages of cancelled requests, a part of the ``STOP_SECONDS`` in which the
step thread ends."""


class TargetProcess:
    """Owns all objects of the process. Asyncio loop.

    ``drain`` starts the drain; ``run`` returns after it.
    """

    def __init__(
        self,
        settings: TargetSettings,
        models: TargetModels,
        me: Peer,
        cpus: Collection[int],
        clock: Clock,
    ) -> None:
        """Construct the target.

        Args:
            settings: settings of the process.
            models: models to load.
            me: identity of this process, sent to drafts.
            cpus: CPUs of the step thread, divided among the ranks of the model.
            clock: clock for all times.

        Raises:
            SettingsError: a file of the links' credentials is missing or invalid.
        """
        self._settings = settings
        model = self._model = models.target
        self._me = me
        self._clock = clock
        self._inbox = Inbox()
        self._round_log = RoundLog()
        self._pool = DraftPool(settings, settings.lookahead, model.num_token_ids, clock)
        backends, set_up_channel = collective_channel(settings.channel, model.engine.device)
        self._links = LinkDialer(
            self._pool,
            settings.drafts,
            hello(settings, model, me, backends),
            LinkSettings(fan_out_policy=settings.fan_out),
            terms=LinkTerms(
                set_up_channel=set_up_channel,
                max_round_trip_seconds=settings.max_round_trip_us / 1e6,
                credentials=settings.link_credentials(),
            ),
        )
        wakeups = Wakeups(asyncio.get_running_loop())
        self._handler = RequestHandler(
            settings, model.tokenizer, load_template(model.folder), self._inbox, wakeups, clock
        )
        watchdog = Watchdog(clock)
        context = LoopContext(
            inbox=self._inbox,
            drafts=self._pool,
            wakeups=wakeups,
            round_log=self._round_log,
            clock=clock,
            watchdog=watchdog,
        )
        self._ranks = RankProcesses(model, cpus, watchdog)
        load = partial(load_target, settings, models, context, self._ranks.join)
        self._step = StepThread(load, self._inbox.close, self._ranks.cpus)
        self._life_cycle = LifeCycle(self._step, watchdog, clock, settings.drain_seconds)

    def drain(self, seconds: float | None = None) -> int:
        """Start the drain; return the number of running and waiting requests.

        Args:
            seconds: maximum duration; None takes ``drain_seconds``. Only the first call sets it.
        """
        self._life_cycle.start_draining(seconds)
        return self._handler.num_requests

    def set_speculation(self, change: SpeculationChange) -> None:
        """Change how the target speculates; None keeps a value.

        Raises:
            FieldError: this target does not have the mode; nothing is changed.
        """
        settings = self._settings.changed(change)
        if change.mode is not None:
            self._handler.set_auto_mode(change.mode)
            publish_mode(change.mode, self._round_log)
        self._settings = settings
        self._pool.configure(settings)
        if change.fan_out_policy is not None:
            self._links.configure(LinkSettings(fan_out_policy=change.fan_out_policy))
        changes = {name: str(value) for name, value in asdict(change).items() if value}
        _log.info("speculation_set", **changes)

    async def run(self) -> None:
        """Serve until the drain ends.

        Raises:
            SetupError: the process cannot start.
            TimeoutError: the step thread did not end after the drain.
            RankError: a rank of the model has ended or does not answer.
            Exception: what the step thread crashed with.
        """
        DESIRED_DRAFT_REPLICAS.set_function(lambda: self._pool_status().desired_draft_replicas)
        OPEN_SESSIONS.set_function(lambda: self._pool.num_sessions)
        publish_mode(self._handler.auto_mode, self._round_log)
        admin = AdminServicer(
            self._pool_status, set_speculation=self.set_speculation, drain=self.drain
        )
        settings = self._settings
        async with exported_spans(settings.otlp_endpoint, "ssd-target", self._me.pod) as spans:
            generate = GenerateServicer(
                settings,
                self._handler,
                lambda: self._pool.num_active,
                spans.get_tracer("ssd_target", __version__),
                self._clock,
            )
            await self._listen(generate, admin)

    async def _listen(self, generate: GenerateServicer, admin: AdminServicer) -> None:
        """Listen, load the model and serve until the drain ends."""
        limits = server_limits(self._settings, self._model)
        async with self._life_cycle.listening(
            "target", self._settings, (generate, admin), limits, count_failure
        ):
            try:
                async with self._ranks.running(self._step.ended, self._fail):
                    runner = await self._life_cycle.load()
                    if runner is not None:
                        self._handler.open(runner)
                        await self._serve()
            finally:
                admin.close()

    def _fail(self, error: Exception) -> None:
        """End because of an error that was found beside the step thread."""
        self._handler.fail(error)
        self._step.fail(error)

    async def _serve(self) -> None:
        links = asyncio.create_task(self._links.run())
        links.add_done_callback(log_crash_of_links)
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
        # Calls whose clients do not read end with the server.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_MESSAGES_SECONDS):
                await self._handler.wait_until_idle()

    def _pool_status(self) -> PoolStatus:
        identity = PoolStatus(
            weights_fingerprint=self._me.weights_fingerprint,
            dtype=self._model.engine.precision,
            dtype_reason=self._model.engine.dtype_reason,
        )
        reports, now = self._links.reports(), self._clock.now()
        return pool_status(reports, self._pool, self._round_log, now, identity)


def log_crash_of_links(links: "asyncio.Task[None]") -> None:
    """Log that a bug ended all links. Requests continue without drafts."""
    if not links.cancelled() and (crash := links.exception()) is not None:
        _log.error("links_crashed", error=repr(crash))


def hello(
    settings: TargetSettings, model: LocalModel, me: Peer, backends: tuple[str, ...]
) -> Hello:
    """Return the first message of a link; each link sets its own epoch."""
    return Hello(
        wire_version=WIRE_VERSION,
        vocab_size=model.num_token_ids,
        tokenizer_fingerprint=model.tokenizer.fingerprint,
        lookahead=settings.lookahead,
        branches=settings.branches,
        epoch=0,
        peer=me,
        backends=backends,
    )


def collective_channel(channel: str, device: str) -> tuple[tuple[str, ...], SetUpChannel | None]:
    """Return the backends of a target's collective channel, best first, and how a link sets it up.

    A target that uses gRPC has neither.

    Raises:
        SettingsError: this process has no backend.
    """
    if channel == GRPC:
        return (), None
    # A target that uses gRPC imports none of these modules.
    from ssd.transport.communicator import available_backends  # noqa: PLC0415
    from ssd.transport.setup import set_up_channel  # noqa: PLC0415

    if backends := available_backends(device):
        return backends, partial(set_up_channel, device=device)
    raise SettingsError(f"channel {channel}: this torch has no gloo; set channel to {GRPC}")


def server_limits(settings: TargetSettings, model: LocalModel) -> ServerLimits:
    """Return the limits of messages and concurrent calls."""
    bounds = PromptBounds.of_model(model.engine.max_model_len, model.tokenizer.longest_token_bytes)
    calls = 2 * (settings.max_num_seqs + settings.max_queue) + _MIN_CALLS
    # Each client may have a connection of its own, which waits for its next request.
    connections = max(_MIN_CONNECTIONS, 2 * calls)
    return ServerLimits(message_bytes=bounds.message_bytes, calls=calls, connections=connections)
