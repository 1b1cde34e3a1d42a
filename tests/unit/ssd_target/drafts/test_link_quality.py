"""What is measured on a link before it is used, and which links are refused for it."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import cast

import pytest

from ssd.errors import LinkError
from ssd.rpc.link import LinkCall
from ssd.types import DraftMessage, Draining, Heartbeat, Peer, TargetMessage
from ssd_target.drafts.link_quality import (
    NUM_PINGS,
    LinkQuality,
    LinkRequirement,
    LinkTooSlowError,
    measure,
)

DRAFT = Peer(pod="demo-draft-0-x", node="n2")


def found(transport: str = "tcp", micros: float = 300.0) -> LinkQuality:
    return LinkQuality(transport=transport, round_trip_seconds=micros / 1e6)


class ScriptedCall:
    """Sends each question back after the messages of ``before``; ``None`` says goodbye."""

    def __init__(self, *before: DraftMessage | None) -> None:
        self._coming: deque[DraftMessage | None] = deque(before)

    def send(self, message: TargetMessage) -> None:
        assert isinstance(message, Heartbeat)
        assert message.nonce
        self._coming.append(Heartbeat(echo=message.nonce))

    @property
    def num_unread(self) -> int:
        return len(self._coming)

    async def receive(self) -> DraftMessage | None:
        return self._coming.popleft()


def call(*before: DraftMessage | None) -> LinkCall:
    return cast(LinkCall, ScriptedCall(*before))


def ticks(*seconds: float) -> Iterator[float]:
    """A clock that shows these many seconds from each question to its answer."""
    return itertools.accumulate(step for each in seconds for step in (0.0, each))


async def test_the_round_trip_is_the_median_of_several_beats() -> None:
    assert NUM_PINGS == 9
    clock = ticks(9.0, 0.5, 0.1, 0.2, 0.3, 0.3, 0.3, 0.4, 9.0)
    assert await measure(call(), lambda: next(clock)) == pytest.approx(0.3)


async def test_the_drafts_own_beats_and_old_echoes_are_no_answers() -> None:
    scripted = ScriptedCall(Heartbeat(), Heartbeat(nonce=5), Heartbeat(echo=77))
    await measure(cast(LinkCall, scripted), lambda: 0.0)
    assert scripted.num_unread == 0, "each question has had its own answer"


@pytest.mark.parametrize(("word", "reason"), [(None, "closed"), (Draining(), "leaving")])
async def test_a_draft_that_goes_while_it_is_measured_is_a_lost_link(
    word: DraftMessage | None, reason: str
) -> None:
    with pytest.raises(LinkError, match=reason) as caught:
        await measure(call(word), lambda: 0.0)
    assert not isinstance(caught.value, LinkTooSlowError)


def test_a_requirement_that_asks_nothing_says_so() -> None:
    assert LinkRequirement().asks_nothing
    assert not LinkRequirement(transport="rdma").asks_nothing
    assert not LinkRequirement(max_round_trip_seconds=1e-6).asks_nothing


@pytest.mark.parametrize(
    ("required", "transport", "is_good"),
    [
        ("any", "tcp", True),
        ("any", "nvlink", True),
        ("rdma", "tcp", False),
        ("rdma", "rdma", True),
        ("rdma", "nvlink", True),
        ("nvlink", "rdma", False),
        ("nvlink", "nvlink", True),
    ],
)
def test_a_link_may_be_faster_than_required_and_not_slower(
    required: str, transport: str, *, is_good: bool
) -> None:
    requirement = LinkRequirement(transport=required)
    if is_good:
        requirement.check(found(transport), DRAFT)
        return
    with pytest.raises(LinkTooSlowError) as caught:
        requirement.check(found(transport), DRAFT)
    assert str(caught.value) == (
        f"link_too_slow: its transport is {transport} (round trip 300 us), {required} is required: "
        "give the pods that transport, or require any"
    )


def test_a_round_trip_at_the_limit_is_good_and_one_above_is_refused_with_the_numbers() -> None:
    requirement = LinkRequirement(max_round_trip_seconds=0.001)
    requirement.check(found(micros=1000.0), DRAFT)
    with pytest.raises(LinkTooSlowError) as caught:
        requirement.check(found(micros=1010.0), DRAFT)
    assert str(caught.value) == (
        "link_too_slow: its round trip is 1010 us over tcp, at most 1000 us are allowed: "
        "place the draft nearer, or raise the limit"
    )
    assert (caught.value.found.round_trip_seconds, caught.value.peer) == (0.00101, DRAFT)
