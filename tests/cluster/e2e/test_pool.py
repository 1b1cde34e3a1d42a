"""Drafts that the targets of two resources share."""

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from tests.cluster.kube import CHART, Kube, all_of, eventually
from tests.cluster.load import NUM_CLIENTS, Load, Texts, always_speculate, plain_texts

from ssd_operator.children.manifests import LINK_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

SAMPLE = CHART / "samples" / "pool" / "demo-cpu.yaml"
NAMES = ("chat", "code")


@pytest.fixture
def shared(kube: Kube) -> Iterator[Kube]:
    """The sample: a pool of two drafts, and two resources that refer to it, with unequal weights.

    A draft has room for the clients of one load, so that two loads need more than one.
    """
    pool, *resources = yaml.safe_load_all(SAMPLE.read_text())
    pool["spec"]["sequencesPerReplica"] = NUM_CLIENTS
    quantised = next(each for each in resources if each["metadata"]["name"] == "code")
    quantised["spec"]["target"]["weights"] = "Int8"
    kube.apply(all_of([pool, *resources]))
    yield kube
    kube("delete", "ssd", *NAMES, "--ignore-not-found")
    kube("delete", "ssddp", "shared", "--ignore-not-found")


@pytest.fixture(scope="module")
def texts(expected: Texts) -> Mapping[str, Texts]:
    """Texts of each target without drafts."""
    quantised = plain_texts("--weights", "int8")
    assert quantised != expected
    return {"chat": expected, "code": quantised}


def status(kube: Kube) -> dict[str, object]:
    found: dict[str, object] = kube.get("ssddp", "shared").get("status", {})
    return found


def wait_linked(kube: Kube, num_drafts: int, timeout: float = 150) -> float:
    """Wait until each target has a link to each of this number of drafts; returns the seconds.

    A draft that starts beside two loads on two busy CPUs was ready after two minutes.
    """

    def is_so() -> bool:
        pods = {each["metadata"]["name"] for each in kube.pods("shared-pool", "draft")}
        return len(pods) == num_drafts and all(kube.linked(name) == pods for name in NAMES)

    return eventually(is_so, f"{num_drafts} drafts of the pool are linked", timeout)


def wait_each_linked(kube: Kube) -> None:
    """Wait until each target has a link: on a busy node a link can be lost for a moment."""
    eventually(lambda: all(kube.linked(name) for name in NAMES), "each target has a link", 60)


def hit_rates(kube: Kube) -> list[float]:
    found = (kube.get("ssd", name)["status"]["speculation"] for name in NAMES)
    return [float(each.get("hitRate", 0)) for each in found]


def change(kube: Kube, **spec: object) -> None:
    kube("patch", "ssddp", "shared", "--type=merge", "-p", json.dumps({"spec": spec}))


def wait_progress(kube: Kube, reason: str, timeout: float = 180) -> float:
    """Wait for a reason of the condition Progressing of the pool; returns the seconds."""

    def is_so() -> bool:
        found: Any = status(kube)["conditions"]
        return any((each["type"], each["reason"]) == ("Progressing", reason) for each in found)

    return eventually(is_so, f"Progressing of the pool is {reason}", timeout)


def test_no_change_of_a_pool_takes_the_last_draft_of_a_target(
    shared: Kube, texts: Mapping[str, Texts], figures: dict[str, object]
) -> None:
    kube = shared
    for name in NAMES:
        kube.wait_ready(name)
    wait_linked(kube, 2)
    kube.wait("ssddp/shared", "jsonpath={.status.target.summary}=2/2")
    chat, code = (Load(kube.endpoint(name), texts[name]) for name in NAMES)
    with chat, code:
        before = kube.uids("shared-pool", "draft")
        change(kube, speculation={"lookahead": 4})
        figures["a change of a pool that fits no target stopped, s"] = round(
            wait_progress(kube, "DraftsRefused"), 1
        )
        # Longer than the time after which the next draft would be replaced.
        threading.Event().wait(2 * LINK_SECONDS)
        assert len(before & kube.uids("shared-pool", "draft")) == 1
        wait_each_linked(kube)
        change(kube, speculation={"lookahead": 6})
        wait_linked(kube, 2)
        before = kube.uids("shared-pool", "draft")
        no_model = {"uri": "hf://nobody/none", "revision": "0" * 40}
        change(kube, source=no_model)
        wait_progress(kube, "RollingOut")
        threading.Event().wait(2 * LINK_SECONDS)
        assert len(before & kube.uids("shared-pool", "draft")) == 1
        wait_each_linked(kube)
        change(kube, source={"uri": "demo://draft", "revision": None})
        wait_linked(kube, 2)
        wait_progress(kube, "UpToDate")
        for load in (chat, code):
            load.go_on(4)
    for load in (chat, code):
        load.assert_undisturbed()


def test_two_resources_share_a_pool_which_scales_and_which_neither_depends_on(
    shared: Kube, texts: Mapping[str, Texts], figures: dict[str, object]
) -> None:
    kube = shared
    for name in NAMES:
        kube.wait_ready(name)
    figures["pool of 2 drafts linked to 2 targets, s"] = round(wait_linked(kube, 2), 1)
    kube.wait("ssddp/shared", "condition=Ready")
    assert not any(kube.pods(name, "draft") for name in NAMES), "they have no drafts of their own"
    chat, code = (Load(kube.endpoint(name), texts[name]) for name in NAMES)
    for name in NAMES:
        always_speculate(kube.endpoint(name))
    with chat, code:
        eventually(lambda: min(hit_rates(kube)) > 0, "both have hits", 180)
        eventually(lambda: status(kube)["deployments"] == list(NAMES), "the pool lists both")
        eventually(lambda: bool(status(kube)["sessions"]["open"]), "the pool has sessions", 90)  # type: ignore[index]
        figures["hit rates of two targets of a pool"] = hit_rates(kube)
        kube("scale", "ssddp/shared", "--replicas=1")
        figures["pool scaled down to 1 draft, s"] = round(wait_linked(kube, 1), 1)
        for load in (chat, code):
            load.go_on(4)
        change(kube, autoscaling={"mode": "Internal", "minReplicas": 1, "maxReplicas": 2})
        figures["pool scaled up by the need of two targets, s"] = round(wait_linked(kube, 2), 1)
        kube("delete", "ssddp", "shared")
        for name in NAMES:
            kube.wait_for(name, "DraftReady", "False", "PoolMissing")
            kube.wait_for(name, "SpeculationActive", "False")
            kube.wait_for(name, "Ready", "True")
        for load in (chat, code):
            load.go_on(8)
        kube.apply(next(yaml.safe_load_all(SAMPLE.read_text())))
        figures["pool created again, linked to 2 targets, s"] = round(wait_linked(kube, 2), 1)
        for name in NAMES:
            kube.wait_for(name, "SpeculationActive", "True", "Active")
    for load in (chat, code):
        load.assert_undisturbed()
