"""The status of the pool, computed from its links and from the round log."""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace

from ssd.pool.dialer import LinkReport
from ssd.pool.link import DraftLink, LinkState
from ssd.pool.pool import DraftPool
from ssd.pool.round_log import RoundLog
from ssd.pool.sustainable_sessions import sustainable_sessions
from ssd.rpc.pool_codec import LinkStatus, PoolStatus

_UNKNOWN = PoolStatus()
_REASONS = {
    LinkState.QUARANTINED: "it has sent no tables",
    LinkState.DRAINING: "the draft is leaving",
}


def pool_status(
    reports: Rows[LinkReport],
    pool: DraftPool,
    round_log: RoundLog,
    now: float,
    identity: PoolStatus = _UNKNOWN,
) -> PoolStatus:
    """Return the answer to ``AdminService.GetPoolStatus``.

    Pool and rounds provide all fields but the weights and the data type of the target, which
    ``identity`` has.
    """
    links = tuple(link_status(report, now, round_log.verify_seconds) for report in reports)
    eligible = round_log.mean_eligible(now)
    speculation = round_log.auto_speculation
    return replace(
        identity,
        links=links,
        running_sequences=round_log.counts.running,
        waiting_sequences=round_log.counts.waiting,
        hit_rate=pool.counts.hit_rate,
        eligible_sequences=eligible,
        tokens_per_round=round_log.tokens_per_round,
        desired_draft_replicas=desired_draft_replicas(links, eligible),
        efficiency=round_log.efficiency,
        speculating=speculation.is_on,
        speculation_reason=speculation.reason.value,
        speculation_speed_up=speculation.speed_up,
        max_proposed_tokens=speculation.max_proposed,
    )


def link_status(report: LinkReport, now: float, verify_seconds: float) -> LinkStatus:
    """Return the status of one address, and what is known of its link while it is up."""
    status, link = report
    if link is None:
        return status
    state = link.state(now)
    channel, welcome = link.channel, link.welcome
    return replace(
        status,
        state=state,
        epoch=welcome.epoch,
        sessions=len(link.sessions),
        sustainable_sessions=_sustainable_sessions(link, verify_seconds),
        hits=link.counts.hits,
        misses=link.counts.misses,
        late=link.counts.late,
        round_trip_seconds=link.round_trip.seconds,
        reason=link.lost_because or _REASONS.get(state, status.reason),
        draft_pod=welcome.peer.pod,
        draft_node=welcome.peer.node,
        channel=channel.name,
        channel_reason=channel.reason,
        channel_round_trip_seconds=channel.round_trip_seconds,
        channel_bytes_per_second=channel.bytes_per_second,
        transport=channel.transport,
        draft_weights=welcome.peer.weights_fingerprint,
    )


def _sustainable_sessions(link: DraftLink, verify_seconds: float) -> int:
    """Return the sustainable sessions of a draft, of all targets that it serves.

    The time to the tables contains turns of the draft for other targets, and its work contains what
    it does after the tables are sent. Both overestimate the time of a session.
    """
    times: list[Mapping[int, float]] = [link.batch_times.seconds_by_sessions]
    if link.work_seconds and times[0]:
        times.append(link.work_seconds)
    return max(sustainable_sessions(each, verify_seconds, link.max_sessions) for each in times)


def desired_draft_replicas(links: Rows[LinkStatus], eligible: float) -> float:
    """Return the number of drafts that the eligible sequences would fill, as a fraction.

    Each draft is assumed to serve the mean of the sustainable sessions of the active and suspended
    links. Without any, that mean is unknown, and the result is one draft. It does not depend on the
    number of addresses: a scaler would add drafts for ever that no target can link.
    """
    serving = (LinkState.ACTIVE, LinkState.QUARANTINED)
    sustainable = [link.sustainable_sessions for link in links if link.state in serving]
    if sustainable:
        return eligible * len(sustainable) / sum(sustainable)
    return 1.0 if eligible else 0.0
