"""A change that cannot run replaces no pod; one that can rolls cell by cell."""

import time

import pytest
from tests.cluster.kube import Kube, Object, eventually, image_of, sample
from tests.cluster.load import Load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
Figures = dict[str, object]
SMALL = {"requests": {"cpu": "20m", "memory": "64Mi"}}


def setting(name: str, value: str) -> Object:
    """A setting of the process as a variable, which the schema does not check."""
    return {"env": [{"name": f"SSD_TARGET_{name}", "value": value}]}


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
        ({"image": image_of("draft")}, "has no ssd_target"),
    ],
    ids=["image", "setting", "process"],
)
def test_a_change_that_cannot_run_causes_no_outage(
    kube: Kube, demo: str, load: Load, figures: Figures, bad: Object, error: str
) -> None:
    eventually(lambda: is_settled(kube, demo), "nothing is in progress")
    before = kube.uids(demo, "target")
    kube.edit_spec(demo, target=bad)
    failed = kube.wait_for(demo, "Progressing", "False", "PreflightFailed", error, 90)
    load.go_on(8)
    kube.wait_for(demo, "Ready", "True")
    assert kube.uids(demo, "target") == before
    events = kube.items("events", "--field-selector", f"involvedObject.name={demo}")
    assert any(each["reason"] == "PreflightFailed" and error in each["message"] for each in events)
    kube.edit_spec(demo, target=dict.fromkeys(bad))
    eventually(
        lambda: is_settled(kube, demo), "the change is reverted, its preflight is deleted", 30
    )
    assert kube.uids(demo, "target") == before
    load.assert_undisturbed()
    figures[f"{error}: reported, s"] = round(failed, 1)


def test_drafts_roll_after_their_target(kube: Kube, demo: str, figures: Figures) -> None:
    eventually(lambda: is_settled(kube, demo), "nothing is in progress")
    drafts = kube.uids(demo, "draft")
    bad = {"image": "localhost/ssd-target:nope"}
    kube.edit_spec(demo, speculation={"branches": 16}, target=bad)
    kube.wait_for(demo, "Progressing", "False", "PreflightFailed", "cannot pull", 90)
    assert kube.uids(demo, "draft") == drafts
    kube.wait_for(demo, "SpeculationActive", "True")
    old = kube.uids(demo, "target")
    off: list[float] = []
    early: list[set[str]] = []

    def is_over() -> bool:
        if not kube.has(demo, "SpeculationActive", "True"):
            off.append(time.monotonic())
        # Drafts are read first: the target may roll between the two calls, and then they may.
        found = kube.uids(demo, "draft")
        if found != drafts and old & kube.uids(demo, "target"):
            early.append(found)
        return is_settled(kube, demo) and not drafts & kube.uids(demo, "draft")

    kube.edit_spec(demo, target={"image": None})
    seconds = eventually(is_over, "target and drafts are new", 120)
    assert not early, "drafts rolled before their target"
    eventually(lambda: kube.linked(demo) != set(), "they are linked", 30)
    figures["branches changed: all new, s"] = round(seconds, 1)
    figures["branches changed: speculation off, s"] = round(max(off) - min(off), 1) if off else 0
    kube.edit_spec(demo, speculation={"branches": None})
    eventually(lambda: is_settled(kube, demo), "it is as it was", 120)


@pytest.mark.slow
def test_the_restart_annotation_replaces_every_pod(kube: Kube, figures: Figures) -> None:
    document = sample("pair", drafts=4, replicas=2, resources=SMALL, drainSeconds=5)
    document["spec"]["draft"] |= {"resources": SMALL, "drainSeconds": 5}
    engines = ("target", "draft")
    with kube.applied(document) as pair:
        kube.wait_ready(pair)
        kube.wait_linked(pair, 4)
        eventually(lambda: is_settled(kube, pair), "nothing is in progress", 90)
        before, tried = kube.uids(pair, *engines), set[str]()
        fewest = {"target": 2, "draft": 4}

        def is_over() -> bool:
            for each, least in fewest.items():
                fewest[each] = min(least, kube.num_ready(pair, each))
            tried.update(kube.uids(pair, "preflight"))
            return is_settled(kube, pair) and not before & kube.uids(pair, *engines)

        kube("annotate", "ssd", pair, "ssd.dev/restart=now", "--overwrite")
        seconds = eventually(is_over, "every pod is new", 180)
        assert fewest == {"target": 1, "draft": 2}  # of the drafts, one of each cell
        assert len(tried) == 1
        figures["restart of two cells after a preflight, s"] = round(seconds, 1)
