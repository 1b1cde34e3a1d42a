"""How long rounds wait for tables, and openings for their first table."""

from ssd_target.drafts.table_deadline import TableDeadline, opening_seconds


def test_the_deadline_is_infinite_until_enough_tables_have_arrived() -> None:
    deadline = TableDeadline()
    for _ in range(15):
        deadline.observe([0.005])
    assert deadline.seconds == float("inf")
    deadline.observe([0.005])
    assert deadline.seconds < 0.1


def test_the_deadline_follows_the_tables_with_a_margin() -> None:
    deadline = TableDeadline()
    deadline.observe([0.010] * 64)
    assert 0.012 < deadline.seconds < 0.030
    deadline.observe([0.100] * 128)
    assert 0.12 < deadline.seconds < 0.30


def test_a_few_slow_tables_do_not_move_the_deadline() -> None:
    deadline = TableDeadline()
    deadline.observe([0.010] * 125)
    deadline.observe([5.0] * 3)
    assert deadline.seconds < 0.030


def test_after_a_reset_the_deadline_is_infinite_again() -> None:
    deadline = TableDeadline()
    deadline.observe([0.010] * 64)
    deadline.reset()
    assert deadline.seconds == float("inf")
    deadline.observe([0.010] * 15)
    assert deadline.seconds == float("inf")


def test_an_opening_may_take_longer_if_more_tokens_are_prefilled() -> None:
    assert opening_seconds(0) == 5.0
    assert opening_seconds(2000) == 15.0
