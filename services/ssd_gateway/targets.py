"""The targets behind the gateway: their state, and the requests that are sent to them.

A target is asked for its model every 2 s, which it answers only while it is ready. A request that
a target refuses before its first token, because it is not ready or overloaded, is sent to the next
one. After the first token a request is never sent again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field

from ssd.addresses import Addresses, Resolver, resolve
from ssd.errors import (
    AbandonedTextError,
    AccessError,
    FieldError,
    NotReadyError,
    OverloadedError,
    SSDError,
    TooLargeError,
    UnknownModelError,
    UnsupportedError,
)
from ssd.observability.log import get_logger
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import Conversation, GenerateCall, ModelInfo
from ssd.rpc.credentials import NO_CREDENTIALS, ClientCredentials
from ssd.tasks import beside
from ssd.types import GenerationChunk
from ssd_gateway.metrics import RETRIES_TOTAL, TARGETS
from ssd_gateway.problems import WITHOUT_NAME
from ssd_gateway.routing import choose_target, prefix_key

RESOLVE_SECONDS = 2.0
CHECK_SECONDS = 2.0
"""Pause between two checks of a target that is ready."""
RECHECK_SECONDS = 0.25
"""Pause between two checks of one that is not."""
ANSWER_SECONDS = 5.0
"""A target that takes longer to answer a check is not ready."""
LOAD_SECONDS = 600.0
"""Time after the start of a gateway in which a target without an answer may load a model."""
RETRY_SECONDS = 5.0
"""A request that a target refuses later than this has waited in its queue. No other target gets the
request: it would begin at the end of the next queue, with less time."""
NO_TARGET = "no target is ready; try again in a moment"
_log = get_logger(__name__)


@dataclass(slots=True)
class _Target:
    address: str
    client: TargetClient
    is_listed: bool = True
    """Whether it has its address still."""
    info: ModelInfo | None = None
    """Newest answer; kept while the target is not ready."""
    reason: str = "not asked yet"
    """Why it does not serve; empty while it does."""
    num_requests: int = 0
    check: "asyncio.Task[None] | None" = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set for a check without a pause."""

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return not self.reason

    def serves(self, model: str) -> bool:
        """Whether its newest answer names this model."""
        return self.info is not None and self.info.model == model


