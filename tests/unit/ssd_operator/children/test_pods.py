"""Pod templates: settings, volumes, resources, probes and placement."""

from dataclasses import fields
from typing import Any

import pytest
from tests.unit.ssd_operator.resources import (
    CPU_DRAFTS,
    DEMO,
    DEMO_TARGET,
    LLAMA,
    POOL,
    QWEN,
    SAMPLES,
    cpu_demo,
    resource,
    secured,
    template_of,
)

from ssd.fetch import FetchSettings
from ssd.settings import load
from ssd_draft.settings import DraftSettings
from ssd_operator.api import reserved
from ssd_operator.api.kubernetes_types import Resources, Variable
from ssd_operator.api.model_cache import ModelCache
from ssd_operator.api.pod_template import PodOverrides, PodTemplate
from ssd_operator.api.spec import (
    Object,
    Placement,
    Resource,
    Source,
    Spec,
    Speculation,
    TargetSpec,
    Transport,
)
from ssd_operator.children.objects import Component
from ssd_operator.children.placement import effective_policy
from ssd_target.settings import TargetSettings

SET_BY_THE_POD = {"pod_name", "node_name", "cell", "termination_log"}
"""Settings whose values only a pod has."""


def draft_of(resource: Resource, cell: int = 0) -> Object:
    return template_of(resource, Component.DRAFT, cell)


def both_of(resource: Resource) -> tuple[Object, Object]:
    """Templates of target and draft."""
    return template_of(resource), draft_of(resource)


def demo_target(**target: Any) -> Object:
    """The template of the demo's target with these fields."""
    return template_of(resource(cpu_demo(target=TargetSpec(**{"source": DEMO_TARGET} | target))))


def container_of(template: Object) -> Object:
    (container,) = template["spec"]["containers"]
    return dict(container)


