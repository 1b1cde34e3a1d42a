"""What engines say, and drains: in tasks of their own, each with deadlines.

A pass never waits for an engine. It says whom to follow and whom to drain, and reads the facts that
are there; news wake the next pass.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

from ssd.errors import NotReadyError, SSDError
from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd.telemetry import get_logger
from ssd_operator.children.names import DRAFT_PORT, TARGET_PORT
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.facts import DrainFact, LinkFact, PoolFact
from ssd_operator.policy.drain import DrainCall
from ssd_operator.runtime import metrics

POLL_SECONDS = 10.0
"""A target is asked anew at least this often; between, it tells of changes itself."""
RETRY_SECONDS = 2.0
"""Before a target that did not answer is asked again."""
ASK_SECONDS = 2.0
"""Longest single question to a draft."""
DRAIN_POLL_SECONDS = 0.5
"""Between two questions whether a draft is empty."""
FLOOR_SECONDS = 300.0
"""In which the lowest round trip of a link doubles if it is not reached again."""
LONGEST_DRAIN_SECONDS = 300.0
"""A draft refuses a longer deadline."""

_log = get_logger(__name__)


class EnginePool:
    """Follows targets and drains drafts of all resources. Asyncio loop."""

    def __init__(
        self,
        now: Callable[[], float],
        wake: Callable[[Key], None],
        *,
        dial_target: Callable[[str], TargetClient] = TargetClient,
        dial_draft: Callable[[str], DraftClient] = DraftClient,
    ) -> None:
        """Follow nobody yet.

        Args:
            now: seconds since the epoch.
            wake: asks for a pass over a resource with new facts.
            dial_target: makes a client of an address.
            dial_draft: the same.
        """
        self._now = now
        self._dial_target = dial_target
        self._dial_draft = dial_draft
        self._wake = wake
        self._pools: dict[Key, dict[str, PoolFact]] = {}
        self._drains: dict[Key, dict[str, DrainFact]] = {}
        self._tasks: dict[tuple[Key, str, str], asyncio.Task[None]] = {}

    def pools(self, key: Key) -> dict[str, PoolFact]:
        """The last answers of a resource's targets, by pod."""
        return dict(self._pools.get(key, {}))

    def drains(self, key: Key) -> dict[str, DrainFact]:
        """Drains of a resource's drafts, by pod."""
        return dict(self._drains.get(key, {}))

    def follow(self, key: Key, targets: Mapping[str, str]) -> None:
        """Follow these targets of a resource, host by pod, and no others."""
        wanted = {(key, pod, host) for pod, host in targets.items()}
        for task_id in [each for each in self._tasks if each[0] == key and each[2]]:
            if task_id not in wanted:
                self._tasks.pop(task_id).cancel()
        pools = self._pools.setdefault(key, {})
        for pod in pools.keys() - targets.keys():
            del pools[pod]
        for _, pod, host in wanted - self._tasks.keys():
            self._start((key, pod, host), self._follow(key, pod, _address(host, TARGET_PORT)))

    def drain(self, key: Key, calls: Iterable[DrainCall]) -> None:
        """Tell these drafts to drain; those that have been told go on."""
        drains = self._drains.setdefault(key, {})
        for call in calls:
            if call.pod not in drains:
                drains[call.pod] = DrainFact(pod=call.pod)
                self._start((key, call.pod, ""), self._drain(key, call))

    def keep(self, key: Key, pods: AbstractSet[str]) -> None:
        """Forget the drains of pods that are gone."""
        drains = self._drains.get(key, {})
        for pod in drains.keys() - pods:
            del drains[pod]
            if (task := self._tasks.pop((key, pod, ""), None)) is not None:
                task.cancel()

    def forget(self, key: Key) -> None:
        """A resource is gone: end all that is done for it."""
        self.follow(key, {})
        self.keep(key, frozenset())
        self._pools.pop(key, None)
        self._drains.pop(key, None)

    async def close(self) -> None:
        """End everything. Idempotent."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, task_id: tuple[Key, str, str], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task_id] = task
        task.add_done_callback(partial(self._ended, task_id))

    def _ended(self, task_id: tuple[Key, str, str], task: "asyncio.Task[None]") -> None:
        """Of a task that crashed, the next pass starts another."""
        if self._tasks.get(task_id) is task:
            del self._tasks[task_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            metrics.ERRORS_TOTAL.labels(type(error).__name__).inc()
            _log.error("task_crashed", task=task_id, error=repr(error))

    async def _follow(self, key: Key, pod: str, address: str) -> None:
        """Ask a target again and again, and listen in between; what it says becomes facts."""
        async with self._dial_target(address) as target:
            while True:
                try:
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._listen(key, pod, target)
                except TimeoutError:
                    continue  # time to ask anew: a target without news says nothing
                except SSDError as error:
                    _log.debug("target_silent", pod=pod, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _listen(self, key: Key, pod: str, target: TargetClient) -> None:
        with contextlib.ExitStack() as first_answer:
            first_answer.enter_context(metrics.POOL_POLL_SECONDS.time())
            async with contextlib.aclosing(target.watch_pool()) as answers:
                async for answer in answers:
                    first_answer.close()
                    self._put(key, _pool_fact(pod, answer, self._now()))

    def _put(self, key: Key, fact: PoolFact) -> None:
        pools = self._pools.setdefault(key, {})
        old = pools.get(fact.target_pod)
        pools[fact.target_pod] = fact if old is None else with_floors(old, fact)
        if old is None or _states(old) != _states(fact):
            self._wake(key)

    async def _drain(self, key: Key, call: DrainCall) -> None:
        result = await self._drained(call)
        metrics.DRAINS_TOTAL.labels(result).inc()
        _log.info("drain_ended", pod=call.pod, result=result)
        fact = self._drains.get(key, {}).get(call.pod)
        if fact is not None:
            self._drains[key][call.pod] = replace(fact, is_done=True, result=result)
            self._wake(key)

    async def _drained(self, call: DrainCall) -> str:
        """Drain one draft; how that ended."""
        end = self._now() + min(call.seconds, LONGEST_DRAIN_SECONDS)
        is_told = False
        async with self._dial_draft(_address(call.host, DRAFT_PORT)) as draft:
            while (left := end - self._now()) > 0:
                try:
                    async with asyncio.timeout(min(left, ASK_SECONDS)):
                        if not is_told:
                            await draft.drain(int(left * 1000))
                            is_told = True
                        status = await draft.get_status()
                    # One that does not drain any more is the process that came after it.
                    if status.sessions == 0 or not status.draining:
                        return "Drained"
                except NotReadyError:
                    if is_told:
                        return "Drained"  # it ends when its last session has gone
                except (SSDError, TimeoutError) as error:
                    _log.debug("draft_silent", pod=call.pod, error=str(error))
                await asyncio.sleep(DRAIN_POLL_SECONDS)
        return "TimedOut" if is_told else "Unreachable"


def with_floors(old: PoolFact, new: PoolFact) -> PoolFact:
    """The newer of two answers, with the lowest round trip of late for each link.

    What a link takes is its lowest: the rest is whoever held the processor. A rise is believed as
    far as nothing lower came for long; it doubles in ``FLOOR_SECONDS``.
    """
    rise = 2.0 ** ((new.at - old.at) / FLOOR_SECONDS)
    floors = {
        (link.address, link.draft_pod): link.round_trip_seconds * rise
        for link in old.links
        if link.round_trip_seconds > 0
    }
    links = (
        replace(
            link,
            round_trip_seconds=min(
                link.round_trip_seconds, floors.get((link.address, link.draft_pod), math.inf)
            ),
        )
        for link in new.links
    )
    return replace(new, links=tuple(links))


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _states(fact: PoolFact) -> object:
    """What of an answer may change a decision at once."""
    links = [
        (link.address, link.draft_pod, link.state, link.reason, link.transport)
        for link in fact.links
    ]
    return sorted(links), fact.speculating


def _pool_fact(pod: str, status: PoolStatus, now: float) -> PoolFact:
    return PoolFact(
        target_pod=pod,
        at=now,
        eligible_sequences=status.eligible_sequences,
        speculating=status.speculating,
        waiting=status.waiting_sequences,
        hit_rate=status.hit_rate,
        tokens_per_round=status.tokens_per_round,
        efficiency=status.efficiency,
        weights_fingerprint=status.weights_fingerprint,
        dtype=status.dtype,
        dtype_reason=status.dtype_reason,
        links=tuple(_link_fact(link) for link in status.links),
    )


def _link_fact(link: LinkStatus) -> LinkFact:
    return LinkFact(
        address=link.address,
        draft_pod=link.draft_pod,
        state=link.state.capitalize(),
        sessions=link.sessions,
        capacity=link.sustainable_sessions,
        round_trip_seconds=link.round_trip_seconds,
        channel=link.channel,
        reason=link.reason,
        transport=link.transport,
        draft_weights=link.draft_weights,
    )
