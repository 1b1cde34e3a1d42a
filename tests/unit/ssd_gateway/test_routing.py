"""Requests go to the least busy target, or to the one whose prefix cache has their beginning."""

from hypothesis import given
from hypothesis import strategies as st

from ssd_gateway.routing import AFFINITY_CHARACTERS, AFFINITY_SLACK, choose_target, prefix_key

ADDRESSES = [f"10.0.0.{n}:50051" for n in range(5)]
BUSY = st.dictionaries(st.sampled_from(ADDRESSES), st.integers(0, 20), min_size=1)


@given(outstanding=BUSY)
def test_without_a_prefix_the_least_busy_target_is_chosen(outstanding: dict[str, int]) -> None:
    assert outstanding[choose_target(outstanding, None)] == min(outstanding.values())


@given(outstanding=BUSY, key=st.text())
def test_a_prefix_never_overloads_its_target(outstanding: dict[str, int], key: str) -> None:
    chosen = outstanding[choose_target(outstanding, key)]
    assert chosen <= min(outstanding.values()) + AFFINITY_SLACK


@given(key=st.text(), least=st.integers(0, 3))
def test_a_prefix_keeps_its_target_up_to_the_slack_and_leaves_it_beyond(
    key: str, least: int
) -> None:
    own = choose_target(dict.fromkeys(ADDRESSES, 0), key)
    others = dict.fromkeys(ADDRESSES, least)
    assert choose_target(others | {own: least + AFFINITY_SLACK}, key) == own
    assert choose_target(others | {own: least + AFFINITY_SLACK + 1}, key) != own


def test_a_prefix_keeps_its_target_and_few_move_when_a_target_leaves() -> None:
    idle = dict.fromkeys(ADDRESSES, 0)
    keys = [str(n) for n in range(500)]
    before = {key: choose_target(idle, key) for key in keys}
    assert before == {key: choose_target(idle, key) for key in keys}
    gone = idle.pop(ADDRESSES[0]) or ADDRESSES[0]
    moved = [key for key in keys if choose_target(idle, key) != before[key]]
    assert moved == [key for key in keys if before[key] == gone]
    assert 50 < len(moved) < 150


def test_prompts_with_a_common_beginning_have_one_key() -> None:
    start = "s" * (AFFINITY_CHARACTERS - 10)
    first = prefix_key([start, "question one" * 3])
    assert first == prefix_key([start, "question one" * 3, "an answer"])
    assert first != prefix_key([start, "another" * 5])
    assert prefix_key(["short", "prompt"]) is None
    assert prefix_key([]) is None
