"""The condition of a rollout that does not proceed names its cause."""

from tests.unit.ssd_operator.scenes import Scene, deployment, draft, target

from ssd_operator.observe.facts import Ref
from ssd_operator.policy.apply_failures import Results
from ssd_operator.status.condition_rules import conditions


def test_a_deployment_that_was_paused_by_hand_is_named_unless_this_pass_resumes_it() -> None:
    paused = deployment("demo-draft-0") | {"spec": {"paused": True}}
    assert truth_and_reason(Scene(deployments=(paused,))) == ("False", "Paused")
    assert "demo-draft-0" in message(Scene(deployments=(paused,)))
    resumed = Results(applied={Ref("Deployment", "demo-draft-0")})
    scene = Scene(deployments=(paused,), results=resumed)
    assert truth_and_reason(scene)[1] != "Paused"


def test_a_stuck_rollout_names_its_cause() -> None:
    left = {"terminated": {"exitCode": 1, "message": "RuntimeError: no (x.py:1)"}}
    status = [
        {"restartCount": 5, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": left}
    ]
    crashing = draft("d1", ready=False, containerStatuses=status)
    rolling = deployment("demo-draft-0", reason="ReplicaSetUpdated")
    scene = Scene(pods=(target(), draft("d0"), crashing), deployments=(rolling,))
    assert truth_and_reason(scene) == ("True", "RollingOut")
    assert message(scene) == (
        "3 of 3 pods are up to date; "
        "d1 ended with exit code 1, 5 restarts so far: RuntimeError: no (x.py:1)."
    )


def truth_and_reason(scene: Scene) -> tuple[str, str]:
    found = conditions(scene.result)["Progressing"]
    return str(found.truth), found.reason


def message(scene: Scene) -> str:
    return conditions(scene.result)["Progressing"].message
