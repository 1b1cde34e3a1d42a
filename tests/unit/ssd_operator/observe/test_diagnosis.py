"""Reasons of pods that are not ready."""

import json
from typing import Any

import pytest

from ssd_operator.api.spec import Object
from ssd_operator.observe.diagnosis import (
    Diagnosis,
    PodReason,
    diagnose,
    diagnose_absence,
    diagnose_failed,
    worst,
)
from ssd_operator.observe.pod_state import to_text

NOW = 1_000_000.0
IMAGE = "localhost/ssd-target:0.1.0"


def pod(*, node: str = "n1", scheduled: Object | None = None, **container: Any) -> Object:
    conditions = [
        {"type": "Ready", "status": "False"},
        {"type": "PodScheduled", **(scheduled or {"lastTransitionTime": to_text(NOW - 5)})},
    ]
    statuses = [{"image": IMAGE, "restartCount": 0, **container}] if container else []
    return {
        "metadata": {"name": "t0"},
        "spec": {"nodeName": node} if node else {},
        "status": {"conditions": conditions, "containerStatuses": statuses},
    }


def diagnosed(found: Object) -> Diagnosis:
    diagnosis = diagnose(found, 600, NOW)
    assert diagnosis is not None
    return diagnosis


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


def ended(code: int, message: str = "", reason: str = "Error", seconds: float = 3) -> Object:
    return {
        "terminated": {
            "exitCode": code,
            "message": message,
            "reason": reason,
            "startedAt": to_text(NOW - seconds - 1),
            "finishedAt": to_text(NOW - 1),
        }
    }


RUNNING: Object = {"running": {"startedAt": to_text(NOW)}}


def crashed(code: int, message: str) -> Object:
    """A pod whose engine has ended like this four times."""
    return pod(state=waiting("CrashLoopBackOff"), lastState=ended(code, message), restartCount=4)


def restarted(code: int, seconds: float) -> Object:
    """A pod whose engine starts again; its first run was this long."""
    last = ended(code, seconds=seconds)
    return pod(state=RUNNING, lastState=last, restartCount=1, started=False)


def fetching(**container: Any) -> Object:
    """A pod whose engine waits for its model."""
    made = pod(name="demo", state=waiting("PodInitializing"))
    fetch = {"name": "fetch", "image": IMAGE, "restartCount": 2, **container}
    made["status"]["initContainerStatuses"] = [fetch]
    return made


def mounting(*, seconds: float = 11, is_mounted: bool = False) -> Object:
    """A pod that was placed some time ago and whose containers have not been created."""
    made = pod(
        scheduled={"lastTransitionTime": to_text(NOW - seconds)}, state=waiting("ContainerCreating")
    )
    started = {"type": "PodReadyToStartContainers", "status": str(is_mounted)}
    made["status"]["conditions"].append(started)
    return made


