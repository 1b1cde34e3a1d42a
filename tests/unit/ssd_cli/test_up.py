"""Pause before ``ssd up`` restarts a failed draft."""

from ssd_cli.up import LONGEST_RESTART_SECONDS, RESTART_SECONDS, STEADY_SECONDS, restart_delay


def delays(lives: list[float]) -> list[float]:
    found = [0.0]
    for lived in lives:
        found.append(restart_delay(found[-1], lived))
    return found[1:]


def test_the_pause_doubles_after_each_early_failure_up_to_a_minute() -> None:
    assert delays([1.0] * 8) == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_the_pause_is_short_after_a_long_run() -> None:
    assert delays([1.0, 1.0, 1.0, STEADY_SECONDS, 1.0]) == [1.0, 2.0, 4.0, 1.0, 2.0]
    assert restart_delay(LONGEST_RESTART_SECONDS, STEADY_SECONDS) == RESTART_SECONDS


def test_the_pause_doubles_just_below_the_bound() -> None:
    assert restart_delay(4.0, STEADY_SECONDS - 0.1) == 8.0
