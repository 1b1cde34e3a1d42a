"""The round trip of a link, by its beats."""

from ssd.types import Heartbeat
from ssd_target.drafts.link import RoundTrip


def test_an_echo_tells_the_round_trip() -> None:
    trip = RoundTrip()
    asked = trip.beat(10.0)
    assert asked.nonce > 0
    assert trip.hear(Heartbeat(echo=asked.nonce), 10.004)
    assert abs(trip.seconds - 0.004) < 1e-9


def test_beats_that_answer_nothing_are_no_measurement() -> None:
    trip = RoundTrip()
    assert not trip.hear(Heartbeat(), 1.0)
    asked = trip.beat(10.0)
    assert not trip.hear(Heartbeat(), 10.1)
    assert not trip.hear(Heartbeat(echo=asked.nonce + 1), 10.1)
    assert trip.hear(Heartbeat(echo=asked.nonce), 10.2)
    assert not trip.hear(Heartbeat(echo=asked.nonce), 10.3), "an answer counts once"


def test_an_answer_slower_than_the_beat_is_measured_in_full() -> None:
    trip = RoundTrip()
    asked = trip.beat(10.0)
    assert trip.beat(10.25) == Heartbeat()
    assert trip.beat(10.5) == Heartbeat()
    assert trip.hear(Heartbeat(echo=asked.nonce), 10.7)
    assert abs(trip.seconds - 0.7) < 1e-9
    assert trip.beat(10.75).nonce == asked.nonce + 1
