"""Why a pod is not ready: a reason and a sentence that quotes the source of the error. Pure."""

import json
import math
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from ssd_operator.api.spec import Object
from ssd_operator.children.objects import FETCH
from ssd_operator.observe.pod_state import (
    condition_of,
    is_ready,
    is_scheduled,
    is_terminating,
    is_unschedulable,
    name_of,
    to_seconds,
)

MOUNTING_SECONDS = 10.0
"""A pod without a sandbox for longer may wait for an object that does not exist."""
PROBE_SLACK_SECONDS = 15.0
"""How late the kubelet may be with a probe and the kill after it."""
LONGEST_QUOTE = 400
"""Maximum length of a quotation, in characters."""


class PodReason(StrEnum):
    """Reasons of TargetReady and DraftReady, the most important first."""

    CONFIGURATION_ERROR = "ConfigurationError"
    NO_DEVICE = "NoDevice"
    IMAGE_PULL = "ImagePull"
    POD_FORBIDDEN = "PodForbidden"
    CRASH_LOOP = "CrashLoop"
    POD_FAILED = "PodFailed"
    STARTUP_TIMEOUT = "StartupTimeout"
    UNSCHEDULABLE = "Unschedulable"
    ROLLING_OUT = "RollingOut"
    FETCHING_MODEL = "FetchingModel"
    LOADING = "Loading"
    DRAINING = "Draining"
    SCALING = "Scaling"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why one pod is not ready."""

    reason: PodReason
    message: str
    """Sentence without a full stop."""


_NO_PROCESS = re.compile(r"No module named '?(ssd_(?:target|draft|vllm|gateway))")
_PULL = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
_CONFIGURATION = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*"(: ErrImagePull: )?')
KILLED = frozenset({128 + signal.SIGKILL, 128 + signal.SIGTERM})
"""Exit codes of a process that another one has ended."""
_ENGINE_ERROR = re.compile(r"[A-Za-z_][\w.]*: .*")
_END_OF_EVENT = re.compile(r'.*("}|": .*})$')
"""End of a JSON event whose begin the kubelet has cut off."""
_PLACE = re.compile(r" \([\w./-]+:\d+\)$")
"""File and line at the end of an engine's error."""
_NO_DEVICE = re.compile(r"device .* cannot be used here")
"""Part of the ``SettingsError`` of an engine whose device is missing."""


def worst(diagnoses: Iterable[Diagnosis | None]) -> Diagnosis | None:
    """The most important one; among equals the first."""
    order = list(PodReason)
    present = (diagnosis for diagnosis in diagnoses if diagnosis is not None)
    return min(present, key=lambda diagnosis: order.index(diagnosis.reason), default=None)


def diagnose(pod: Object, startup_timeout_seconds: float, now: float) -> Diagnosis | None:
    """Return why a pod is not ready; None if it is."""
    if is_ready(pod):
        return None
    name = name_of(pod)
    if is_terminating(pod):
        return Diagnosis(PodReason.DRAINING, f"{name} is being deleted")
    if is_unschedulable(pod):
        message = _quote(condition_of(pod, "PodScheduled").get("message", ""))
        return Diagnosis(PodReason.UNSCHEDULABLE, f"{name}: {message}")
    if not is_scheduled(pod):
        return Diagnosis(PodReason.LOADING, f"{name} waits for a node")
    status = pod.get("status", {})
    # No probe limits the time of init containers: a long run is no timeout.
    inits = status.get("initContainerStatuses") or ()
    containers = status.get("containerStatuses") or ()
    diagnoses = [
        *(_stopped(pod, container, math.inf) or _fetching(name, container) for container in inits),
        *(_stopped(pod, container, startup_timeout_seconds) for container in containers),
    ]
    loading = Diagnosis(PodReason.LOADING, f"{name} {_progress(pod, now)}")
    return next((diagnosis for diagnosis in diagnoses if diagnosis is not None), loading)


def diagnose_failed(pod: Object, what: str) -> Diagnosis:
    """Return why a pod has failed for good: the kubelet has rejected or evicted it.

    The message has no name of a pod: each replacement may fail, and has another name.
    """
    status = pod["status"]
    cause = ": ".join(_quote(status[key]) for key in ("reason", "message") if status.get(key))
    cause = cause or "Kubernetes gives no reason"
    return Diagnosis(PodReason.POD_FAILED, f"the newest pod of {what} failed: {cause}")


