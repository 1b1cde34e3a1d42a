"""Disturbances under load: no request fails and no text changes, unless a test states otherwise."""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
from tests.cluster.kube import Kube, Object, Release, eventually, process_of, sample
from tests.cluster.load import JOBS, Job, Load, always_speculate, attempt

from ssd.errors import NotReadyError
from ssd.rpc.client import TargetClient
from ssd.rpc.pool_codec import LinkStatus
from ssd.types import Mode
from ssd_operator.status.condition_rules import HOLD_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
Figures = dict[str, object]
FULL = pytest.mark.slow


def test_from_apply_to_the_first_token(kube: Kube, figures: Figures) -> None:
    async def has_answered() -> bool:
        async with TargetClient(kube.endpoint("first")) as client:
            return bool((await attempt(client, JOBS[0], Mode.SPECULATIVE)).tokens)

    started = time.monotonic()
    with kube.applied(sample("first", drafts=2)):
        eventually(lambda: asyncio.run(has_answered()), "a text is complete", 120)
        figures["apply to first token, s"] = round(time.monotonic() - started, 1)
        kube.wait_linked("first", 2)
        figures["apply to two linked drafts, s"] = round(time.monotonic() - started, 1)


def test_a_client_in_the_cluster_gets_the_text_of_plain_decoding(
    demo: str, expected: Mapping[Job, Sequence[int]], in_cluster: Callable[..., str]
) -> None:
    for job, tokens in list(expected.items())[:3]:
        prompt, temperature, seed = job
        output = in_cluster(
            *("ssd", "generate", prompt, "--endpoint", f"{demo}.default.svc:50051", "--json"),
            *("--temperature", str(temperature), "--seed", str(seed)),
            *("--max-tokens", str(len(tokens))),
        )
        answer = json.loads(output)
        found = answer["token_ids"]
        assert found == list(tokens[: len(found)])
        assert answer["finish_reason"] == "stop" or len(found) == len(tokens)


@pytest.mark.parametrize("rounds", [1, pytest.param(9, marks=FULL)])
def test_scaling_under_load_fails_no_request(
    kube: Kube, demo: str, load: Load, figures: Figures, rounds: int
) -> None:
    ups, downs = [], []
    for _ in range(rounds):
        kube("scale", f"ssd/{demo}", "--replicas=3")
        ups.append(kube.wait_linked(demo, 3))
        load.go_on(8)
        # A draft that is not ready for a moment is removed first, and without a drain.
        eventually(lambda: kube.num_ready(demo, "draft") == 3, "all drafts are ready", 120)
        before = kube.linked(demo)
        kube("scale", f"ssd/{demo}", "--replicas=1")
        downs.append(kube.wait_linked(demo, 1))
        load.go_on(8)
        events = kube.items("events", "--field-selector", "reason=DraftDrained")
        drained = {each["message"].split()[0].rstrip(":") for each in events}
        assert before - kube.linked(demo) <= drained, "a draft was removed with its sessions"
    figures[f"scale 1 to 3, linked, s (worst of {rounds})"] = round(max(ups), 1)
    figures[f"scale 3 to 1, pods gone, s (worst of {rounds})"] = round(max(downs), 1)
    load.assert_undisturbed()


def test_scaling_to_zero_and_back_fails_no_request(kube: Kube, demo: str, load: Load) -> None:
    kube("scale", f"ssd/{demo}", "--replicas=0")
    kube.wait_linked(demo, 0)
    assert kube.has(demo, "SpeculationActive", "False", "NoDrafts")
    load.go_on(8)
    kube("scale", f"ssd/{demo}", "--replicas=1")
    kube.wait_linked(demo, 1)
    kube.wait_for(demo, "SpeculationActive", "True", timeout=30)
    load.assert_undisturbed()


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=FULL)])
def test_a_killed_draft_fails_no_request_and_is_linked_again(
    kube: Kube, demo: str, load: Load, figures: Figures, rounds: int
) -> None:
    for number in range(rounds):
        kube.wait_linked(demo, 1)
        (pod,) = kube.pods(demo, "draft")
        (before,) = links_of(kube, demo)
        os.kill(process_of(pod), signal.SIGKILL)
        back = wait_restarted(kube, pod, number + 1)
        load.go_on(8)
        linked = eventually(partial(is_linked_again, kube, demo, before), "it is linked again", 120)
        kube.wait_for(demo, "SpeculationActive", "True")
        figures[f"draft killed {number + 1} times: linked again, s"] = round(back + linked, 1)
    load.assert_undisturbed()


