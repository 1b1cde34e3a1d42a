"""Why a pod is not ready: one word and one sentence, in the words of whoever knows. Pure."""

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ssd_operator.api.spec import Object
from ssd_operator.children.names import FETCH
from ssd_operator.observe.pod_state import (
    condition_of,
    is_leaving,
    is_ready,
    is_scheduled,
    is_unschedulable,
    name_of,
    to_seconds,
)

CREATING_SECONDS = 60.0
"""A container that is created for longer waits for something that may not exist."""
PROBE_SLACK_SECONDS = 15.0
"""By which the kubelet may be late to notice a failed probe and to kill."""
LONGEST_WORDS = 400
"""Characters quoted of what others say."""


class Trouble(StrEnum):
    """Reasons of TargetReady and DraftReady, the ones to be told first on top."""

    CONFIGURATION_ERROR = "ConfigurationError"
    NO_DEVICE = "NoDevice"
    IMAGE_PULL = "ImagePull"
    POD_FORBIDDEN = "PodForbidden"
    CRASH_LOOP = "CrashLoop"
    STARTUP_TIMEOUT = "StartupTimeout"
    UNSCHEDULABLE = "Unschedulable"
    ROLLING_OUT = "RollingOut"
    FETCHING_MODEL = "FetchingModel"
    LOADING = "Loading"
    DRAINING = "Draining"
    SCALING = "Scaling"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with one pod."""

    trouble: Trouble
    message: str


_NO_PROCESS = re.compile(r"No module named '?(ssd_(?:target|draft))")
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
_PLACE = re.compile(r" \([\w./-]+:\d+\)$")
"""Where an engine's error was raised, at the end of its line."""
_CUT_STACK = '"}'
"""End of a log line in JSON; the kubelet cuts the beginning of one whose stack is long."""
_NO_DEVICE = re.compile(r"device .* cannot be used here")
"""What an engine says (``SettingsError``) when it does not find the device it was given."""


def worst(diagnoses: Iterable[Diagnosis]) -> Diagnosis | None:
    """The one to tell first; among equals the first."""
    order = list(Trouble)
    return min(diagnoses, key=lambda found: order.index(found.trouble), default=None)


def diagnose(pod: Object, startup_timeout_seconds: int, now: float) -> Diagnosis | None:
    """Say why a pod is not ready; None if it is.

    Args:
        pod: of an engine.
        startup_timeout_seconds: the kubelet kills one that takes longer to load.
        now: seconds since the epoch.
    """
    if is_ready(pod):
        return None
    name = name_of(pod)
    if is_leaving(pod):
        return Diagnosis(Trouble.DRAINING, f"{name} is leaving")
    if not is_scheduled(pod):
        return _unscheduled(pod)
    status = pod.get("status", {})
    for container in status.get("initContainerStatuses") or ():
        # Nobody times these: of them only an end says something.
        found = _stopped(pod, container, math.inf) or _fetching(name, container)
        if found is not None:
            return found
    for container in status.get("containerStatuses") or ():
        found = _stopped(pod, container, startup_timeout_seconds)
        if found is not None:
            return found
    return Diagnosis(Trouble.LOADING, f"{name} {_progress(pod, now)}")


