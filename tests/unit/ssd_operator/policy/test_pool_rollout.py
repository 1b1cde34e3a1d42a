"""Which targets stop the rollout of a pool's drafts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.unit.ssd_operator.policy.test_rollout import NOW, older
from tests.unit.ssd_operator.resources import CORPUS, deployments, read
from tests.unit.ssd_operator.scenes import pod

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_operator.api.spec import Object
from ssd_operator.children.objects import REVISION_LABEL
from ssd_operator.observe.cluster import ref_of
from ssd_operator.observe.pod_state import name_of, revision_of
from ssd_operator.observe.snapshot import Snapshot, TargetReport
from ssd_operator.policy.rollout import UNLINKED_SECONDS, unlinked_targets, waiting_targets

SHARED = read(CORPUS / "pool.yaml")
(NEW,) = deployments(SHARED, "draft")
OLD_DRAFT, NEW_DRAFT = ("10.0.0.1", "10.0.0.2")


def pool_pod(name: str, address: str = "", *, of: Object | None = None) -> Object:
    """A draft of the pool, or a target that refers to it."""
    made = pod("draft" if address else "target", name, podIP=address)
    made["metadata"]["labels"] |= {
        "ssd.dev/name": "shared-pool" if address else name,
        REVISION_LABEL: revision_of(of or older(NEW)),
    }
    return made


def pooled(*reports: tuple[str, Sequence[LinkStatus]]) -> Snapshot:
    """A pool whose second draft is new, with the links that targets report."""
    targets = [name for name, _ in reports]
    drafts = pool_pod("d1", OLD_DRAFT), pool_pod("d2", NEW_DRAFT, of=NEW)
    return Snapshot(
        resource=SHARED,
        now=NOW,
        children={ref_of(NEW): NEW},
        pods=(*map(pool_pod, targets), *drafts),
        pools={name: TargetReport(PoolStatus(links=tuple(links)), NOW) for name, links in reports},
        deployments=tuple({*targets, "code"}),
    )


def to(host: str, state: str, reason: str = "") -> LinkStatus:
    return LinkStatus(address=f"{host}:50052", state=state, reason=reason)


OLD_LINK, REFUSED = to(OLD_DRAFT, "active"), to(NEW_DRAFT, "refused", "lookahead: 4 and 6")
NEW_LINK = to(NEW_DRAFT, "quarantined")


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([("code", [OLD_LINK, NEW_LINK])], {}),
        ([("code", [OLD_LINK, to(NEW_DRAFT, "connecting")])], {"code": ""}),
        ([("code", [OLD_LINK, to(NEW_DRAFT, "lost", "Socket closed")])], {"code": ""}),
        ([("code", [OLD_LINK])], {"code": ""}),
        ([("code", [to(OLD_DRAFT, "lost"), REFUSED])], {"code": "lookahead: 4 and 6"}),
        ([("code", [to(OLD_DRAFT, "connecting")])], {"code": ""}),
        ([("code", [to(OLD_DRAFT, "refused"), REFUSED])], {}),
        ([("code", [])], {}),
        ([("code", [OLD_LINK, REFUSED])], {"code": "lookahead: 4 and 6"}),
        ([("chat", [NEW_LINK]), ("code", [OLD_LINK, REFUSED])], {"code": "lookahead: 4 and 6"}),
        ([("chat", [NEW_LINK]), ("code", [OLD_LINK, NEW_LINK])], {}),
    ],
    ids=[
        "fits",
        "connects",
        "cannot connect",
        "has not dialled yet",
        "refused after a loss",
        "restarts",
        "has nothing to lose",
        "does not report",
        "refused",
        "one of two refused",
        "all fit",
    ],
)
def test_drafts_of_a_pool_wait_for_targets_that_have_a_link_to_old_ones_only(
    reports: Sequence[tuple[str, Sequence[LinkStatus]]], expected: dict[str, str]
) -> None:
    assert waiting_targets(pooled(*reports), {}, {}) == expected


LOST = [to(OLD_DRAFT, "lost"), to(NEW_DRAFT, "lost")]


@pytest.mark.parametrize(
    ("links", "seconds", "expected"),
    [
        (LOST, UNLINKED_SECONDS - 1.0, {"code": ""}),
        (LOST, UNLINKED_SECONDS, {}),
        ([LOST[0], REFUSED], UNLINKED_SECONDS, {"code": "lookahead: 4 and 6"}),
    ],
)
def test_drafts_of_a_pool_do_not_wait_for_long_for_targets_that_cannot_connect(
    links: Sequence[LinkStatus], seconds: float, expected: dict[str, str]
) -> None:
    assert waiting_targets(pooled(("code", links)), {"code": NOW - seconds}, {}) == expected


CLOSED = to(NEW_DRAFT, "lost", "Socket closed; perhaps the port needs TLS")


@pytest.mark.parametrize(
    ("links", "seconds", "expected"),
    [
        ([OLD_LINK, CLOSED], UNLINKED_SECONDS - 1.0, ""),
        ([OLD_LINK, CLOSED], UNLINKED_SECONDS, CLOSED.reason),
        ([OLD_LINK, to(NEW_DRAFT, "connecting")], UNLINKED_SECONDS, ""),
        ([OLD_LINK, to(NEW_DRAFT, "draining", "drains")], UNLINKED_SECONDS, ""),
    ],
)
def test_a_target_that_waits_for_long_has_the_cause_why_it_cannot_connect_to_a_new_draft(
    links: Sequence[LinkStatus], seconds: float, expected: str
) -> None:
    snapshot = pooled(("code", links))
    assert waiting_targets(snapshot, {}, {"code": NOW - seconds}) == {"code": expected}


def test_the_time_without_a_link_ends_with_any_link_that_is_up() -> None:
    reports = ("chat", [OLD_LINK]), ("code", LOST), ("new", LOST)
    before = {"chat": NOW - 9.0, "code": NOW - 9.0, "gone": NOW - 9.0}
    assert unlinked_targets(pooled(*reports), before) == {"code": NOW - 9.0, "new": NOW}


def test_a_pool_without_a_new_draft_that_is_ready_waits_for_nothing() -> None:
    snapshot = pooled(("code", [OLD_LINK, REFUSED]))
    old = tuple(each for each in snapshot.pods if name_of(each) != "d2")
    assert waiting_targets(replace(snapshot, pods=old), {}, {}) == {}
    assert waiting_targets(replace(snapshot, children={}), {}, {}) == {}, (
        "its Deployment was deleted"
    )
