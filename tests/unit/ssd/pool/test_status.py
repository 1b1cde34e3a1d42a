from typing import cast

import pytest
from prometheus_client import REGISTRY
from tests.unit.ssd.pool import links

from ssd.pool.dialer import LinkReport
from ssd.pool.link import DraftLink, LinkState, Session
from ssd.pool.metrics import publish_mode, publish_report
from ssd.pool.pool import DraftPool
from ssd.pool.round_log import RoundLog, SequenceCounts
from ssd.pool.settings import DraftsSettings
from ssd.pool.status import desired_draft_replicas, pool_status
from ssd.ports import SystemClock
from ssd.rpc.pool_codec import LinkStatus
from ssd.speculation.controller import ControllerReport, Reason
from ssd.speculation.round_record import RoundRecord
from ssd.types import LookupResult, Mode, Peer


def link(max_sessions: int = 4, name: str = "10.0.0.1:1") -> DraftLink:
    peer = Peer(pod="demo-draft-0-x", node="n1", cell="0", weights_fingerprint="sha256:d")
    return links.link(name, max_sessions, peer=peer)


def pool() -> DraftPool:
    return DraftPool(DraftsSettings(branches=4), 3, 10, SystemClock())


def log_of_a_round() -> RoundLog:
    """A round of 2 sequences: 5 tokens, T_verify 4 ms, T_round 5 ms."""
    log = RoundLog()
    log.add_round(RoundRecord(verify_seconds=0.004, seconds=0.005, num_sequences=2, num_tokens=5))
    return log


def up(each: DraftLink) -> LinkReport:
    return LinkReport(LinkStatus(address=each.name, state=LinkState.ACTIVE), each)


def test_the_status_of_a_link_has_its_epoch_sessions_counts_and_round_trip() -> None:
    mine = link()
    mine.sessions[1] = cast(Session, None)
    for result in (*[LookupResult.HIT] * 3, LookupResult.MISS, LookupResult.LATE):
        mine.counts.add(result)
    mine.counts.add(LookupResult.NONE)
    mine.round_trip.seconds = 0.002
    shared = pool()
    shared.counts = mine.counts
    log = log_of_a_round()
    log.set_counts(SequenceCounts(running=2, waiting=5, eligible=6), 0.0)
    status = pool_status([up(mine)], shared, log, 1.0)
    shown = status.links[0]
    assert (shown.address, shown.state, shown.epoch) == ("10.0.0.1:1", "active", 3)
    assert (shown.sessions, shown.sustainable_sessions) == (1, 4)
    assert (shown.hits, shown.misses, shown.late) == (3, 1, 1)
    assert (shown.round_trip_seconds, shown.channel, shown.reason) == (0.002, "grpc", "")
    assert (status.running_sequences, status.waiting_sequences) == (2, 5)
    assert status.hit_rate == pytest.approx(3 / 5)
    assert (shown.draft_pod, shown.draft_node) == ("demo-draft-0-x", "n1")
    assert shown.transport == "tcp"
    assert (status.eligible_sequences, status.tokens_per_round) == (6.0, 2.5)
    assert status.desired_draft_replicas == 1.5
    assert (status.speculating, status.speculation_reason) == (True, "measuring")
    assert status.efficiency == pytest.approx(0.8)
    assert shown.draft_weights == "sha256:d"


def test_the_choice_of_the_controller_and_its_reason_are_reported() -> None:
    log = log_of_a_round()
    log.speculation = ControllerReport(
        is_on=False, reason=Reason.SLOWER, speed_up=0.6, max_proposed=4
    )
    status = pool_status([up(link())], pool(), log, 1.0)
    assert (status.speculating, status.speculation_reason) == (False, "slower")
    assert (status.speculation_speed_up, status.max_proposed_tokens) == (0.6, 4)


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_in_place_of_auto_decides_whether_a_target_speculates(mode: Mode) -> None:
    log = log_of_a_round()
    publish_mode(mode, log)
    slower = ControllerReport(is_on=False, reason=Reason.SLOWER, speed_up=0.8, max_proposed=4)
    publish_report(slower, log)
    status = pool_status([], pool(), log, 1.0)
    is_chosen = mode is Mode.AUTO
    expected = (not is_chosen and mode is not Mode.AUTOREGRESSIVE, 0.8 if is_chosen else 0.0)
    assert (status.speculating, status.speculation_speed_up) == expected
    assert status.speculation_reason == ("slower" if is_chosen else "measuring")
    assert REGISTRY.get_sample_value("ssd_speculation_active") == expected[0]
    assert REGISTRY.get_sample_value("ssd_speculation_speed_up") == expected[1]


def test_a_target_without_a_round_has_the_metrics_of_speculation() -> None:
    publish_mode(Mode.AUTO, RoundLog())
    assert REGISTRY.get_sample_value("ssd_speculation_active") == 1.0
    assert REGISTRY.get_sample_value("ssd_speculation_reason", {"reason": "measuring"}) == 1.0


