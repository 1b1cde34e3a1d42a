"""When a link is suspended, and for how long."""

from ssd.pool.circuit_breaker import FIRST_OPEN_SECONDS, MAX_OPEN_SECONDS, CircuitBreaker


def three_silent_rounds(circuit_breaker: CircuitBreaker, now: float) -> bool:
    return [circuit_breaker.add_round(now, is_silent=True) for _ in range(3)][-1]


def test_the_third_consecutive_late_round_opens_the_circuit_breaker() -> None:
    circuit_breaker = CircuitBreaker()
    assert not circuit_breaker.add_round(1.0, is_silent=True)
    assert not circuit_breaker.add_round(1.0, is_silent=True)
    assert not circuit_breaker.add_round(1.0, is_silent=False)
    assert three_silent_rounds(circuit_breaker, 1.0)
    assert circuit_breaker.is_open(1.0 + FIRST_OPEN_SECONDS - 0.01)
    assert not circuit_breaker.is_open(1.0 + FIRST_OPEN_SECONDS)


def test_each_opening_takes_twice_as_long_up_to_a_minute() -> None:
    circuit_breaker = CircuitBreaker()
    durations = []
    for _ in range(6):
        assert three_silent_rounds(circuit_breaker, 0.0)
        durations.append(circuit_breaker.open_until)
    assert durations == [5.0, 10.0, 20.0, 40.0, 60.0, MAX_OPEN_SECONDS]


def test_a_round_in_time_resets_the_duration() -> None:
    circuit_breaker = CircuitBreaker()
    three_silent_rounds(circuit_breaker, 0.0)
    circuit_breaker.add_round(100.0, is_silent=False)
    three_silent_rounds(circuit_breaker, 200.0)
    assert circuit_breaker.open_until == 200.0 + FIRST_OPEN_SECONDS


def test_an_explicit_opening_counts_for_the_duration() -> None:
    circuit_breaker = CircuitBreaker()
    circuit_breaker.open(1.0)
    assert circuit_breaker.open_until == 1.0 + FIRST_OPEN_SECONDS
    assert three_silent_rounds(circuit_breaker, 100.0)
    assert circuit_breaker.open_until == 100.0 + 2 * FIRST_OPEN_SECONDS