WHY = "WeightsError: layer 3 is missing; take another source"
NO_TOKEN = "ModelNotFoundError: hf://org/name@0: the hub refuses"
NO_ROOM = "CacheError: no room"
NO_TARGET = "/usr/local/bin/python: No module named ssd_target"
CASES: list[tuple[Object, str, str]] = [
    (fetching(state=RUNNING), "FetchingModel", "t0 fetches its model"),
    (
        fetching(state=RUNNING, lastState=ended(1, NO_ROOM)),
        "CrashLoop",
        f"fetches its model again; it ended with exit code 1, 2 restarts so far: {NO_ROOM}",
    ),
    (
        fetching(state=waiting("CrashLoopBackOff"), lastState=ended(78, NO_TOKEN)),
        "ConfigurationError",
        f"t0: {NO_TOKEN}",
    ),
    (
        fetching(state=waiting("CrashLoopBackOff"), lastState=ended(1, NO_ROOM, seconds=600)),
        "CrashLoop",
        NO_ROOM,
    ),
    (
        fetching(state=waiting("CreateContainerConfigError", 'secret "hf" not found')),
        "ConfigurationError",
        'secret "hf" not found',
    ),
    (fetching(state=ended(0)), "Loading", "is being created"),
    (
        pod(state=ended(1, NO_TARGET)),
        "ConfigurationError",
        "has no ssd_target; is it the image of another process?",
    ),
    (
        pod(state=ended(1, "/usr/bin/python: No module named ssd_gateway")),
        "ConfigurationError",
        "has no ssd_gateway; is it the image of another process?",
    ),
    (
        pod(node="", scheduled={"reason": "Unschedulable", "message": "0/2 nodes: no GPU.."}),
        "Unschedulable",
        "t0: 0/2 nodes: no GPU",
    ),
    (pod(node=""), "Loading", "t0 waits for a node"),
    (
        pod(state=waiting("ErrImagePull", "failed to pull: not found")),
        "ImagePull",
        f"t0 cannot pull {IMAGE}: failed to pull: not found",
    ),
    (
        pod(
            state=waiting(
                "ImagePullBackOff",
                f'Back-off pulling image "{IMAGE}": ErrImagePull: failed to pull: not found',
            )
        ),
        "ImagePull",
        f"t0 cannot pull {IMAGE}: failed to pull: not found",
    ),
    (
        pod(state=waiting("CreateContainerConfigError", 'secret "hf" not found')),
        "ConfigurationError",
        't0 cannot start: secret "hf" not found',
    ),
    (crashed(78, WHY), "ConfigurationError", f"t0: {WHY}"),
    (pod(state=RUNNING, lastState=ended(78, WHY)), "ConfigurationError", WHY),
    (pod(state=ended(78)), "ConfigurationError", "refused its settings (exit code 78)"),
    (
        pod(state=ended(78, "SettingsError: device 'cuda' cannot be used here: no driver")),
        "NoDevice",
        "device 'cuda' cannot be used here: no driver",
    ),
    (
        crashed(1, "Traceback\n  line 3\nRuntimeError: broken\n"),
        "CrashLoop",
        "ended with exit code 1, 4 restarts so far: RuntimeError: broken",
    ),
    (
        pod(state=ended(137, reason="OOMKilled"), restartCount=1),
        "CrashLoop",
        "was killed for memory, 1 restarts so far",
    ),
    (
        restarted(137, 600),
        "StartupTimeout",
        "t0 was not ready after 600 s and was restarted; "
        "raise startupTimeoutSeconds or use a modelCache that keeps the weights",
    ),
    (restarted(1, 7200), "CrashLoop", "loads again; it ended with exit code 1, 1 restarts so far"),
    (restarted(137, 599), "CrashLoop", "it ended with exit code 137, 1 restarts so far"),
    (restarted(0, 7200), "Loading", "loads again; it ended with exit code 0, 1 restarts so far"),
    (
        pod(state=RUNNING, lastState=ended(1), started=True),
        "Loading",
        "t0 runs, but is not ready",
    ),
    (pod(state=RUNNING, lastState={}), "Loading", "t0 loads"),
    (pod(state=waiting("ContainerCreating")), "Loading", "t0 is being created"),
    (mounting(seconds=9), "Loading", "t0 is being created"),
    (mounting(seconds=61, is_mounted=True), "Loading", "t0 is being created"),
    (
        mounting(),
        "Loading",
        "t0 has no sandbox after 10 s: a volume is missing or not attached, or the "
        "network is not ready; see kubectl describe pod t0",
    ),
]


@pytest.mark.parametrize(("found", "reason", "words"), CASES)
def test_each_trouble_has_its_reason_and_its_message(
    found: Object, reason: str, words: str
) -> None:
    diagnosis = diagnosed(found)
    assert diagnosis.reason == reason
    assert diagnosis.message.endswith(words)


STOPPED = json.dumps({"level": "info", "event": "stopped", "code": 1})
STACK = 'File "x.py", line 3\nRuntimeError: mkldnn: no avx512bw'
CRASHED = json.dumps({"level": "error", "event": "thread_crashed", "stack": STACK})
FAILED = json.dumps({"level": "error", "event": "failed", "error": "CacheError", "message": "full"})
TERMINATION_MESSAGES = [
    ("RuntimeError: no avx512bw (ssd/engine/linear.py:44)", None),
    (f"{FAILED}\n{STOPPED}", "CacheError: full"),
    (f"{CRASHED}\n{STOPPED}\n", "RuntimeError: mkldnn: no avx512bw"),
    (f"{STACK}\n{STOPPED}", "RuntimeError: mkldnn: no avx512bw"),
    (STOPPED, ""),
    (f"{CRASHED[9:]}\n{STOPPED}", ""),
    (f"{STOPPED}\n{CRASHED[:40]}", ""),
    ("KeyError: {'a': 1}", None),
    (f"{STOPPED}\nno field {{name}}", "no field {name}"),
    ("", ""),
]
"""Termination messages, and the quotation of each; None for the whole message."""