class TargetPool:
    """Sends requests to the targets. Asyncio loop; ``running`` keeps their state up to date."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        credentials: ClientCredentials = NO_CREDENTIALS,
        resolver: Resolver = resolve,
    ) -> None:
        self._addresses = Addresses("targets", addresses, resolver, ignores_empty=True)
        self._credentials = credentials
        self._targets: dict[str, _Target] = {}
        self._has_changed = asyncio.Event()
        self._started_at = time.monotonic()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Check the targets inside; close all connections afterwards."""
        try:
            async with beside(self._follow()):
                yield
        finally:
            self._addresses.close()
            await asyncio.gather(*(self._remove(address) for address in tuple(self._targets)))

    async def wait_ready(self, num_targets: int = 1) -> None:
        """Wait until this number of targets is ready."""
        while self.num_ready < num_targets:
            self._has_changed.clear()
            await self._has_changed.wait()

    @property
    def num_ready(self) -> int:
        """Number of targets that are ready."""
        return len(self._usable())

    @property
    def num_targets(self) -> int:
        """Number of targets, ready or not."""
        return len(self._targets)

    def models(self) -> dict[str, ModelInfo]:
        """Return the models of the targets that are ready, by id.

        Raises:
            NotReadyError: no target is ready.
        """
        infos = [target.info for target in self._usable() if target.info]
        if not infos:
            raise NotReadyError(NO_TARGET)
        return {info.model: info for info in sorted(infos, key=lambda info: info.model)}

    def model(self, name: str) -> ModelInfo:
        """Return a model that a target serves.

        Raises:
            NotReadyError: no target is ready, none that served it last, or the gateway has started
                and not all targets have reported their models so far.
            FieldError: the name is empty.
            UnknownModelError: no target serves it.
        """
        models = self.models()
        if not name:
            raise FieldError("model", f"is required; this server has {', '.join(models)}")
        if name not in models:
            if any(target.serves(name) for target in self._targets.values()):
                raise NotReadyError(f"no target of {name[:256]!r} is ready; try again in a moment")
            if (count := self._num_silent()) and time.monotonic() < self._started_at + LOAD_SECONDS:
                raise NotReadyError(
                    f"no target that has answered serves {name[:256]!r}, and {count} of them "
                    f"{'has' if count == 1 else 'have'} not answered since the start"
                )
            raise UnknownModelError(
                f"The model {name[:256]!r} does not exist; this server has {', '.join(models)}"
            )
        return models[name]

    async def generate(
        self, call: GenerateCall, request_id: str
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Run a request on one of the targets of its model. ``aclose`` cancels it.

        Raises:
            NotReadyError: no target of the model is ready, or the connection was lost after the
                first chunk.
            FieldError: the call names no model.
            UnknownModelError: no target serves the model.
            OverloadedError: all targets are overloaded.
            SSDError: the target's own error.
        """
        self.model(call.model)
        key = prefix_key(_texts(call))
        tried: dict[str, SSDError] = {}
        while (target := self._choose(call.model, key, tried)) is not None:
            has_begun, sent_at = False, time.monotonic()
            target.num_requests += 1
            try:
                async with contextlib.aclosing(
                    target.client.generate(call, request_id=request_id)
                ) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        yield chunk
                return
            except AbandonedTextError:
                # Perhaps only this client has read too late: the next check decides.
                target.wake.set()
                raise
            except NotReadyError as error:
                self._mark_lost(target, error)
                _hide_address(error, target.address)
                if has_begun:
                    raise
                tried[target.address] = error
            except AccessError as error:
                # The credentials of the gateway are wrong, not those of its client.
                refusal = NotReadyError("the target refuses the credentials of this gateway")
                self._mark_lost(target, error)
                tried[target.address] = refusal
            except OverloadedError as error:
                _hide_address(error, target.address)
                if has_begun or time.monotonic() - sent_at > RETRY_SECONDS:
                    raise
                tried[target.address] = error
            except SSDError as error:
                _hide_address(error, target.address)
                raise
            finally:
                target.num_requests -= 1
        raise _worst(tried.values()) if tried else NotReadyError(NO_TARGET)

    def _choose(self, model: str, key: str | None, tried: Collection[str]) -> _Target | None:
        outstanding = {
            target.address: target.num_requests
            for target in self._usable()
            if target.serves(model) and target.address not in tried
        }
        if not outstanding:
            return None
        if tried:
            RETRIES_TOTAL.inc()
        return self._targets[choose_target(outstanding, key)]

    def _usable(self) -> list[_Target]:
        """Return the targets that get new requests.

        One without an address does only while it serves and no other serves its model: those with
        the new addresses may still load it.
        """
        ready = [target for target in self._targets.values() if target.is_ready]
        models = {target.info.model for target in ready if target.is_listed and target.info}
        return [
            target
            for target in ready
            if target.is_listed or (target.info and target.info.model not in models)
        ]

    def _num_silent(self) -> int:
        """Return the number of targets and names whose models no answer has named so far."""
        silent = sum(target.info is None for target in self._targets.values())
        return silent + len(self._addresses.without_answer)

    def _mark_lost(self, target: _Target, error: SSDError) -> None:
        if target.is_ready:
            _log.info("target_lost", target=target.address, reason=str(error))
        target.reason = str(error)
        target.wake.set()
        self._publish()

    async def _follow(self) -> None:
        """Add targets that appear; remove those without an address when none needs them."""
        while True:
            current = await self._addresses.current()
            for address in current - self._targets.keys():
                client = TargetClient(address, credentials=self._credentials, ready_seconds=0.0)
                target = _Target(address, client)
                target.check = asyncio.create_task(self._check(target))
                self._targets[address] = target
            for target in self._targets.values():
                target.is_listed = target.address in current
            usable = {target.address for target in self._usable()}
            gone = [
                address
                for address, target in self._targets.items()
                if not (target.is_listed or target.num_requests or address in usable)
            ]
            for address in gone:
                await self._remove(address)
            self._publish()
            await asyncio.sleep(RESOLVE_SECONDS)

    async def _remove(self, address: str) -> None:
        target = self._targets.pop(address)
        if target.check is not None:
            target.check.cancel()
            await asyncio.gather(target.check, return_exceptions=True)
        await target.client.close()

    async def _check(self, target: _Target) -> None:
        """Keep the state of a target up to date, until cancelled."""
        while True:
            reason = ""
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    target.info = await target.client.model_info()
            except TimeoutError:
                reason = f"no answer within {ANSWER_SECONDS:g} s"
            except SSDError as error:
                reason = str(error)
            if target.reason != reason:
                target.reason = reason
                event = "target_not_ready" if reason else "target_ready"
                _log.info(event, target=target.address, **({"reason": reason} if reason else {}))
                self._publish()
            target.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_SECONDS if reason else CHECK_SECONDS):
                    await target.wake.wait()

    def _publish(self) -> None:
        TARGETS.labels(state="ready").set(self.num_ready)
        TARGETS.labels(state="not_ready").set(len(self._targets) - self.num_ready)
        self._has_changed.set()


def _hide_address(error: SSDError, address: str) -> None:
    """Remove the address of a target from an error, which clients of the gateway receive.

    The log has the whole message. Behind the address, gRPC or a proxy can name further ones.
    """
    message = str(error)
    if address not in message:
        return
    _log.info("target_failed", target=address, reason=message)
    neutral = message.replace(address, "the target")
    if not isinstance(error, TooLargeError):
        neutral = neutral.partition(": ")[0]
    if neutral == "the target":
        neutral = "the target refused the request"
    error.args = (neutral,)
    if isinstance(error, UnsupportedError):
        error.field, error.description = WITHOUT_NAME, neutral


def _texts(call: GenerateCall) -> list[str]:
    """Return the texts whose common beginning a prefix cache shares."""
    match call.prompt:
        case str() as text:
            return [text]
        case Conversation() as conversation:
            return conversation.texts
        case token_ids:
            return [",".join(map(str, token_ids[:512]))]


def _worst(errors: Collection[SSDError]) -> SSDError:
    """Return the error of a request that no target accepted: overload before others."""
    overloads = (error for error in errors if isinstance(error, OverloadedError))
    return next(overloads, next(iter(errors)))