def environment_of(container: Object) -> dict[str, str]:
    """Variables given as text."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def values_of(template: Object) -> dict[str, str]:
    return environment_of(container_of(template))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_processes_accept_every_variable(name: str) -> None:
    for template, cls, prefix in zip(
        both_of(SAMPLES[name]),
        (TargetSettings, DraftSettings),
        ("SSD_TARGET_", "SSD_DRAFT_"),
        strict=True,
    ):
        variables = [each["name"] for each in container_of(template)["env"]]
        settings = {each.removeprefix(prefix).lower() for each in variables if prefix in each}
        assert settings <= {field.name for field in fields(cls)} | SET_BY_THE_POD
        values = {
            variable: value
            for variable, value in values_of(template).items()
            if variable.removeprefix(prefix).lower() not in SET_BY_THE_POD
        }
        values[f"{prefix}ALLOW_INSECURE"] = "true"  # as in the images
        # Raises if a value is out of the process's bounds, or has another form.
        load(cls, [], prefix=prefix.rstrip("_"), environ=values)


def test_a_default_of_the_process_is_not_set() -> None:
    names = values_of(demo_target()).keys()
    absent = {"BACKUP", "FAN_OUT", "DRAFT_DEADLINE_MS", "DTYPE", "MAX_NUM_SEQS", "REFLECTION"}
    absent |= {"CHANNEL", "WEIGHTS", "TENSOR_PARALLEL_SIZE"}
    assert names.isdisjoint(f"SSD_TARGET_{name}" for name in absent)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_draft_keeps_its_fan_out_while_its_pod_exists(name: str) -> None:
    template = draft_of(SAMPLES[name])
    mounts = {each["mountPath"]: each for each in container_of(template)["volumeMounts"]}
    mount = mounts[reserved.SCRATCH_FOLDER]
    assert not mount.get("readOnly")
    assert {"name": mount["name"], "emptyDir": {}} in template["spec"]["volumes"]
    # The image sets the folder below: an older image has no such setting, and a new variable would
    # replace the drafts of unchanged resources.
    assert "SSD_DRAFT_STATE_FOLDER" not in environment_of(container_of(template))


def test_a_choice_of_the_user_is_a_setting_of_the_process() -> None:
    assert values_of(cpu_draft(weights="Int4"))["SSD_DRAFT_WEIGHTS"] == "int4"
    collective = cpu_demo().changed(transport=Transport(channel="Collective"))
    assert values_of(template_of(resource(collective)))["SSD_TARGET_CHANNEL"] == "collective"
    its_draft = template_of(resource(collective), Component.DRAFT)
    assert values_of(its_draft)["SSD_DRAFT_CHANNEL"] == "collective"


def test_a_label_of_the_user_replaces_none_of_ours() -> None:
    own = PodTemplate(labels={"team": "serving", "app.kubernetes.io/part-of": "theirs"})
    labels = template_of(resource(cpu_demo().changed(pod_template=own)))["metadata"]["labels"]
    assert (labels["team"], labels["app.kubernetes.io/part-of"]) == ("serving", "ssd")


def test_a_fetch_looks_for_the_model_as_its_engine_does() -> None:
    for template in both_of(SAMPLES["everything"]):
        (fetch,) = template["spec"]["initContainers"]
        values = environment_of(fetch)
        assert values["SSD_FETCH_MODEL"] in values_of(template).values()
        settings = {name: each for name, each in values.items() if name.startswith("SSD_FETCH_")}
        load(FetchSettings, [], prefix="SSD_FETCH", environ=settings)


def variables(**values: str) -> tuple[Variable, ...]:
    return tuple({"name": f"SSD_TARGET_{name}", "value": text} for name, text in values.items())


def test_a_users_variable_has_precedence_unless_it_is_reserved() -> None:
    own = PodTemplate(env=variables(BRANCHES="7", LOG_FORMAT="json", POD_NAME="an-impostor"))
    target = TargetSpec(
        source=DEMO_TARGET, pod_template=PodOverrides(env=variables(LOG_FORMAT="text"))
    )
    template = template_of(resource(cpu_demo(target=target).changed(pod_template=own)))
    found = container_of(template)["env"]
    by_name = {each["name"]: each for each in found}
    assert len(by_name) == len(found)
    assert by_name["SSD_TARGET_BRANCHES"]["value"] == "7"
    assert by_name["SSD_TARGET_LOG_FORMAT"]["value"] == "text"
    assert "fieldRef" in by_name["SSD_TARGET_POD_NAME"]["valueFrom"]
    assert "SSD_DRAFT_CELL" in reserved.ENV


@pytest.mark.parametrize(
    ("uri", "model"),
    [
        ("demo://target", "demo://target"),
        ("pvc://claim/a/b", "/models/a/b"),
        ("pvc://claim", "/models"),
        ("pvc://claim/", "/models"),
    ],
)
def test_a_source_is_spelled_as_the_process_reads_it(uri: str, model: str) -> None:
    template = demo_target(source=Source(uri=uri))
    assert values_of(template)["SSD_TARGET_MODEL"] == model
    volumes = [each for each in template["spec"]["volumes"] if each["name"] == "models"]
    claim = {"claimName": "claim", "readOnly": True}
    assert volumes == ([{"name": "models", "persistentVolumeClaim": claim}] if "pvc" in uri else [])


DISK = {"ephemeral-storage": "256Mi"}
STORED = {"limits": {"ephemeral-storage": "1G"}}


@pytest.mark.parametrize(
    ("wanted", "requests", "limits", "num_threads"),
    [
        ({}, {"cpu": "500m", "memory": "1Gi", **DISK}, {"memory": "2Gi"}, "1"),
        ({"requests": {"memory": "9Gi"}}, {"cpu": "500m", "memory": "9Gi", **DISK}, {}, "1"),
        ({"limits": {"memory": "512Mi"}}, {"cpu": "500m", **DISK}, {"memory": "512Mi"}, "1"),
        (
            {"limits": {"cpu": "3500m"}},
            {"memory": "1Gi", **DISK},
            {"memory": "2Gi", "cpu": "3500m"},
            "4",
        ),
        (
            {"requests": {"cpu": "2001m"}},
            {"cpu": "2001m", "memory": "1Gi", **DISK},
            {"memory": "2Gi"},
            "3",
        ),
        (STORED, {"cpu": "500m", "memory": "1Gi"}, {"memory": "2Gi", **STORED["limits"]}, "1"),
    ],
)
def test_an_amount_of_the_user_replaces_both_defaults_and_each_core_has_a_thread(
    wanted: Resources, requests: Object, limits: Object, num_threads: str
) -> None:
    template = demo_target(resources=wanted)
    found = container_of(template)["resources"]
    assert (found.get("requests", {}), found.get("limits", {})) == (requests, limits)
    assert values_of(template)["SSD_TARGET_THREADS"] == num_threads


def cpu_draft(**draft: Any) -> Object:
    """The template of a draft on the CPUs of a GPU node with these fields."""
    return draft_of(resource(CPU_DRAFTS.changed(draft=CPU_DRAFTS.draft.changed(**draft))))


@pytest.mark.parametrize(
    ("wanted", "cpu", "memory", "num_threads"),
    [
        ({}, "16", "32Gi", "15"),
        ({"requests": {"cpu": 64}}, 64, "32Gi", "63"),
        ({"limits": {"cpu": "2", "memory": "8Gi"}}, "2", "8Gi", "2"),
    ],
)
def test_a_draft_beside_gpus_has_whole_cpus_of_its_own_and_one_for_its_other_threads(
    wanted: Resources, cpu: object, memory: str, num_threads: str
) -> None:
    cache = ModelCache(type="HostPath", host_path="/srv/models")
    spec = CPU_DRAFTS.changed(draft=CPU_DRAFTS.draft.changed(resources=wanted), model_cache=cache)
    template = draft_of(resource(spec))
    pod = template["spec"]
    containers = [*pod["initContainers"], *pod["containers"]]
    assert len(containers) == 3
    for container in containers:
        # The kubelet allocates CPUs only to pods of the class Guaranteed.
        for part in ("requests", "limits"):
            found = container["resources"][part]
            assert (found["cpu"], found["memory"]) == (cpu, memory)
            assert "nvidia.com/gpu" not in found
    values = values_of(template)
    assert (values["SSD_DRAFT_DEVICE"], values["SSD_DRAFT_THREADS"]) == ("cpu", num_threads)


def test_a_draft_beside_gpus_follows_its_target_onto_its_node() -> None:
    target, draft = both_of(resource(CPU_DRAFTS.changed(placement=LLAMA.placement)))
    assert draft["spec"]["tolerations"] == target["spec"]["tolerations"]
    assert required(draft, "podAffinity")["labelSelector"]["matchLabels"]["ssd.dev/cell"] == "0"
    # Its target selects the product of the GPUs, which it does not use itself.
    assert "nodeAffinity" in target["spec"]["affinity"]
    assert "nodeAffinity" not in draft["spec"]["affinity"]


def test_a_target_waits_longer_for_drafts_on_cpus_unless_its_deadline_is_given() -> None:
    target = template_of(resource(CPU_DRAFTS))
    assert values_of(target)["SSD_TARGET_DRAFT_DEADLINE_MS"] == "100"
    assert container_of(target)["resources"]["limits"]["nvidia.com/gpu"] == "4"
    given = [
        template_of(resource(spec.changed(speculation=Speculation(draft_deadline_milliseconds=30))))
        for spec in (CPU_DRAFTS, CPU_DRAFTS.changed(draft=LLAMA.draft))
    ]
    assert given[0] == given[1], "the device of its drafts replaces no target"


@pytest.mark.parametrize(
    ("uri", "size_limit", "requested"),
    [("hf://a/b", "80Gi", "80Gi"), ("hf://a/b", None, "4Gi"), ("pvc://weights/b", "80Gi", "4Gi")],
)
def test_a_pod_requests_the_disk_that_its_weights_fill(
    uri: str, size_limit: str | None, requested: str
) -> None:
    source = Source(uri=uri, revision="0" * 40 if uri.startswith("hf") else None)
    cache = ModelCache(size_limit=size_limit)
    spec = QWEN.changed(target=QWEN.target.changed(source=source), model_cache=cache)
    pod = template_of(resource(spec))["spec"]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["resources"]["requests"]["ephemeral-storage"] == requested


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        (cpu_demo(), "Preferred"),
        (LLAMA, "Required"),
        (POOL, "Preferred"),
        (LLAMA.changed(placement=Placement(policy="None")), "None"),
        (POOL.changed(placement=Placement(policy="Required")), "Required"),
    ],
)
def test_the_policy_decides_whether_drafts_run_beside_their_target(spec: Spec, policy: str) -> None:
    assert effective_policy(resource(spec)) == policy
    affinity = draft_of(resource(spec))["spec"].get("affinity", {}).get("podAffinity", {})
    kind = f"{policy.lower()}DuringSchedulingIgnoredDuringExecution"
    assert list(affinity) == ([] if policy == "None" else [kind])


def required(template: Object, kind: str) -> Object:
    """The term of a required affinity."""
    affinity = template["spec"]["affinity"][kind]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    return dict(term)


def test_the_startup_probe_waits_for_the_model() -> None:
    probe = container_of(demo_target(startup_timeout_seconds=61))["startupProbe"]
    assert (probe["failureThreshold"], probe["periodSeconds"]) == (31, 2)


RUN_LATE_SECONDS = 2
"""Least time that the kubelet leaves a process after its preStop hook."""


def test_a_hung_process_is_killed_within_30_seconds() -> None:
    for container in map(container_of, both_of(DEMO)):
        probe = container["livenessProbe"]
        period, timeout = probe["periodSeconds"], probe["timeoutSeconds"]
        # It stops just after an answer. A probe that takes a period delays no other one.
        seen = period + (probe["failureThreshold"] - 1) * max(period, timeout) + timeout
        assert seen + probe["terminationGracePeriodSeconds"] + RUN_LATE_SECONDS <= 30
        assert seen >= 20, "a pause of some seconds is no hang"


def with_security(**given: Any) -> Resource:
    return resource(cpu_demo(security=secured(**given)))


def test_links_have_an_identity_that_clients_do_not_have() -> None:
    target, draft = map(values_of, both_of(with_security(client_names=("app.example",))))
    assert draft["SSD_DRAFT_CALLER_NAMES"] == "spiffe://ssd/ns/default/sa/demo-target"
    assert target["SSD_TARGET_CALLER_NAMES"] == "app.example"
    operator = "spiffe://ssd/ns/ssd/sa/ssd-operator"
    assert {target["SSD_TARGET_ADMIN_NAMES"], draft["SSD_DRAFT_ADMIN_NAMES"]} == {operator}
    assert target["SSD_TARGET_LINK_TOKEN_FILE"] == draft["SSD_DRAFT_TOKEN_FILE"]
    assert target["SSD_TARGET_TOKEN_FILE"] != target["SSD_TARGET_LINK_TOKEN_FILE"]
    assert target["SSD_TARGET_LINK_SERVER_NAME"] == "demo-draft.default.svc"


def test_certificates_of_servers_alone_ask_callers_for_none() -> None:
    for values in map(values_of, both_of(with_security(mode="Server"))):
        assert not [name for name in values if "CLIENT_CA" in name or name.endswith("_NAMES")]
        assert [name for name in values if name.endswith("TLS_CERTIFICATE")]
