"""Figures of a load from the times of its messages."""

from array import array

import pytest

from ssd_bench.serve.figures import gaps, load_figures, percentiles
from ssd_bench.serve.load import UNFINISHED, Load, RequestRecord


def record(
    *arrived_at: float,
    sent_at: float = 0.0,
    outcome: str = "length",
    num_tokens: int = 1,
    hint: float | None = None,
    ended_at: float | None = None,
) -> RequestRecord:
    return RequestRecord(
        sent_at=sent_at,
        outcome=outcome,
        message="" if outcome in ("length", "stop") else f"message of {outcome}",
        retry_after_seconds=hint,
        ended_at=ended_at if ended_at is not None else max(arrived_at, default=sent_at),
        arrived_at=array("d", arrived_at),
        num_tokens=array("l", [num_tokens] * len(arrived_at)),
    )


def load(*records: RequestRecord, begun_at: float = 0.0, ended_at: float = 10.0) -> Load:
    return Load(begun_at, ended_at, list(records), array("d", [0.001, 0.003]))


def test_inter_token_times_are_the_pauses_between_messages() -> None:
    found = load_figures(load(record(1.0, 1.5, 3.5), record(2.0, 2.1)))
    assert found.inter_token_ms.count == 3
    assert found.inter_token_ms.p50 == pytest.approx(500)
    assert found.inter_token_ms.max == pytest.approx(2000)


def test_the_time_of_a_token_is_that_of_its_message_divided_by_its_tokens() -> None:
    found = load_figures(load(record(1.0, 2.0, num_tokens=4)))
    assert found.inter_token_ms.p50 == pytest.approx(1000)
    assert found.per_token_ms.p50 == pytest.approx(250)


def test_messages_outside_the_window_do_not_count() -> None:
    found = load_figures(load(record(1.0, 4.0, 6.0, 12.0), begun_at=5.0))
    assert found.inter_token_ms.count == 1
    assert found.tokens_per_second == pytest.approx(1 / 5)


def test_the_time_to_the_first_token_is_that_of_requests_of_the_window() -> None:
    found = load_figures(load(record(3.0, sent_at=1.0), record(9.0, sent_at=6.0), begun_at=5.0))
    assert (found.time_to_first_token_ms.count, found.time_to_first_token_ms.p50) == (1, 3000)


def test_goodput_is_that_of_requests_that_end_as_requested() -> None:
    found = load_figures(
        load(
            record(1.0, 2.0, num_tokens=5),
            record(1.0, 2.0, num_tokens=5, outcome="DEADLINE_EXCEEDED"),
            record(9.0, 11.0, num_tokens=5),
        )
    )
    assert found.tokens_per_second == pytest.approx(2.5)
    assert found.goodput_tokens_per_second == pytest.approx(1.5)
    assert found.goodput_requests_per_second == pytest.approx(0.1)


def test_outcomes_are_counted_with_the_first_message_of_each() -> None:
    found = load_figures(
        load(
            record(1.0),
            record(outcome="RESOURCE_EXHAUSTED", sent_at=1.0, ended_at=1.25, hint=2.0),
            record(outcome="RESOURCE_EXHAUSTED", sent_at=1.0, ended_at=1.25),
            record(outcome=UNFINISHED),
        )
    )
    assert found.outcomes == {"RESOURCE_EXHAUSTED": 2, UNFINISHED: 1, "length": 1}
    assert found.messages["RESOURCE_EXHAUSTED"] == "message of RESOURCE_EXHAUSTED"
    assert found.num_errors == 3
    assert found.refusals_without_hint == 1
    assert found.refusal_ms.p50 == pytest.approx(250)


def test_a_load_without_a_message_has_figures() -> None:
    found = load_figures(load())
    assert found.inter_token_ms == percentiles([])
    assert found.p99_over_p50 == 0
    assert found.hit_rate is None


def test_gaps_keep_the_time_of_each_message() -> None:
    arrived, seconds, tokens = gaps([record(1.0, 2.0, 5.0, num_tokens=3)], 0.0, 4.0)
    assert (list(arrived), list(seconds), list(tokens)) == ([2.0], [1.0], [3])