def diagnose_absence(deployment: Object | None, what: str) -> Diagnosis | None:
    """Return why a Deployment has no pod if the API server refused it; None otherwise."""
    failure = condition_of(deployment or {}, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    cause = _quote(failure.get("message", ""))
    return Diagnosis(PodReason.POD_FORBIDDEN, f"{what} has no pod: {cause}")


def _fetching(name: str, container: Object) -> Diagnosis | None:
    """The diagnosis of a container that fetches the model; None for any other container."""
    if container.get("name") != FETCH or not (container.get("state") or {}).get("running"):
        return None
    return Diagnosis(PodReason.FETCHING_MODEL, f"{name} fetches its model")


def _stopped(pod: Object, container: Object, startup_timeout_seconds: float) -> Diagnosis | None:
    """Why a container does not run, or runs again after a crash; None if it runs or starts."""
    name, image = name_of(pod), container.get("image", "its image")
    state, last = container.get("state") or {}, container.get("lastState") or {}
    waiting = state.get("waiting") or {}
    waits_for, message = waiting.get("reason", ""), _quote(waiting.get("message", ""))
    if waits_for in _PULL:
        cause = _BACK_OFF.sub("", message) or "the registry refused or was not reached"
        return Diagnosis(PodReason.IMAGE_PULL, f"{name} cannot pull {image}: {cause}")
    misconfigured = partial(Diagnosis, PodReason.CONFIGURATION_ERROR)
    if waits_for in _CONFIGURATION:
        return misconfigured(f"{name} cannot start: {message or waits_for}")
    ended = state.get("terminated") or last.get("terminated") or {}
    exit_code, error = ended.get("exitCode", 0), _error_of(ended)
    if exit_code == os.EX_CONFIG:
        text = f"{name}: {error or 'it refused its settings (exit code 78)'}"
        has_no_device = _NO_DEVICE.search(error)
        return Diagnosis(PodReason.NO_DEVICE, text) if has_no_device else misconfigured(text)
    if exit_code and (module := _NO_PROCESS.search(error)):
        question = f"{image} has no {module[1]}; is it the image of another process?"
        return misconfigured(f"{name}: {question}")
    if _was_too_slow(pod, container, ended, startup_timeout_seconds):
        return Diagnosis(
            PodReason.STARTUP_TIMEOUT,
            f"{name} was not ready after {startup_timeout_seconds} s and was restarted; "
            "raise startupTimeoutSeconds or use a modelCache that keeps the weights",
        )
    is_crashed = exit_code or waits_for == "CrashLoopBackOff"
    return _crashed(name, container, ended) if is_crashed else None


def _crashed(name: str, container: Object, ended: Object) -> Diagnosis | None:
    """The diagnosis of a container whose last run has failed; None if it has loaded since."""
    crash = _crash(container, ended)
    if (container.get("state") or {}).get("running"):
        is_fetching = container.get("name") == FETCH
        if container.get("started") and not is_fetching:
            return None
        crash = f"{'fetches its model' if is_fetching else 'loads'} again; it {crash}"
    return Diagnosis(PodReason.CRASH_LOOP, f"{name} {crash}")


def _was_too_slow(pod: Object, container: Object, ended: Object, seconds: float) -> bool:
    """Whether the startup probe killed the last run, which only its times show.

    A longer run has served and ended for another reason.
    """
    began, end = to_seconds(ended.get("startedAt")), to_seconds(ended.get("finishedAt"))
    if began is None or end is None or container.get("started"):
        return False
    engine: Object = next(iter(pod["spec"].get("containers") or ()), {})
    grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
    grace = (engine.get("startupProbe") or {}).get("terminationGracePeriodSeconds", grace)
    return bool(seconds <= end - began <= seconds + grace + PROBE_SLACK_SECONDS)


def _crash(container: Object, ended: Object) -> str:
    exit_code = ended.get("exitCode", "unknown")
    is_killed = ended.get("reason") == "OOMKilled"
    cause = "was killed for memory" if is_killed else f"ended with exit code {exit_code}"
    error = _error_of(ended)
    suffix = f": {error}" if error else ""
    return f"{cause}, {container.get('restartCount', 0)} restarts so far{suffix}"


def _progress(pod: Object, now: float) -> str:
    """How far a starting pod is."""
    containers = pod.get("status", {}).get("containerStatuses") or ()
    for container in containers:
        if (container.get("state") or {}).get("running"):
            if container.get("started"):
                return "runs, but is not ready"
            ended = (container.get("lastState") or {}).get("terminated")
            return "loads" if not ended else f"loads again; it {_crash(container, ended)}"
    if now >= mounting_deadline(pod):
        return (
            f"has no sandbox after {MOUNTING_SECONDS:.0f} s: a volume is missing or not attached, "
            f"or the network is not ready; see kubectl describe pod {name_of(pod)}"
        )
    return "is being created"


def mounting_deadline(pod: Object) -> float:
    """When the sandbox of a pod takes too long, in seconds since the epoch; infinite if it has one.

    Only the kubelet's Events have the cause, and the operator reads no Events.
    """
    # The kubelet mounts all volumes, then makes the sandbox, then pulls images.
    is_waiting = condition_of(pod, "PodReadyToStartContainers").get("status") == "False"
    since = to_seconds(condition_of(pod, "PodScheduled").get("lastTransitionTime"))
    return since + MOUNTING_SECONDS if is_waiting and since is not None else math.inf


def _error_of(ended: Object) -> str:
    """The error in the termination message of a container; empty without one.

    An engine writes one line, ``Type: message (file:line)``. If it could not, the kubelet takes the
    end of the log instead, of which only an error is quoted. The log of a process that was killed
    has no error of its end.
    """
    lines = [line.strip() for line in str(ended.get("message") or "").splitlines()]
    is_written = len(lines) == 1 and _ENGINE_ERROR.match(lines[0]) and _error_in(lines[0])
    if ended.get("exitCode") in KILLED and not is_written:
        return ""
    text = next((error for line in reversed(lines) if (error := _error_in(line))), "")
    match = _PLACE.search(text)
    place = match[0] if match else ""
    return _quote(text.removesuffix(place), LONGEST_QUOTE - len(place)) + place


def _error_in(line: str) -> str:
    """The error in a line of a log; empty if it has none."""
    try:
        event = json.loads(line)
    except ValueError:
        # The kubelet cuts the log anywhere, also inside of an event.
        return "" if line.startswith("{") or _END_OF_EVENT.match(line) else line
    if not isinstance(event, dict):
        return line
    if "error" in event and "message" in event:
        return f"{event['error']}: {event['message']}"
    return str(event.get("stack") or event.get("error") or "").rpartition("\n")[2]


def _quote(text: object, longest: int = LONGEST_QUOTE) -> str:
    """A quotation on one line, without a full stop."""
    return " ".join(str(text).split())[:longest].rstrip(".")
