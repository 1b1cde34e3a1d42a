"""Releases on a real API server; no node is needed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.kube import CHART, CRD, Kube, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

BINDINGS = ("get", "clusterrolebindings,rolebindings", "-A", "-l", "ssd.dev/binds=operator")
EVERYWHERE = "--set=operator.watchAllNamespaces=true"
NAMESPACES = ("here", "there", "team-a", "team-b")


@pytest.fixture(scope="module", autouse=True)
def namespaces(kubectl: Any) -> Iterator[None]:
    for whose in (BINDINGS, ("get", "ssddeployments", "-A")):
        if found := kubectl(*whose, "-o", "name").stdout.strip():
            pytest.skip(f"the CRD is in use and would be deleted: {found.split()[0]}")
    Kube("").delete_crds()
    for name in NAMESPACES:
        assert kubectl("create", "namespace", name).returncode == 0
    yield
    kubectl("delete", "namespace", *NAMESPACES, "--wait=false")
    Kube("").delete_crds()


@pytest.fixture
def release(helm: Any, kubectl: Any) -> Iterator[Any]:
    """Install a release; after the test it is uninstalled and the CRDs deleted."""
    installed = []

    def install(name: str, namespace: str, *arguments: str) -> Any:
        done = helm("upgrade", "--install", name, CHART, "--namespace", namespace, *arguments)
        if done.returncode == 0:
            installed.append((name, namespace))
        return done

    yield install
    for name, namespace in set(installed):
        done = helm("uninstall", name, "--namespace", namespace, "--no-hooks", "--ignore-not-found")
        assert done.returncode == 0, done.stderr
    Kube("").delete_crds()


def owner_of_the_crd(kubectl: Any) -> str:
    crd = json.loads(kubectl("get", CRD, "-o", "json").stdout)
    return str(crd["metadata"]["annotations"]["meta.helm.sh/release-name"])


@pytest.mark.parametrize(
    "values", sorted((CHART / "ci").glob("*.yaml")), ids=lambda path: path.name
)
def test_the_api_server_accepts_every_object(kubectl: Any, render: Any, values: Path) -> None:
    monitors = "--set=metrics.serviceMonitor.enabled=false,metrics.podMonitor.enabled=false"
    objects = render("--values", values, monitors, "--set=metrics.prometheusRule.enabled=false")
    # Admission of a pod needs its account.
    accounts = [each for each in objects if each["kind"] == "ServiceAccount"]
    kubectl("apply", "-f", "-", given=yaml.safe_dump_all(accounts))
    done = kubectl(
        *("apply", "--dry-run=server", "--validate=strict", "-f", "-"),
        given=yaml.safe_dump_all(objects),
    )
    kubectl("delete", "-f", "-", given=yaml.safe_dump_all(accounts))
    assert done.returncode == 0, done.stderr


def test_users_get_their_rights_through_the_clusters_roles(kubectl: Any, release: Any) -> None:
    assert release("ssd", "here").returncode == 0
    for role, verb, expected in [("view", "get", "yes"), ("view", "create", "no")] + [
        (role, verb, "yes") for role in ("edit", "admin") for verb in ("create", "delete")
    ]:
        user = f"{role}-user"
        kubectl("create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}", "-nthere")
        arguments = ("auth", "can-i", verb, "ssddeployments.ssd.dev", "--as", user, "-nthere")
        if expected == "yes":  # a controller aggregates roles, with a delay
            eventually(lambda: kubectl(*arguments).returncode == 0, f"{role}s may {verb}")  # noqa: B023
        else:
            assert kubectl(*arguments).stdout.strip() == "no"


ALONE = "--set=crds.install=false,rbac.aggregate=false"
A, B = (f"--set=operator.watchNamespaces={{team-{each}}}" for each in "ab")


@pytest.mark.parametrize(
    ("installed", "refused", "words"),
    [
        ([("ssd", "here", EVERYWHERE)], ("ssd", "there", EVERYWHERE), "here already watches all"),
        ([("ssd", "here", EVERYWHERE)], ("ssd", "there", A), "here already watches all namespaces"),
        ([("ssd", "here"), ("ssd", "there")], ("two", "here"), "here already watches here"),
        (
            [("ssd", "here", ALONE, A), ("ssd", "there", ALONE, B)],
            ("three", "there", B),
            "there already watches team-b",
        ),
        ([("ssd", "here", A)], ("four", "there", EVERYWHERE), "already watches team-a"),
    ],
)
def test_a_release_is_rejected_where_another_one_watches_and_accepted_elsewhere(
    release: Any, installed: list[tuple[str, ...]], refused: tuple[str, ...], words: str
) -> None:
    for each in installed:
        done = release(*each)
        assert done.returncode == 0, done.stderr
    done = release(*refused)
    assert done.returncode != 0
    assert f"release ssd of namespace {words}" in done.stderr or words in done.stderr


def test_an_install_without_rights_on_the_cluster_shows_how_to_check_for_other_operators(
    helm: Any, kubectl: Any
) -> None:
    for role in ("admin", "edit"):
        kubectl(
            "create", "rolebinding", f"her-{role}", f"--clusterrole={role}", "--user=she", "-nthere"
        )
    done = helm(
        *("install", "hers", CHART, "--namespace", "there", "--dry-run=server"),
        *("--kube-as-user", "she", "--set=crds.install=false,rbac.aggregate=false"),
    )
    assert done.returncode == 0, done.stderr
    assert "kubectl get clusterrolebindings -l ssd.dev/binds=operator" in done.stdout


def test_an_upgrade_of_the_same_release_is_accepted(release: Any) -> None:
    assert release("ssd", "here").returncode == 0
    again = release("ssd", "here", "--set=operator.logLevel=debug")
    assert again.returncode == 0, again.stderr


def test_the_crd_stays_and_the_notes_of_a_new_release_show_the_takeover(
    helm: Any, kubectl: Any, release: Any
) -> None:
    assert release("first", "here").returncode == 0
    assert helm("uninstall", "first", "--namespace", "here", "--no-hooks").returncode == 0
    assert kubectl("get", CRD).returncode == 0
    second = release("second", "there")
    assert second.returncode == 0, second.stderr
    assert "they belong to release here/first" in second.stdout
    assert owner_of_the_crd(kubectl) == "first"
    _, _, notes = second.stdout.partition("run helm upgrade again:")
    shown, _, _ = notes.partition("Uninstall:")
    for line in shown.replace("\\\n", " ").split("kubectl ")[1:]:
        done = kubectl(*line.split())
        assert done.returncode == 0, done.stderr
    third = release("second", "there")
    assert third.returncode == 0, third.stderr
    assert "were not changed" not in third.stdout
    assert owner_of_the_crd(kubectl) == "second"


def test_a_crd_that_was_applied_by_hand_is_not_changed(kubectl: Any, release: Any) -> None:
    assert kubectl("apply", "--server-side", "-f", CHART / "files" / "crd.yaml").returncode == 0
    done = release("ssd", "here")
    assert done.returncode == 0, done.stderr
    assert "they were not installed by Helm" in done.stdout