@pytest.mark.parametrize("rounds", [1, pytest.param(17, marks=FULL)])
def test_a_draft_pod_deleted_by_force_fails_no_request(
    kube: Kube, demo: str, load: Load, figures: Figures, rounds: int
) -> None:
    seconds = []
    for _ in range(rounds):
        kube.wait_linked(demo, 1)
        (pod,) = kube.pods(demo, "draft")
        kube("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0")
        seconds.append(kube.wait_linked(demo, 1))
        load.go_on(4)
    figures[f"draft pod deleted: linked again, s (worst of {rounds})"] = round(max(seconds), 1)
    load.assert_undisturbed()


def test_pods_link_by_gloo_and_a_killed_draft_links_again(
    kube: Kube, expected: Mapping[Job, Sequence[int]]
) -> None:
    document = sample("collective", drafts=1)
    document["spec"]["transport"] = {"channel": "Collective"}
    with kube.applied(document) as name:
        kube.wait_ready(name)
        kube.wait_linked(name, 1)
        (before,) = links_of(kube, name)
        assert (before.channel, before.transport) == ("collective", "tcp"), before.channel_reason
        assert before.channel_bytes_per_second > 0.0
        (shown,) = kube.get("ssd", name)["status"]["links"]
        assert (shown["channel"], shown["transport"]) == ("Collective", "TCP")
        # With gRPC too, texts are those of plain decoding.
        with Load(kube.endpoint(name), expected) as load:
            load.go_on(8)
            (pod,) = kube.pods(name, "draft")
            os.kill(process_of(pod), signal.SIGKILL)
            wait_restarted(kube, pod, 1)
            eventually(lambda: is_linked_again(kube, name, before), "it is linked again", 180)
            load.go_on(8)
            # The first tables of a process can be late for more texts than these.
            always_speculate(kube.endpoint(name))
            eventually(lambda: any(each.hits for each in links_of(kube, name)), "a hit")
            load.assert_undisturbed()
        eventually(lambda: is_linked_again(kube, name, before), "it is still linked")
        (after,) = links_of(kube, name)
        assert (after.channel, after.transport) == ("collective", "tcp"), after.channel_reason


def is_linked_again(kube: Kube, name: str, before: LinkStatus) -> bool:
    """Whether the only draft has an active link, newer than the one before."""
    # A draft that restarts is absent.
    return any(
        link.state == "active" and link.epoch > before.epoch for link in links_of(kube, name)
    )


def links_of(kube: Kube, name: str) -> Sequence[LinkStatus]:
    """The links of a target."""

    async def read() -> Sequence[LinkStatus]:
        async with TargetClient(kube.endpoint(name)) as client:
            return (await client.pool_status()).links

    return asyncio.run(read())


def test_a_killed_target_fails_only_its_open_streams_and_repeats_give_the_same_text(
    kube: Kube, demo: str, load: Load, figures: Figures
) -> None:
    load.go_on(4)
    (pod,) = kube.pods(demo, "target")
    os.kill(process_of(pod), signal.SIGKILL)
    started = time.monotonic()
    kube.wait_for(demo, "Ready", "False", timeout=30)
    kube.wait_for(demo, "Ready", "True", timeout=90)
    figures["target killed: Ready again, s"] = round(time.monotonic() - started, 1)
    load.go_on(16)
    failures = load.counts.failures
    assert failures, "no stream was open"
    assert all(isinstance(each, NotReadyError) for each in failures), failures
    assert not load.counts.different
    figures["target killed: streams cut, calls that failed meanwhile"] = (
        load.counts.num_cut,
        len(failures) - load.counts.num_cut,
    )


@pytest.mark.parametrize("component", ["target", pytest.param("draft", marks=FULL)])
def test_a_hung_process_is_restarted_without_the_time_to_drain(
    kube: Kube, demo: str, figures: Figures, component: str
) -> None:
    kube.wait_linked(demo, 1)
    (pod,) = kube.pods(demo, component)
    times = sum(each["restartCount"] for each in pod["status"]["containerStatuses"]) + 1
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    os.kill(process_of(pod), signal.SIGSTOP)
    seconds = wait_restarted(kube, pod, times, timeout=45)
    assert seconds < grace
    figures[f"{component} stopped (SIGSTOP), pod's grace {grace} s: restarted, s"] = round(seconds)
    kube.wait_for(demo, "Ready", "True", timeout=90)
    kube.wait_for(demo, "SpeculationActive", "True")


