"""What an operator is told of the pool."""

from typing import cast

import pytest

from ssd.transport.inprocess import pair
from ssd.types import LookupResult
from ssd_target.draft_link import DraftLink, LinkCounts, LinkState, Session
from ssd_target.links import LinkReport
from ssd_target.pool_status import desired_drafts, is_news, pool_status
from ssd_target.scheduler import Load


def link(capacity: int = 4, name: str = "10.0.0.1:1") -> DraftLink:
    return DraftLink(name, 3, capacity, pair()[0], lambda _message: None)


def up(each: DraftLink) -> LinkReport:
    return LinkReport(each.name, LinkState.ACTIVE, link=each)


def test_a_link_tells_its_epoch_sessions_counts_and_round_trip() -> None:
    mine = link()
    mine.sessions[1] = cast(Session, None)
    for result in (*[LookupResult.HIT] * 3, LookupResult.MISS, LookupResult.LATE):
        mine.counts.note(result)
    mine.counts.note(LookupResult.NONE)
    mine.round_trip.hear(mine.round_trip.beat(10.0), 10.0)
    mine.round_trip.seconds = 0.002
    load = Load(running=2, waiting=5, wanting=6)
    status = pool_status([up(mine)], mine.counts, load, now=0.0)
    shown = status.links[0]
    assert (shown.address, shown.state, shown.epoch) == ("10.0.0.1:1", "active", 3)
    assert (shown.sessions, shown.capacity) == (1, 4)
    assert (shown.hits, shown.misses, shown.late) == (3, 1, 1)
    assert (shown.round_trip_seconds, shown.channel, shown.reason) == (0.002, "grpc", "")
    assert (status.running_sequences, status.waiting_sequences) == (2, 5)
    assert status.hit_rate == pytest.approx(3 / 5)
    assert status.desired_drafts == 2


def test_a_quarantine_shows_as_long_as_it_lasts() -> None:
    mine = link()
    for _ in range(3):
        mine.quarantine.note_round(100.0, any_in_time=False)
    shown = pool_status([up(mine)], LinkCounts(), Load(), now=101.0).links[0]
    assert (shown.state, shown.reason) == ("quarantined", "its tables kept coming late")
    shown = pool_status([up(mine)], LinkCounts(), Load(), now=106.0).links[0]
    assert (shown.state, shown.reason) == ("active", "")


def test_a_draining_and_a_refused_link_say_why() -> None:
    mine = link()
    mine.is_draining = True
    reports = [up(mine), LinkReport("10.0.0.2:1", LinkState.REFUSED, "vocab_size differs")]
    status = pool_status(reports, LinkCounts(), Load(), now=0.0)
    draining, refused = status.links
    assert (draining.state, draining.reason) == ("draining", "the draft is leaving")
    assert (refused.state, refused.reason) == ("refused", "vocab_size differs")
    assert status.hit_rate == 0.0


def test_a_watcher_hears_of_everything_but_round_trips() -> None:
    mine = link()
    told = pool_status([up(mine)], mine.counts, Load(), now=0.0)
    mine.round_trip.seconds = 0.002
    assert not is_news(pool_status([up(mine)], mine.counts, Load(), now=0.0), told)
    assert is_news(pool_status([up(mine)], mine.counts, Load(waiting=1), now=0.0), told)
    mine.is_draining = True
    assert is_news(pool_status([up(mine)], mine.counts, Load(), now=0.0), told)


@pytest.mark.parametrize(("wanting", "drafts"), [(0, 0), (1, 1), (6, 1), (7, 2), (13, 3)])
def test_enough_drafts_are_desired_for_all_who_want_one(wanting: int, drafts: int) -> None:
    reports = [up(link(4)), up(link(8)), LinkReport("10.0.0.3:1", LinkState.LOST)]
    assert desired_drafts(reports, wanting) == drafts


def test_with_no_link_up_as_many_are_desired_as_there_are() -> None:
    assert desired_drafts([LinkReport("10.0.0.3:1", LinkState.LOST)], 9) == 1
    assert desired_drafts([], 9) == 0
