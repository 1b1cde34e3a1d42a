"""A change that cannot run replaces no pod; one that can rolls cell by cell."""

import json
import time
from collections.abc import Iterator

import pytest
from tests.cluster.kube import Kube, Object, eventually, sample
from tests.cluster.load import Load

from ssd import __version__

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
Figures = dict[str, object]
SMALL = {"requests": {"cpu": "20m", "memory": "64Mi"}}


def change(kube: Kube, name: str, **target: object) -> None:
    kube("patch", "ssd", name, "--type=merge", "-p", json.dumps({"spec": {"target": target}}))


def setting(name: str, value: str) -> Object:
    """A setting of the process as a variable, which the schema does not check."""
    return {"env": [{"name": f"SSD_TARGET_{name}", "value": value}]}


def uids(kube: Kube, name: str, component: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in kube.pods(name, component)}


def num_ready(kube: Kube, name: str, component: str) -> int:
    states = [
        each["status"]
        for pod in kube.pods(name, component)
        for each in pod["status"].get("conditions", [])
        if each["type"] == "Ready"
    ]
    return states.count("True")


def has_failed(kube: Kube, name: str, error: str) -> bool:
    found = kube.condition(name, "Progressing")
    return bool(found["reason"] == "PreflightFailed" and error in found["message"])


def is_settled(kube: Kube, name: str) -> bool:
    """Whether the newest spec is carried out and no preflight is left."""
    found = kube.get("ssd", name)
    conditions = {each["type"]: each for each in found["status"]["conditions"]}
    return bool(
        found["status"]["observedGeneration"] == found["metadata"]["generation"]
        and conditions["Progressing"]["reason"] == "UpToDate"
        and conditions["TargetReady"]["status"] == "True"
        and kube.pods(name, "preflight") == []
    )


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"image": "localhost/ssd-target:nope"}, "cannot pull localhost/ssd-target:nope"),
        ({"podTemplate": setting("MAX_QUEU", "7")}, "did you mean SSD_TARGET_MAX_QUEUE?"),
        ({"image": f"localhost/ssd-draft:{__version__}"}, "has no ssd_target"),
    ],
    ids=["image", "setting", "process"],
)
def test_a_change_that_cannot_run_causes_no_outage(
    kube: Kube, demo: str, load: Load, figures: Figures, bad: Object, error: str
) -> None:
    eventually(lambda: is_settled(kube, demo), "nothing is in progress")
    before = uids(kube, demo, "target")
    change(kube, demo, **bad)
    failed = eventually(
        lambda: has_failed(kube, demo, error), "the preflight fails with its error", 90
    )
    load.go_on(8)
    assert uids(kube, demo, "target") == before
    assert kube.condition(demo, "Ready")["status"] == "True"
    events = kube.items("events", "--field-selector", f"involvedObject.name={demo}")
    assert any(each["reason"] == "PreflightFailed" and error in each["message"] for each in events)
    change(kube, demo, **dict.fromkeys(bad))
    eventually(
        lambda: is_settled(kube, demo), "the change is reverted, its preflight is deleted", 30
    )
    assert uids(kube, demo, "target") == before
    load.assert_undisturbed()
    figures[f"{error}: reported, s"] = round(failed, 1)


def test_drafts_roll_after_their_target(kube: Kube, demo: str, figures: Figures) -> None:
    eventually(lambda: is_settled(kube, demo), "nothing is in progress")
    drafts = uids(kube, demo, "draft")
    change_pair(kube, demo, branches=16, image="localhost/ssd-target:nope")
    eventually(lambda: has_failed(kube, demo, "cannot pull"), "the preflight fails", 90)
    assert uids(kube, demo, "draft") == drafts
    assert kube.condition(demo, "SpeculationActive")["status"] == "True"
    old = uids(kube, demo, "target")
    off: list[float] = []

    def is_over() -> bool:
        if kube.condition(demo, "SpeculationActive")["status"] != "True":
            off.append(time.monotonic())
        if old & uids(kube, demo, "target"):
            assert uids(kube, demo, "draft") == drafts, "drafts rolled before their target"
        return is_settled(kube, demo) and not drafts & uids(kube, demo, "draft")

    change_pair(kube, demo, branches=16, image=None)
    seconds = eventually(is_over, "target and drafts are new", 120)
    eventually(lambda: kube.linked(demo) != set(), "they are linked", 30)
    figures["branches changed: all new, s"] = round(seconds, 1)
    figures["branches changed: speculation off, s"] = round(max(off) - min(off), 1) if off else 0
    kube("patch", "ssd", demo, "--type=merge", "-p", '{"spec":{"speculation":{"branches":null}}}')
    eventually(lambda: is_settled(kube, demo), "it is as it was", 120)


def change_pair(kube: Kube, name: str, branches: int, image: str | None) -> None:
    spec = {"speculation": {"branches": branches}, "target": {"image": image}}
    kube("patch", "ssd", name, "--type=merge", "-p", json.dumps({"spec": spec}))


@pytest.fixture
def pair(kube: Kube) -> Iterator[str]:
    """Two cells of two drafts."""
    document = sample("pair", drafts=4, replicas=2, resources=SMALL, drainSeconds=5)
    document["spec"]["draft"] |= {"resources": SMALL, "drainSeconds": 5}
    kube.apply(document)
    kube.wait_ready("pair")
    kube.wait_linked("pair", 4)
    yield "pair"
    kube("delete", "ssd", "pair", "--wait=true")


@pytest.mark.slow
def test_cells_roll_one_at_a_time_after_one_preflight(
    kube: Kube, pair: str, figures: Figures
) -> None:
    eventually(lambda: is_settled(kube, pair), "nothing is in progress", 90)
    before, tried = uids(kube, pair, "target"), set[str]()
    fewest = len(before)

    def is_over() -> bool:
        nonlocal fewest
        fewest = min(fewest, num_ready(kube, pair, "target"))
        tried.update(pod["metadata"]["name"] for pod in kube.pods(pair, "preflight"))
        return is_settled(kube, pair) and not before & uids(kube, pair, "target")

    change(kube, pair, podTemplate=setting("PREFILL_CHUNK", "64"))
    seconds = eventually(is_over, "both cells are new", 180)
    assert fewest == 1
    assert len(tried) == 1
    figures["two cells rolled after a preflight, s"] = round(seconds, 1)


@pytest.mark.slow
def test_the_restart_annotation_replaces_every_pod(kube: Kube, pair: str, figures: Figures) -> None:
    eventually(lambda: is_settled(kube, pair), "nothing is in progress", 90)
    engines = ("target", "draft")
    before = {uid for each in engines for uid in uids(kube, pair, each)}
    fewest = dict.fromkeys(engines, len(before))

    def is_over() -> bool:
        for each, least in fewest.items():
            fewest[each] = min(least, num_ready(kube, pair, each))
        after = {uid for each in engines for uid in uids(kube, pair, each)}
        return is_settled(kube, pair) and not before & after

    kube("annotate", "ssd", pair, "ssd.dev/restart=now", "--overwrite")
    seconds = eventually(is_over, "every pod is new", 180)
    assert fewest == {"target": 1, "draft": 2}  # of the drafts, one of each cell
    figures["restart of two cells, s"] = round(seconds, 1)