def diagnose_absence(deployment: Object | None, what: str) -> Diagnosis | None:
    """Say why a Deployment has no pod, if the API server refused one; else None."""
    failure = condition_of(deployment or {}, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    return Diagnosis(
        Trouble.POD_FORBIDDEN, f"{what} has no pod: {_words(failure.get('message', ''))}"
    )


def _unscheduled(pod: Object) -> Diagnosis:
    if is_unschedulable(pod):
        words = _words(condition_of(pod, "PodScheduled").get("message", ""))
        return Diagnosis(Trouble.UNSCHEDULABLE, f"{name_of(pod)}: {words}")
    return Diagnosis(Trouble.LOADING, f"{name_of(pod)} waits for a node")


def _fetching(name: str, container: Object) -> Diagnosis | None:
    """Whether a container fetches the model at the moment, which may take an hour."""
    if container.get("name") != FETCH or not (container.get("state") or {}).get("running"):
        return None
    ended = (container.get("lastState") or {}).get("terminated")
    if ended:
        words = f"{name} fetches its model again; it {_crash(container, ended)}"
        return Diagnosis(Trouble.CRASH_LOOP, words)
    return Diagnosis(Trouble.FETCHING_MODEL, f"{name} fetches its model")


def _stopped(pod: Object, container: Object, startup_timeout_seconds: float) -> Diagnosis | None:
    """What keeps a container from running; None if nothing does."""
    name = name_of(pod)
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    waits_for, words = waiting.get("reason", ""), _words(waiting.get("message", ""))
    if waits_for in _PULL:
        cause = _BACK_OFF.sub("", words) or "the registry refused, or was not reached"
        return Diagnosis(
            Trouble.IMAGE_PULL,
            f"{name} cannot pull {container.get('image', 'its image')}: {cause}",
        )
    if waits_for in _CONFIGURATION:
        return Diagnosis(Trouble.CONFIGURATION_ERROR, f"{name} cannot start: {words or waits_for}")
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    exit_code = ended.get("exitCode", 0)
    if exit_code == os.EX_CONFIG:
        return _misconfigured(name, _last_words(ended))
    if exit_code and (module := _NO_PROCESS.search(_last_words(ended))):
        image = container.get("image", "its image")
        return Diagnosis(
            Trouble.CONFIGURATION_ERROR,
            f"{name}: {image} has no {module[1]}; is it the image of another process?",
        )
    if _was_too_slow(container, ended, startup_timeout_seconds, _startup_grace(pod)):
        return Diagnosis(
            Trouble.STARTUP_TIMEOUT,
            f"{name} was not up after {startup_timeout_seconds} s and was restarted; "
            "raise startupTimeoutSeconds or use a modelCache that keeps the weights",
        )
    is_down = waits_for == "CrashLoopBackOff" or (exit_code and "terminated" in state)
    return Diagnosis(Trouble.CRASH_LOOP, f"{name} {_crash(container, ended)}") if is_down else None


def _misconfigured(name: str, words: str) -> Diagnosis:
    trouble = Trouble.NO_DEVICE if _NO_DEVICE.search(words) else Trouble.CONFIGURATION_ERROR
    return Diagnosis(trouble, f"{name}: {words or 'it refused its settings (exit code 78)'}")


def _startup_grace(pod: Object) -> int:
    """Seconds that the kubelet leaves to a container whose startup probe has failed."""
    grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
    engine: Object = next(iter(pod["spec"].get("containers") or ()), {})
    return int((engine.get("startupProbe") or {}).get("terminationGracePeriodSeconds", grace))


def _was_too_slow(
    container: Object, ended: Object, startup_timeout_seconds: float, grace_seconds: int
) -> bool:
    """Whether the last run was killed by the startup probe, which leaves a trace in its times only.

    A run that lasted longer than the kubelet lets one load did serve, and ended of something else.
    """
    began, end = to_seconds(ended.get("startedAt")), to_seconds(ended.get("finishedAt"))
    if began is None or end is None or container.get("started"):
        return False
    longest = startup_timeout_seconds + grace_seconds + PROBE_SLACK_SECONDS
    return startup_timeout_seconds <= end - began <= longest


def _crash(container: Object, ended: Object) -> str:
    cause = "was killed for memory" if ended.get("reason") == "OOMKilled" else _exit(ended)
    words = _last_words(ended)
    said = f": {words}" if words else ""
    return f"{cause}, {container.get('restartCount', 0)} restarts so far{said}"


def _exit(ended: Object) -> str:
    return f"ended with exit code {ended.get('exitCode', 'unknown')}"


def _progress(pod: Object, now: float) -> str:
    """How far a pod has come that nothing keeps from starting."""
    containers = pod.get("status", {}).get("containerStatuses") or ()
    for container in containers:
        if (container.get("state") or {}).get("running"):
            ended = (container.get("lastState") or {}).get("terminated")
            return "loads" if not ended else f"loads again; it {_crash(container, ended)}"
    since = to_seconds(condition_of(pod, "PodScheduled").get("lastTransitionTime"))
    if since is not None and now - since > CREATING_SECONDS:
        return (
            f"is created for more than {CREATING_SECONDS:.0f} s: "
            "the Secret, ConfigMap or claim of a volume may be missing"
        )
    return "is created"


def _last_words(ended: Object) -> str:
    """Why a container ended, as far as it left word of that; else empty.

    An engine writes one line, ``Type: message (file:line)``. Of one that could not, the kubelet
    gives the end of the log instead, of which only an error is worth quoting.
    """
    lines = [line.strip() for line in str(ended.get("message") or "").splitlines()]
    causes = (_cause(line) for line in reversed(lines))
    text = " ".join(next((cause for cause in causes if cause), "").split())
    found = _PLACE.search(text)
    place = found[0] if found else ""
    return _words(text[: LONGEST_WORDS - len(place)].removesuffix(place)) + place


def _cause(line: str) -> str:
    """The error in a line of a log; empty if it has none."""
    if line.endswith(_CUT_STACK) and not line.startswith("{"):
        return line.removesuffix(_CUT_STACK).rpartition(r"\n")[2]
    event = _parsed(line)
    if event is None:
        return line
    if "error" in event and "message" in event:
        return f"{event['error']}: {event['message']}"
    return str(event.get("stack") or event.get("error") or "").rpartition("\n")[2]


def _parsed(line: str) -> Object | None:
    """A log line in JSON; None for any other text."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _words(text: object) -> str:
    """Others' words, to be put into a sentence of ours: that one ends with a full stop."""
    return " ".join(str(text).split())[:LONGEST_WORDS].rstrip(".")
