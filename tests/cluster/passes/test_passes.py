"""Passes: their order, the first status, and names that are taken."""

import copy
import json
import time
from functools import partial

import pytest
from tests.cluster.kube import Kube, all_of, eventually, pending

from ssd_operator.runtime.work_queue import SETTLE_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


def has_status(kube: Kube, name: str) -> bool:
    return bool(kube.get("ssd", name).get("status", {}).get("conditions"))


def has_draft(kube: Kube, name: str) -> bool:
    return bool(kube.pods(name, "draft"))


def test_resources_that_are_created_together_soon_have_a_status(
    kube: Kube, figures: dict[str, object]
) -> None:
    names = [f"r{number}" for number in range(8)]
    kube.apply(all_of([pending(name) for name in names]))
    seconds = eventually(
        lambda: all(has_status(kube, name) for name in names), "each has a status", 15
    )
    figures["eight resources at once: a status of each, s"] = round(seconds, 1)
    for name in names:
        eventually(partial(has_draft, kube, name), f"{name} has a draft pod", 60)


def test_edits_in_quick_succession_are_at_most_two_rollouts(
    kube: Kube, figures: dict[str, object]
) -> None:
    document = pending("edited")
    kube.apply(document)
    eventually(lambda: bool(kube.pods("edited", "target")), "it has a target pod", 60)
    before = generation(kube)
    edits = []
    for number in range(21):
        edit = copy.deepcopy(document)
        edit["spec"]["speculation"] = {"draftDeadlineMilliseconds": 200 + number}
        edits.append(edit)
    started = time.monotonic()
    kube.apply(all_of(edits))
    seconds = time.monotonic() - started
    eventually(lambda: deadline(kube) == "220", "the last edit is applied", 30)
    figures["21 edits: changes of the target's Deployment"] = generation(kube) - before
    # On a busy machine the edits arrive over more than one pause.
    most = max(2, 1 + int(seconds / SETTLE_SECONDS))
    assert generation(kube) - before <= most < len(edits)


def generation(kube: Kube) -> int:
    return int(kube.get("deployment", "edited-target-0")["metadata"]["generation"])


def deadline(kube: Kube) -> str:
    template = kube.get("deployment", "edited-target-0")["spec"]["template"]
    variables = template["spec"]["containers"][0]["env"]
    found = [each["value"] for each in variables if each["name"] == "SSD_TARGET_DRAFT_DEADLINE_MS"]
    return str(found[0]) if found else ""


def test_a_gateway_is_removed_while_another_owner_has_a_service_that_it_needs(kube: Kube) -> None:
    gated = pending("y")
    gated["spec"]["gateway"] = {"enabled": True}
    metadata = kube.get("namespace", kube.namespace)["metadata"]
    owner = {"apiVersion": "v1", "kind": "Namespace", "controller": True}
    kube.apply(gated)
    eventually(partial(is_child, kube, "y-gateway", "y", "deployment"), "it has a gateway", 30)
    owners = [owner | {name: metadata[name] for name in ("name", "uid")}]
    change = json.dumps({"metadata": {"ownerReferences": owners}})
    kube("patch", "service", "y-targets", "--type=merge", "-p", change)
    words = f"y-targets belongs to Namespace {kube.namespace}"
    kube.wait_for("y", "GatewayReady", "False", "NameTaken", words, timeout=30)
    gone = kube.attempt("get", "deployment/y-gateway").returncode != 0
    assert gone or kube.get("deployment", "y-gateway")["metadata"].get("deletionTimestamp")
    kube("delete", "service", "y-targets")
    eventually(partial(is_child, kube, "y-gateway", "y", "deployment"), "it is made again", 30)


def is_child(kube: Kube, name: str, owner: str, kind: str = "service") -> bool:
    """Whether an object exists and this resource is its owner."""
    if kube.attempt("get", f"{kind}/{name}").returncode != 0:
        return False
    owners = kube.get(kind, name)["metadata"].get("ownerReferences", [])
    return [each["name"] for each in owners] == [owner]
