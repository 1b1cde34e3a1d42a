"""The release: helm test, upgrade, a second release, a drained node, uninstall."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from tests.cluster.kube import (
    CHART,
    EVERYWHERE,
    Kube,
    Release,
    eventually,
    install,
    inventory,
    run,
    sample,
    take_over_crd,
)
from tests.cluster.load import Job, Load

from ssd import __version__

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
Figures = dict[str, object]


def test_helm_test_passes_with_the_sample(release: Release, figures: Figures) -> None:
    install(release.name, release.namespace, *EVERYWHERE, "--set", "tests.sample.enabled=true")
    started = time.monotonic()
    run("helm", "test", release.name, "-n", release.namespace, "--timeout", "720s", timeout=750)
    figures["helm test with the sample, s"] = round(time.monotonic() - started, 1)
    install(release.name, release.namespace, *EVERYWHERE)


@pytest.fixture
def previous_chart(tmp_path: Path) -> Path:
    """A chart of an earlier version, whose CRD lacks a column."""
    chart = tmp_path / "ssd"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    about |= {"version": "0.0.9", "appVersion": "0.0.9"}
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about))
    crd, pools = yaml.safe_load_all((chart / "files" / "crd.yaml").read_text())
    crd["spec"]["versions"][0]["additionalPrinterColumns"].pop()
    (chart / "files" / "crd.yaml").write_text(yaml.safe_dump_all([crd, pools]))
    return chart


def test_an_upgrade_updates_the_crd_and_keeps_pods_of_the_same_image(
    kube: Kube, release: Release, demo: str, load: Load, previous_chart: Path
) -> None:
    tags = [
        f"--set={each}.tag={__version__}"
        for each in ("image", "engineImages.target", "engineImages.draft")
    ]
    install(release.name, release.namespace, *EVERYWHERE, *tags, chart=previous_chart)
    kube.wait_linked(demo, 1)
    assert "ENDPOINT" not in kube("get", "ssd", "-o", "wide")
    before = kube.uids(demo, "target", "draft")
    install(release.name, release.namespace, *EVERYWHERE)
    assert "ENDPOINT" in kube("get", "ssd", "-o", "wide")
    kube("scale", f"ssd/{demo}", "--replicas=2")
    kube.wait_linked(demo, 2)
    assert before < kube.uids(demo, "target", "draft"), "a pod was replaced"
    kube("scale", f"ssd/{demo}", "--replicas=1")
    kube.wait_linked(demo, 1)
    load.assert_undisturbed()


def test_an_upgrade_keeps_all_resources_after_a_crd_was_replaced(
    kube: Kube, release: Release, demo: str
) -> None:
    before = kube.uids(demo, "target", "draft")
    crd = "ssddeployments.ssd.dev"
    # The release in whose manifest the CRD was, and now is not: Helm deletes such objects.
    run("kubectl", "replace", "-f", str(CHART / "files" / "crd.yaml"))
    install(release.name, release.namespace, *EVERYWHERE)
    assert kube.uids(demo, "target", "draft") == before
    run("kubectl", "annotate", "crd", crd, "helm.sh/resource-policy-")
    advice = f"kubectl annotate crd {crd} helm.sh/resource-policy=keep"
    with pytest.raises(AssertionError, match=advice):
        install(release.name, release.namespace, *EVERYWHERE)
    take_over_crd(release.name, release.namespace)
    with pytest.raises(AssertionError, match=advice):
        install(release.name, release.namespace, *EVERYWHERE, "--set=crds.install=false")
    install(release.name, release.namespace, *EVERYWHERE)
    kept = run("kubectl", "get", "crd", crd, "-o", "jsonpath={.metadata.annotations}")
    assert '"helm.sh/resource-policy":"keep"' in kept
    assert kube.uids(demo, "target", "draft") == before


@pytest.fixture
def other(release: Release) -> Iterator[Kube]:
    """A namespace that a second release watches; the first one watches ``default`` meanwhile."""
    install(release.name, release.namespace, "--set", "operator.watchNamespaces={default}")
    run("kubectl", "create", "namespace", "other")
    second = install("ssd-two", "other")
    yield Kube("other")
    second.uninstall()
    run("kubectl", "delete", "namespace", "other", "--timeout=90s", timeout=120)
    install(release.name, release.namespace, *EVERYWHERE)


def test_two_releases_change_only_their_own_namespace(
    kube: Kube, demo: str, other: Kube, release: Release
) -> None:
    before = kube.get("ssd", demo)["metadata"]
    other.apply(sample("demo", drafts=1))
    other.wait_ready("demo")
    other.wait_linked("demo", 1)
    assert "other" not in Kube(release.namespace)("logs", "deploy/ssd-operator").lower()
    logs = other("logs", "deploy/ssd-two-operator")
    applied = [json.loads(line) for line in logs.splitlines() if '"applied"' in line]
    assert applied, "the second operator created no child"
    assert {each["namespace"] for each in applied} == {"other"}
    other("delete", "ssd", "demo", "--wait=true")
    kube.wait_ready(demo)
    assert kube.get("ssd", demo)["metadata"]["uid"] == before["uid"]


def test_a_node_drain_fails_no_request(
    kube: Kube, demo: str, expected: Mapping[Job, Sequence[int]], figures: Figures
) -> None:
    kube.wait_linked(demo, 1)
    (pod,) = kube.pods(demo, "target")
    node = pod["spec"]["nodeName"]
    try:
        with Load(kube.endpoint(demo), expected, retries=True) as load:
            started = time.monotonic()
            run(
                *("kubectl", "drain", node, "--ignore-daemonsets", "--delete-emptydir-data"),
                *("--pod-selector=ssd.dev/name", "--timeout=480s"),
                timeout=510,
            )
            figures["node drained, s"] = round(time.monotonic() - started, 1)
            assert kube.pods(demo, "target")[0]["status"]["phase"] == "Pending"
            kube.wait_for(demo, "TargetReady", "False", "Unschedulable", timeout=30)
            started = time.monotonic()
            run("kubectl", "uncordon", node)
            kube.wait_ready(demo)
            kube.wait_linked(demo, 1)
            figures["node back: target ready and draft linked, s"] = round(
                time.monotonic() - started, 1
            )
            load.go_on(8)
        load.assert_undisturbed()
    finally:
        run("kubectl", "uncordon", node)


def test_an_uninstall_leaves_only_the_crd(
    kube: Kube, release: Release, before: set[str], expected: Mapping[Job, Sequence[int]]
) -> None:
    kube.apply(sample("last", drafts=1))
    kube.wait_ready("last")
    release.uninstall()
    # Engines serve without the operator, and a later delete leaves nothing either.
    with Load(kube.endpoint("last"), expected) as load:
        load.go_on(4)
    load.assert_undisturbed()
    kube("delete", "ssd", "--all", "--wait=true")
    ours = {
        f"Namespace <none> {release.namespace}",
        f"ServiceAccount {release.namespace} default",
        f"ConfigMap {release.namespace} kube-root-ca.crt",
        "CustomResourceDefinition <none> ssddeployments.ssd.dev",
        "CustomResourceDefinition <none> ssddraftpools.ssd.dev",
        "APIService <none> v1alpha1.ssd.dev",
    }

    def is_clean() -> bool:
        assert inventory() - before - ours == set()
        return True

    try:
        eventually(is_clean, "nothing is left", 90)
    finally:
        install(release.name, release.namespace, *EVERYWHERE)
