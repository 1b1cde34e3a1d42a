"""A rollout that does not go on is named, and what it waits for."""

from dataclasses import replace

from tests.unit.ssd_operator.scenes import Scene, deployment, draft, target

from ssd_operator.observe.facts import Ref
from ssd_operator.status.condition_rules import progressing


def test_a_rollout_that_was_paused_by_hand_is_named_unless_it_is_resumed_now() -> None:
    paused = deployment("demo-draft-0") | {"spec": {"paused": True}}
    assert verdict(Scene(deployments=(paused,))) == ("False", "Paused")
    assert "demo-draft-0" in message(Scene(deployments=(paused,)))
    mends = replace(Scene().planned, makes=frozenset({Ref("Deployment", "demo-draft-0")}))
    scene = Scene(deployments=(paused,), planned=mends)
    assert verdict(scene)[1] != "Paused"


def test_a_rollout_that_is_stuck_says_on_what() -> None:
    left = {"terminated": {"exitCode": 1, "message": "RuntimeError: no (x.py:1)"}}
    status = [
        {"restartCount": 5, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": left}
    ]
    crashing = draft("d1", ready=False, containerStatuses=status)
    rolling = deployment("demo-draft-0", reason="ReplicaSetUpdated")
    scene = Scene(pods=(target(), draft("d0"), crashing), deployments=(rolling,))
    assert verdict(scene) == ("True", "RollingOut")
    assert message(scene) == (
        "3 of 3 pods are up to date; "
        "d1 ended with exit code 1, 5 restarts so far: RuntimeError: no (x.py:1)."
    )


def verdict(scene: Scene) -> tuple[str, str]:
    found = progressing(scene.snapshot)
    return str(found.truth), found.reason


def message(scene: Scene) -> str:
    return progressing(scene.snapshot).message
