"""The round trip of a link, measured with heartbeats."""

from ssd.pool.round_trip import RoundTrip
from ssd.types import Heartbeat


def test_an_echo_is_a_measurement() -> None:
    trip = RoundTrip()
    sent = trip.next_heartbeat(10.0)
    assert sent.nonce > 0
    assert trip.receive(Heartbeat(echo=sent.nonce), 10.004)
    assert abs(trip.seconds - 0.004) < 1e-9


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
    assert trip.next_heartbeat(10.5) == Heartbeat()
    assert trip.receive(Heartbeat(echo=sent.nonce), 10.7)
    assert abs(trip.seconds - 0.7) < 1e-9
    assert trip.next_heartbeat(10.75).nonce == sent.nonce + 1