def test_a_draft_that_stalls_for_seconds_causes_no_warning(kube: Kube, demo: str) -> None:
    kube.wait_linked(demo, 1)
    kube.wait_for(demo, "SpeculationActive", "True", timeout=30)
    (pod,) = kube.pods(demo, "draft")
    process, num_short = process_of(pod), 0
    for _ in range(4):
        before = speculation_changes(kube, demo)
        started = time.monotonic()
        os.kill(process, signal.SIGSTOP)
        try:
            eventually(lambda: kube.linked(demo) == set(), "the link is lost", 15)
        finally:
            os.kill(process, signal.SIGCONT)
        kube.wait_linked(demo, 1, timeout=25)
        is_short = time.monotonic() - started < HOLD_SECONDS["SpeculationActive"]
        kube.wait_for(demo, "SpeculationActive", "True")
        if is_short:
            num_short += 1
            assert speculation_changes(kube, demo) == before
    assert num_short, "each loss was long enough for a warning"


def speculation_changes(kube: Kube, name: str) -> tuple[str, int]:
    """The condition with its last transition, and the number of Events about its loss."""
    condition = kube.condition(name, "SpeculationActive")
    found = kube.items("events", "--field-selector", "reason=SpeculationOff")
    events = [each for each in found if each["involvedObject"]["name"] == name]
    return f"{condition['status']} {condition['lastTransitionTime']}", len(events)


@pytest.mark.parametrize("rounds", [1, pytest.param(19, marks=FULL)])
def test_a_killed_operator_continues_a_scale_down(
    kube: Kube, demo: str, load: Load, release: Release, figures: Figures, rounds: int
) -> None:
    dice = random.Random(7)
    seconds = []
    for number in range(rounds):
        replicas = 2 if number % 2 == 0 else 1
        kube("scale", f"ssd/{demo}", f"--replicas={replicas}")
        threading.Event().wait(dice.uniform(0, 3))
        pod = release.operator()["metadata"]
        kube("delete", "pod", pod["name"], "-n", pod["namespace"], "--force", "--grace-period=0")
        seconds.append(kube.wait_linked(demo, replicas))
    kube("scale", f"ssd/{demo}", "--replicas=1")
    kube.wait_linked(demo, 1)
    figures[f"operator killed: converged, s (worst of {rounds})"] = round(max(seconds), 1)
    load.assert_undisturbed()


def test_two_cells_roll_one_at_a_time_and_retries_hide_it_from_clients(
    kube: Kube, expected: Mapping[Job, Sequence[int]], figures: Figures
) -> None:
    document = sample("cells", drafts=2, replicas=2)
    for part in ("target", "draft"):  # two cells beside the demo request more than two cores
        document["spec"][part]["resources"] = {"requests": {"cpu": "100m"}}
    with kube.applied(document):
        kube.wait_ready("cells")
        eventually(lambda: num_started(kube, "cells") == 2, "both cells serve", 90)
        with Load(kube.endpoint("cells"), expected, retries=True) as load:
            document["spec"]["target"]["drainSeconds"] = 299
            started = time.monotonic()
            kube.apply(document)
            least = 2

            def is_rolled() -> bool:
                nonlocal least
                least = min(least, num_started(kube, "cells"))
                found = kube.get("ssd", "cells")
                target, seen = found["status"]["target"], found["status"]["observedGeneration"]
                is_seen = seen == found["metadata"]["generation"]
                return bool(is_seen and target["updatedReplicas"] == target["readyReplicas"] == 2)

            eventually(is_rolled, "both cells rolled", 180)
            figures["two cells rolled, s"] = round(time.monotonic() - started, 1)
            load.go_on(8)
        assert least == 1, "both cells were down at the same time, or none at any time"
        load.assert_undisturbed()


def num_started(kube: Kube, name: str) -> int:
    """Number of targets that have loaded: a busy one is unready for a moment, and stays started."""
    return sum(
        bool(each.get("started"))
        for pod in kube.pods(name, "target")
        for each in pod["status"].get("containerStatuses", ())
    )


def wait_restarted(kube: Kube, pod: Object, times: int, timeout: float = 120) -> float:
    def is_so() -> bool:
        status = kube.get("pod", pod["metadata"]["name"])["status"]
        return bool(sum(each["restartCount"] for each in status["containerStatuses"]) >= times)

    return eventually(is_so, f"the kubelet has restarted it {times} times", timeout)
