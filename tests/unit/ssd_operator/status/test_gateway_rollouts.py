"""A rollout of gateways is part of the condition Progressing."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.ssd_operator.scenes import (
    NOW,
    UP_TO_DATE,
    Scene,
    deployment,
    pod,
    target,
    terminating,
)

from ssd_operator.api.gateway import Gateway
from ssd_operator.api.spec import Object
from ssd_operator.observe.pod_state import to_text
from ssd_operator.policy.plan import PassPlan
from ssd_operator.status.condition_rules import conditions

ROLLS: Object = {"reason": "ReplicaSetUpdated"}
STUCK: Object = {"status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out."}
PULL = [{"image": "x", "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}]
FORBIDDEN = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
JUST = to_text(NOW - 5)


def gateway(name: str, revision: str, **more: Any) -> Object:
    found = pod("gateway", name, **more)
    del found["metadata"]["labels"]["ssd.dev/cell"]
    found["metadata"]["labels"]["ssd.dev/revision"] = revision
    return found


OLD = (gateway("g0", "r1"), gateway("g1", "r1"))
PULLS = gateway("g2", "r2", ready=False, containerStatuses=PULL)
LOADS = gateway(
    "g2", "r2", ready=False, containerStatuses=[{"state": {"running": {"startedAt": JUST}}}]
)
NEW = (gateway("g3", "r2"), gateway("g4", "r2"))


def rolling(*gateways: Object, targets: tuple[Object, ...] = (target(),), **found: Any) -> Scene:
    """Two gateways are replaced by gateways of revision r2."""
    healthy, front = Scene(), deployment("demo-gateway", **found)
    front["status"] |= {"availableReplicas": 2}
    front["status"]["conditions"] += [FORBIDDEN] if not gateways else []
    return Scene(
        pods=(*targets, *healthy.pods[1:]),
        deployments=(*healthy.deployments, front),
        spec={"gateway": Gateway(enabled=True, replicas=2)},
        facts={"gateways": gateways},
        plan=PassPlan(revisions=UP_TO_DATE | {"demo-gateway": "r2"}),
    )


def just_ready() -> Object:
    found = target()
    found["status"]["conditions"][0]["lastTransitionTime"] = JUST
    return found


UNREADY = (target(ready=False),)
CASES = [
    (rolling(*OLD, PULLS, **ROLLS), "True RollingOut", "g2 cannot pull x: denied."),
    (rolling(*OLD, LOADS, **ROLLS), "True RollingOut", "4 of 6 pods are up to date, 3 of them"),
    (rolling(*OLD, PULLS, **STUCK), "False ProgressDeadlineExceeded", "out; g2 cannot pull x: de"),
    (rolling(*OLD, LOADS, **STUCK), "False ProgressDeadlineExceeded", "timed out; g2 loads."),
    (rolling(**STUCK), "False ProgressDeadlineExceeded", "demo-gateway has no pod: exceeded quota"),
    (rolling(*OLD, LOADS, targets=UNREADY, **STUCK), "True RollingOut", ""),
    (rolling(*OLD, LOADS, targets=(just_ready(),), **STUCK), "True RollingOut", ""),
    (rolling(PULLS, targets=UNREADY, **STUCK), "False ProgressDeadlineExceeded", "g2 cannot pull"),
    (rolling(*NEW), "True UpToDate", ""),
    (rolling(*NEW, terminating(OLD[0])), "True UpToDate", ""),
]


@pytest.mark.parametrize(("scene", "expected", "words"), CASES)
def test_progressing_reports_the_rollout_with_the_cause(
    scene: Scene, expected: str, words: str
) -> None:
    found = conditions(scene.result)["Progressing"]
    assert f"{found.status} {found.reason}" == expected
    assert words in found.message
    assert found.message.endswith(".")


@pytest.mark.parametrize(("revision", "status"), [("r1", "False"), ("r2", "True")])
def test_a_gateway_that_only_new_targets_can_serve_may_wait_for_one(
    revision: str, status: str
) -> None:
    scene = rolling(*OLD, LOADS, **STUCK)
    revisions = {**scene.plan.revisions, "demo-target-0": revision}
    found = replace(scene, plan=replace(scene.plan, gateway="Ready", revisions=revisions))
    assert conditions(found.result)["Progressing"].status == status


def test_the_old_gateways_still_count_as_ready() -> None:
    found = conditions(rolling(*OLD, PULLS, **STUCK).result)["GatewayReady"]
    assert (found.status, found.reason) == ("True", "AllReady")