@pytest.mark.parametrize(("left", "quoted"), TERMINATION_MESSAGES)
def test_a_crash_quotes_the_error_and_no_other_line_of_the_log(
    left: str, quoted: str | None
) -> None:
    words = left if quoted is None else quoted
    suffix = f": {words}" if words else ""
    expected = f"t0 ended with exit code 1, 4 restarts so far{suffix}"
    assert diagnosed(crashed(1, left)) == Diagnosis(PodReason.CRASH_LOOP, expected)


@pytest.mark.parametrize("code", [137, 143])
@pytest.mark.parametrize(
    ("left", "quoted"),
    [
        (f"{STOPPED[30:]}\n{STOPPED}", ""),
        (STOPPED[30:], ""),
        (FAILED, ""),
        ('slow: 12 ms", "code": 1}', ""),
        ("INFO 11-24 12:00:01 [loggers.py:273] Engine 000: Running: 1 reqs\nINFO: GET /health", ""),
        ("RankError: 1 is gone (ssd/engine/x.py:4)", ": RankError: 1 is gone (ssd/engine/x.py:4)"),
    ],
)
def test_a_process_that_was_killed_quotes_its_termination_log_and_no_line_of_its_log(
    code: int, left: str, quoted: str
) -> None:
    expected = f"t0 ended with exit code {code}, 4 restarts so far{quoted}"
    assert diagnosed(crashed(code, left)).message == expected


def test_a_long_error_is_cut_before_its_file_and_line() -> None:
    message = diagnosed(crashed(1, f"RuntimeError: {'x' * 1000} (ssd/engine/linear.py:44)")).message
    assert "RuntimeError: xxx" in message
    assert message.endswith("x (ssd/engine/linear.py:44)")
    assert len(message) < 500


@pytest.mark.parametrize(("seconds", "is_too_slow"), [(624, True), (626, False)])
def test_a_startup_timeout_includes_the_grace(seconds: float, *, is_too_slow: bool) -> None:
    found = restarted(137, seconds)
    probe = {"startupProbe": {"terminationGracePeriodSeconds": 10}}
    found["spec"] |= {"terminationGracePeriodSeconds": 330, "containers": [probe]}
    assert (diagnosed(found).reason is PodReason.STARTUP_TIMEOUT) is is_too_slow


def test_a_ready_pod_has_no_diagnosis_and_a_deleted_one_is_draining() -> None:
    ready = pod(state=RUNNING)
    ready["status"]["conditions"][0]["status"] = "True"
    assert diagnose(ready, 600, NOW) is None
    ready["metadata"]["deletionTimestamp"] = to_text(NOW)
    assert diagnose(ready, 600, NOW) == Diagnosis(PodReason.DRAINING, "t0 is being deleted")


def test_a_pod_that_admission_refused_is_reported_with_its_error() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": 'violates "restricted"'}
    assert diagnose_absence({"status": {"conditions": [failure]}}, "cell 0") == Diagnosis(
        PodReason.POD_FORBIDDEN, 'cell 0 has no pod: violates "restricted"'
    )
    assert diagnose_absence({"status": {}}, "cell 0") is None
    assert diagnose_absence(None, "cell 0") is None


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (
            {"reason": "Evicted", "message": "The node was low on memory. "},
            "Evicted: The node was low",
        ),
        ({"reason": "Terminated"}, "Terminated"),
        ({}, "Kubernetes gives no reason"),
    ],
)
def test_a_pod_that_has_failed_is_reported_with_its_reason(status: Object, cause: str) -> None:
    found = diagnose_failed({"status": {"phase": "Failed", **status}}, "cell 0")
    assert found.reason is PodReason.POD_FAILED
    assert found.message.startswith(f"the newest pod of cell 0 failed: {cause}")
    assert not found.message.endswith(".")


def test_a_trouble_that_needs_action_is_worse_than_one_that_passes() -> None:
    loading, crash = Diagnosis(PodReason.LOADING, "a"), Diagnosis(PodReason.CRASH_LOOP, "b")
    assert worst([loading, crash]) == crash
    assert worst([]) is None
