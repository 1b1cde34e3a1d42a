"""The state of the pool for those who operate it: a pure view of links, counts and load."""

import math
from collections.abc import Sequence as Rows
from dataclasses import replace

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_target.drafts.dialer import LinkReport
from ssd_target.drafts.link import LinkState
from ssd_target.drafts.pool import DraftPool
from ssd_target.drafts.sustainable_sessions import draft_capacity

_REASONS = {
    LinkState.QUARANTINED: "its tables kept coming late",
    LinkState.DRAINING: "the draft is leaving",
}


def pool_status(
    reports: Rows[LinkReport], pool: DraftPool, now: float, weights_fingerprint: str
) -> PoolStatus:
    """What ``AdminService.GetPoolStatus`` answers."""
    load, demand = pool.load, pool.demand
    links = tuple(link_status(report, now, demand.verify_seconds) for report in reports)
    eligible = demand.eligible.mean(now)
    desired = desired_draft_replicas(links, eligible)
    return PoolStatus(
        links=links,
        running_sequences=load.running,
        waiting_sequences=load.waiting,
        hit_rate=pool.counts.hit_rate,
        eligible_sequences=eligible,
        tokens_per_round=demand.tokens_per_round,
        desired_draft_replicas=desired,
        efficiency=demand.efficiency,
        weights_fingerprint=weights_fingerprint,
    )


def link_status(report: LinkReport, now: float, verify_seconds: float) -> LinkStatus:
    """One address; a link that is up knows more than the last report of it."""
    link = report.link
    if link is None:
        return _without_link(report)
    state = link.state(now)
    return LinkStatus(
        address=report.address,
        state=state,
        epoch=link.epoch,
        sessions=len(link.sessions),
        sustainable_sessions=draft_capacity(
            link.table_pace.seconds_by_sessions, verify_seconds, link.capacity
        ),
        hits=link.counts.hits,
        misses=link.counts.misses,
        late=link.counts.late,
        round_trip_seconds=link.round_trip.seconds,
        reason=link.lost_because or _REASONS.get(state, report.reason),
        draft_pod=link.peer.pod,
        draft_node=link.peer.node,
        transport=link.transport,
        draft_weights=link.peer.weights_fingerprint,
    )


def _without_link(report: LinkReport) -> LinkStatus:
    found = report.found
    return LinkStatus(
        address=report.address,
        state=report.state,
        reason=report.reason,
        draft_pod=report.peer.pod,
        draft_node=report.peer.node,
        transport=found.transport if found else "",
        round_trip_seconds=found.round_trip_seconds if found else 0.0,
    )


def is_news(status: PoolStatus, told: PoolStatus) -> bool:
    """Whether a watcher is to be told; what never stands still, as round trips, is no news."""
    return _but_measurements(status) != _but_measurements(told)


def _but_measurements(status: PoolStatus) -> PoolStatus:
    return replace(
        status,
        links=tuple(replace(link, round_trip_seconds=0.0) for link in status.links),
        eligible_sequences=0.0,
        tokens_per_round=0.0,
        efficiency=0.0,
        desired_draft_replicas=math.ceil(status.desired_draft_replicas),
    )


def desired_draft_replicas(links: Rows[LinkStatus], eligible: float) -> float:
    """Drafts that the eligible sequences would fill, as a fraction.

    Drafts are taken to be alike: the mean capacity of those in service. While none is, nobody knows
    what a draft holds: as many are wanted as there are addresses, but one that can be asked.
    """
    capacities = [link.sustainable_sessions for link in links if link.state == LinkState.ACTIVE]
    if capacities:
        return eligible * len(capacities) / sum(capacities)
    return float(max(1, len(links))) if eligible else 0.0
