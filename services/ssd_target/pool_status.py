"""The state of the pool for those who operate it: a pure view of links, counts and load."""

from collections.abc import Sequence as Rows
from dataclasses import replace

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_target.draft_link import LinkCounts, LinkState
from ssd_target.links import LinkReport
from ssd_target.scheduler import Load

_REASONS = {
    LinkState.QUARANTINED: "its tables kept coming late",
    LinkState.DRAINING: "the draft is leaving",
}


def pool_status(
    reports: Rows[LinkReport], counts: LinkCounts, load: Load, now: float
) -> PoolStatus:
    """What ``AdminService.GetPoolStatus`` answers."""
    return PoolStatus(
        links=tuple(link_status(report, now) for report in reports),
        running_sequences=load.running,
        waiting_sequences=load.waiting,
        hit_rate=counts.hit_rate,
        desired_drafts=desired_drafts(reports, load.wanting),
    )


def link_status(report: LinkReport, now: float) -> LinkStatus:
    """One address; a link that is up knows more than the last report of it."""
    link = report.link
    if link is None:
        return LinkStatus(address=report.address, state=report.state, reason=report.reason)
    state = link.state(now)
    return LinkStatus(
        address=report.address,
        state=state,
        epoch=link.epoch,
        sessions=len(link.sessions),
        capacity=link.capacity,
        hits=link.counts.hits,
        misses=link.counts.misses,
        late=link.counts.late,
        round_trip_seconds=link.round_trip.seconds,
        reason=link.lost_because or _REASONS.get(state, report.reason),
    )


def is_news(status: PoolStatus, told: PoolStatus) -> bool:
    """Whether a watcher is to be told; a round trip, which is never the same twice, is no news."""
    return _but_round_trips(status) != _but_round_trips(told)


def _but_round_trips(status: PoolStatus) -> PoolStatus:
    return replace(
        status, links=tuple(replace(link, round_trip_seconds=0.0) for link in status.links)
    )


def desired_drafts(reports: Rows[LinkReport], wanting: int) -> int:
    """Drafts whose capacities together hold all sequences that want one.

    Drafts are taken to be alike: the mean capacity of the links that are up. While none is, nobody
    knows what a draft holds, and the answer is as many as there are addresses.
    """
    capacities = [report.link.capacity for report in reports if report.link is not None]
    if not capacities:
        return len(reports)
    return -(-wanting * len(capacities) // sum(capacities))
