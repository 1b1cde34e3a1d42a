"""Metrics and counts of rounds."""

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.unit.ssd_target.bench import Bench

from ssd.testing.ledger_runner import LedgerRunner
from ssd.testing.scripted_draft import Behaviour
from ssd.types import Mode
from ssd_target.decoding.batch_builder import BatchBuilder


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def gauges() -> tuple[float, float, float]:
    return (
        value("ssd_running_sequences"),
        value("ssd_waiting_sequences"),
        value("ssd_kv_blocks", state="used"),
    )


@pytest.fixture
def growth() -> Callable[[str], float]:
    """Difference of a sample to its value at the first call."""
    before: dict[str, float] = {}

    def grown(name: str) -> float:
        now = value(name)
        return now - before.setdefault(name, now)

    return grown


def test_gauges_follow_the_counts_of_the_scheduler() -> None:
    bench = Bench()
    for number in range(6):
        bench.submit([1, 2, 3, number], 3 + number)
    bench.run_rounds()
    assert gauges() == (4, 2, bench.blocks.num_taken)
    bench.run_rounds(3)
    assert gauges() == (4, 1, bench.blocks.num_taken)
    bench.inbox.cancel(6)
    bench.run()
    bench.run_rounds()
    assert gauges() == (0, 0, 0)
    assert value("ssd_kv_blocks", state="free") == bench.all_free


def test_a_request_is_counted_once_if_its_prompt_begins_in_the_prefix_cache(
    growth: Callable[[str], float],
) -> None:
    growth("ssd_prefix_hits_total")
    bench, prompt = Bench(), [*range(1, 12), *range(1, 7)]
    for num_hits in (0, 1):
        cached = []
        for choice in range(3):
            sink = bench.submit(prompt, 4, choice=choice)
            bench.run()
            cached.append(sink.usage.cached_tokens)
        assert all(cached[1:]), "they share what the first one has stored"
        assert bool(cached[0]) == bool(num_hits)
        assert growth("ssd_prefix_hits_total") == num_hits


def test_eligible_sequences_are_those_whose_mode_allows_speculation() -> None:
    bench = Bench()
    for number in range(6):
        bench.submit([1, number], 9, mode=Mode.AUTOREGRESSIVE if number == 3 else Mode.AUTO)
    bench.run_rounds()
    counts = bench.log.counts
    assert (counts.running, counts.waiting, counts.eligible) == (4, 2, 3)


def test_a_commit_is_timed_from_the_decision_to_the_channel(growth: Callable[[str], float]) -> None:
    growth("ssd_commit_to_wire_seconds_count")
    growth("ssd_commit_to_wire_seconds_sum")
    bench = Bench()
    bench.submit([1, 2, 3], 9, mode=Mode.AUTOREGRESSIVE)
    bench.run()
    assert growth("ssd_commit_to_wire_seconds_count") == 0, "no commit was sent"
    bench.join([Behaviour.HIT])
    bench.submit([1, 2, 3], 9)
    bench.run()
    assert growth("ssd_commit_to_wire_seconds_count") == 2
    assert growth("ssd_commit_to_wire_seconds_sum") > 0


def test_rounds_without_a_draft_are_counted_apart_from_those_that_need_none() -> None:
    def rounds() -> dict[str, float]:
        kinds = ("hit", "miss", "late", "no_draft", "backup", "none")
        return {kind: value("ssd_rounds_total", result=kind) for kind in kinds}

    def counted(**submitted: Any) -> dict[str, float]:
        before = rounds()
        bench.submit([1, 2, 3], 5, **submitted)
        bench.run()
        return {kind: now - before[kind] for kind, now in rounds().items() if now != before[kind]}

    bench = Bench()
    # The last round but one has one token left and the last round none: neither can propose.
    assert counted() == {"no_draft": 3, "none": 2}
    assert counted(mode=Mode.AUTOREGRESSIVE) == {"none": 5}
    bench.join([Behaviour.SILENT])
    assert counted() == {"no_draft": 3, "none": 2}, "a session that never opens counts as no draft"


def test_the_verify_part_is_the_forward_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    for owner, name in ((BatchBuilder, "round"), (LedgerRunner, "prepare")):
        original = getattr(owner, name)

        def slowly(*arguments: Any, original: Callable[..., Any] = original, **options: Any) -> Any:
            bench.clock.time += 5.0
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, slowly)
    before = value("ssd_round_seconds_sum", part="verify")
    bench.submit([1, 2, 3], 4)
    bench.run()
    assert value("ssd_round_seconds_sum", part="verify") - before == pytest.approx(0.004)


def test_the_time_in_the_queue_ends_with_admission(growth: Callable[[str], float]) -> None:
    growth("ssd_queue_seconds_count")
    growth("ssd_queue_seconds_sum")
    bench = Bench()
    for _ in range(5):
        bench.submit([1, 2, 3], 3)
    bench.run_rounds()
    assert growth("ssd_queue_seconds_count") == 4
    bench.clock.time += 50.0
    bench.run()
    assert growth("ssd_queue_seconds_count") == 5
    assert 50.0 < growth("ssd_queue_seconds_sum") < 51.0


def test_the_pool_counts_hits_and_misses_of_lost_links() -> None:
    bench = Bench()
    bench.join([Behaviour.HIT, Behaviour.HIT, Behaviour.MISS, Behaviour.DIE])
    bench.submit([1, 2, 3], 30)
    bench.run()
    assert bench.pool.links() == ()
    counts = bench.pool.counts
    assert (counts.hits, counts.misses) == (2, 1)
    assert counts.hit_rate == pytest.approx(2 / 3)


def test_the_log_describes_the_rounds() -> None:
    bench = Bench()
    bench.join([Behaviour.HIT])
    bench.submit([1, 2, 3], 30)
    bench.submit([4, 5, 6], 30, mode=Mode.AUTOREGRESSIVE)
    bench.run_rounds(5)
    log = bench.log
    assert log.mean_eligible(bench.clock.now()) == pytest.approx(1.0)
    assert 1.0 < log.tokens_per_round < 4.0
    assert log.verify_seconds == pytest.approx(0.001)
    assert 0.0 < log.efficiency < 1.0
    (link,) = bench.pool.links()
    assert set(link.batch_times.seconds_by_sessions) == {1}
    bench.run()


def test_missing_tables_count_with_the_time_that_was_waited() -> None:
    bench = Bench(circuit_breaker=False)
    bench.join([Behaviour.HIT, Behaviour.HIT, Behaviour.SILENT])
    bench.submit([1, 2, 3], 40)
    bench.run_rounds(3)
    (link,) = bench.pool.links()
    in_time = link.batch_times.seconds_by_sessions[1]
    bench.clock.time += 5.0
    bench.run_rounds()
    assert link.batch_times.seconds_by_sessions[1] > in_time + 0.5
    bench.run()