def test_sustainable_sessions_follow_from_the_times_of_batches_and_of_a_verify() -> None:
    mine = link(max_sessions=16)
    log = log_of_a_round()
    assert pool_status([up(mine)], pool(), log, 0.0).links[0].sustainable_sessions == 16
    mine.batch_times.add_batch([0.001, 0.002])
    assert pool_status([up(mine)], pool(), log, 0.0).links[0].sustainable_sessions == 4


def sustained(each: DraftLink) -> int:
    """Return the sustainable sessions of a link, with a verify of 4 ms."""
    return pool_status([up(each)], pool(), log_of_a_round(), 0.0).links[0].sustainable_sessions


def test_turns_of_a_shared_draft_for_other_targets_take_no_sustainable_sessions() -> None:
    mine = link(max_sessions=16)
    mine.work_seconds = {2: 0.001}
    assert sustained(mine) == 16, "no table has arrived"
    mine.batch_times.add_batch([0.004, 0.004])
    assert sustained(mine) == 8
    mine.work_seconds = {}
    assert sustained(mine) == 2, "the draft does not report its work"


def test_work_after_the_tables_are_sent_takes_no_sustainable_sessions() -> None:
    mine = link(max_sessions=16)
    mine.batch_times.add_batch([0.001, 0.001])
    mine.work_seconds = {2: 0.002}
    assert sustained(mine) == 8


def test_an_overloaded_shared_draft_has_fewer_sustainable_sessions_than_it_serves() -> None:
    """Four targets with two sessions each: their tables take twice the time of a verify."""
    links = []
    for number in range(4):
        each = link(max_sessions=16, name=f"10.0.0.{number}:1")
        each.work_seconds = {2: 0.002}
        each.batch_times.add_batch([0.008, 0.008])
        links.append(each)
    assert [sustained(each) for each in links] == [4] * 4
    log = log_of_a_round()
    log.set_counts(SequenceCounts(running=8, waiting=0, eligible=8), 0.0)
    status = pool_status([up(links[0])], pool(), log, 0.0)
    assert status.desired_draft_replicas == 2.0


def test_a_link_is_quarantined_while_its_circuit_breaker_is_open() -> None:
    mine = link()
    for _ in range(3):
        mine.circuit_breaker.add_round(100.0, is_silent=True)
    shown = pool_status([up(mine)], pool(), RoundLog(), 101.0).links[0]
    assert (shown.state, shown.reason) == ("quarantined", "it has sent no tables")
    shown = pool_status([up(mine)], pool(), RoundLog(), 106.0).links[0]
    assert (shown.state, shown.reason) == ("active", "")


def test_a_draining_and_a_refused_link_have_a_reason() -> None:
    mine = link()
    mine.is_draining = True
    refusal = LinkStatus(address="10.0.0.2:1", state=LinkState.REFUSED, reason="vocab_size differs")
    status = pool_status([up(mine), LinkReport(refusal)], pool(), RoundLog(), 0.0)
    draining, refused = status.links
    assert (draining.state, draining.reason) == ("draining", "the draft is leaving")
    assert (refused.state, refused.reason) == ("refused", "vocab_size differs")
    assert status.hit_rate == 0.0


def shown(state: LinkState, sessions: int = 4) -> LinkStatus:
    return LinkStatus(address="10.0.0.1:1", state=state, sustainable_sessions=sessions)


@pytest.mark.parametrize(
    ("eligible", "drafts"), [(0.0, 0.0), (1.0, 1 / 6), (6.0, 1.0), (7.5, 1.25)]
)
def test_drafts_are_desired_for_all_eligible_sequences(eligible: float, drafts: float) -> None:
    links = [shown(LinkState.ACTIVE, 4), shown(LinkState.ACTIVE, 8), shown(LinkState.LOST, 0)]
    assert desired_draft_replicas(links, eligible) == pytest.approx(drafts)


def test_a_draining_link_does_not_count_for_the_desired_drafts() -> None:
    links = [shown(LinkState.ACTIVE, 4), shown(LinkState.DRAINING, 400)]
    assert desired_draft_replicas(links, 6.0) == 1.5


def test_a_suspended_link_counts_for_the_desired_drafts() -> None:
    links = [shown(LinkState.ACTIVE, 4), shown(LinkState.QUARANTINED, 2)]
    assert desired_draft_replicas(links, 6.0) == 2


@pytest.mark.parametrize("num_addresses", [0, 1, 8])
def test_without_a_link_one_draft_is_desired_whatever_the_number_of_drafts(
    num_addresses: int,
) -> None:
    links = [shown(LinkState.REFUSED, 0)] * num_addresses
    assert desired_draft_replicas(links, 9.0) == 1
    assert desired_draft_replicas(links, 0.0) == 0
