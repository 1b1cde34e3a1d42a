import itertools
from collections import deque
from collections.abc import Iterator
from typing import cast

import pytest

from ssd.errors import LinkError
from ssd.pool.handshake import NUM_PINGS, LinkTooSlowError, measure
from ssd.pool.link import RoundTrip
from ssd.rpc.link import LinkCall
from ssd.types import DraftMessage, Draining, Heartbeat, Peer, TargetMessage

DRAFT = Peer(pod="demo-draft-0-x", node="n2")


class ScriptedCall:
    """Delivers the messages of ``before``, then an echo of each heartbeat; None closes the link."""

    def __init__(self, *before: DraftMessage | None) -> None:
        self._incoming: deque[DraftMessage | None] = deque(before)

    def send(self, message: TargetMessage) -> None:
        assert isinstance(message, Heartbeat)
        assert message.nonce
        self._incoming.append(Heartbeat(echo=message.nonce))

    @property
    def num_unread(self) -> int:
        return len(self._incoming)

    async def receive(self) -> DraftMessage | None:
        return self._incoming.popleft()


def call(*before: DraftMessage | None) -> LinkCall:
    return cast(LinkCall, ScriptedCall(*before))


def ticks(*seconds: float) -> Iterator[float]:
    """Return a clock with these seconds between each heartbeat and its echo."""
    return itertools.accumulate(step for each in seconds for step in (0.0, each))


async def test_the_result_is_the_median_of_several_round_trips() -> None:
    assert NUM_PINGS == 9
    clock = ticks(9.0, 0.5, 0.1, 0.2, 0.3, 0.3, 0.3, 0.4, 9.0)
    assert await measure(call(), lambda: next(clock)) == pytest.approx(0.3)


async def test_heartbeats_of_the_draft_and_old_echoes_are_ignored() -> None:
    scripted = ScriptedCall(Heartbeat(), Heartbeat(nonce=5), Heartbeat(echo=77))
    await measure(cast(LinkCall, scripted), lambda: 0.0)
    assert scripted.num_unread == 0, "each heartbeat was echoed"


@pytest.mark.parametrize(("message", "reason"), [(None, "closed"), (Draining(), "leaving")])
async def test_a_draft_that_leaves_during_the_measurement_is_a_lost_link(
    message: DraftMessage | None, reason: str
) -> None:
    with pytest.raises(LinkError, match=reason) as caught:
        await measure(call(message), lambda: 0.0)
    assert not isinstance(caught.value, LinkTooSlowError)


def test_the_error_of_a_link_that_is_too_slow_has_its_numbers() -> None:
    error = LinkTooSlowError("tcp", 0.00101, max_seconds=0.001, peer=DRAFT)
    assert str(error) == (
        "link_too_slow: its round trip is 1010 us over tcp, at most 1000 us are allowed: "
        "place the draft nearer, or raise the limit"
    )
    assert (error.transport, error.round_trip_seconds, error.peer) == ("tcp", 0.00101, DRAFT)


def test_heartbeats_without_the_expected_echo_are_no_measurement() -> None:
    trip = RoundTrip()
    assert not trip.receive(Heartbeat(), 1.0)
    sent = trip.next_heartbeat(10.0)
    assert not trip.receive(Heartbeat(), 10.1)
    assert not trip.receive(Heartbeat(echo=sent.nonce + 1), 10.1)
    assert trip.receive(Heartbeat(echo=sent.nonce), 10.2)
    assert not trip.receive(Heartbeat(echo=sent.nonce), 10.3), "an echo counts once"


def test_an_echo_slower_than_the_heartbeats_is_measured_in_full() -> None:
    trip = RoundTrip()
    sent = trip.next_heartbeat(10.0)
    assert trip.next_heartbeat(10.25) == Heartbeat()
    assert trip.receive(Heartbeat(echo=sent.nonce), 10.7)
    assert trip.seconds == pytest.approx(0.7)
    assert trip.next_heartbeat(10.75).nonce == sent.nonce + 1
