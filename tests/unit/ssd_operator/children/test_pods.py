"""Pod templates: settings, volumes, resources, probes and placement."""

from collections.abc import Callable
from dataclasses import fields

import pytest
from tests.unit.ssd_operator.resources import (
    DEMO_DRAFT,
    DEMO_TARGET,
    LLAMA,
    POOL,
    QWEN,
    SAMPLES,
    SETTINGS,
    cpu_demo,
    resource,
)

from ssd.fetch import FetchSettings
from ssd.settings import load
from ssd_draft.settings import DraftSettings
from ssd_operator.api import reserved
from ssd_operator.api.kubernetes_types import Resources, Variable, VolumeMount
from ssd_operator.api.pod_template import PodOverrides, PodTemplate
from ssd_operator.api.spec import (
    Accelerator,
    Draft,
    ModelCache,
    Object,
    Placement,
    Resource,
    Sharing,
    Source,
    Spec,
    Target,
)
from ssd_operator.children.names import Component
from ssd_operator.children.placement import effective_policy
from ssd_operator.children.pods import engine_template
from ssd_target.settings import TargetSettings

SET_BY_THE_POD = {"pod_name", "node_name", "cell", "termination_log"}
"""Settings whose values only a pod has."""


def target_of(resource: Resource) -> Object:
    return engine_template(resource, SETTINGS, Component.TARGET, 0)


def draft_of(resource: Resource) -> Object:
    is_pool = resource.spec.draft.sharing is Sharing.POOL
    return engine_template(resource, SETTINGS, Component.DRAFT, None if is_pool else 0)


def container_of(template: Object) -> Object:
    (container,) = template["spec"]["containers"]
    return dict(container)


def environment_of(template: Object) -> dict[str, str]:
    """Variables given as text."""
    variables = container_of(template)["env"]
    return {each["name"]: each["value"] for each in variables if "value" in each}


def resources_of(wanted: Resources, accelerator: Accelerator = Accelerator.CPU) -> Object:
    target = Target(source=DEMO_TARGET, resources=wanted)
    spec = cpu_demo(target=target).changed(accelerator=accelerator)
    return dict(container_of(target_of(resource(spec)))["resources"])


@pytest.mark.parametrize("name", SAMPLES)
def test_the_processes_accept_every_variable(name: str) -> None:
    for template, cls, prefix in (
        (target_of(SAMPLES[name]), TargetSettings, "SSD_TARGET"),
        (draft_of(SAMPLES[name]), DraftSettings, "SSD_DRAFT"),
    ):
        known = {field.name for field in fields(cls)} | SET_BY_THE_POD
        names = {each["name"] for each in container_of(template)["env"]}
        of_process = {each for each in names if each.startswith(prefix)}
        assert {each.removeprefix(f"{prefix}_").lower() for each in of_process} <= known
        values = {
            variable: value
            for variable, value in environment_of(template).items()
            if variable.removeprefix(f"{prefix}_").lower() not in SET_BY_THE_POD
        }
        # Raises if a value is out of the process's bounds, or has another form.
        load(cls, [], prefix=prefix, environ=values)


def test_target_and_draft_have_the_same_model_settings() -> None:
    demo = SAMPLES["everything"]
    target, draft = environment_of(target_of(demo)), environment_of(draft_of(demo))
    for name in ("LOOKAHEAD", "BRANCHES", "MAX_MODEL_LEN", "DTYPE"):
        assert target[f"SSD_TARGET_{name}"] == draft[f"SSD_DRAFT_{name}"]


def test_a_default_of_the_process_is_not_set() -> None:
    names = set(environment_of(target_of(resource(cpu_demo()))))
    for name in ("BACKUP", "FAN_OUT", "DRAFT_DEADLINE_MS", "DTYPE", "MAX_NUM_SEQS", "REFLECTION"):
        assert f"SSD_TARGET_{name}" not in names


def test_a_users_variable_has_precedence_unless_it_is_reserved() -> None:
    variables = container_of(target_of(SAMPLES["everything"]))["env"]
    by_name = {each["name"]: each for each in variables}
    assert len(by_name) == len(variables)
    assert by_name["SSD_TARGET_MAX_QUEUE"]["value"] == "7"
    assert by_name["SSD_TARGET_LOG_FORMAT"]["value"] == "text"
    assert "fieldRef" in by_name["SSD_TARGET_POD_NAME"]["valueFrom"]
    assert "SSD_DRAFT_CELL" in reserved.ENV


def test_targets_and_drafts_override_parts_of_a_common_template() -> None:
    target, draft = target_of(SAMPLES["everything"]), draft_of(SAMPLES["everything"])
    for template in (target, draft):
        assert template["spec"]["schedulerName"] == "theirs"
        assert template["spec"]["volumes"][-1]["name"] == "extra"
        assert template["metadata"]["annotations"]["note"] == "kept"
    assert target["metadata"]["labels"]["team"] == "serving"
    assert draft["metadata"]["labels"]["team"] == "drafts"
    assert target["spec"]["nodeSelector"] == {"pool": "engines"}
    assert draft["spec"]["nodeSelector"] == {"pool": "engines", "gpu": "small"}
    classes = (target["spec"]["priorityClassName"], draft["spec"]["priorityClassName"])
    assert classes == ("high", "low")
    assert environment_of(target)["SSD_TARGET_LOG_FORMAT"] == "text"
    assert environment_of(draft)["SSD_TARGET_LOG_FORMAT"] == "json"


def test_a_users_labels_do_not_replace_the_operators() -> None:
    labels = target_of(SAMPLES["everything"])["metadata"]["labels"]
    assert (labels["team"], labels["app.kubernetes.io/part-of"]) == ("serving", "ssd")


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
    template = target_of(resource(cpu_demo(target=Target(source=Source(uri=uri)))))
    assert environment_of(template)["SSD_TARGET_MODEL"] == model
    claims = [
        volume["persistentVolumeClaim"]
        for volume in template["spec"]["volumes"]
        if volume["name"] == "models"
    ]
    assert claims == ([{"claimName": "claim", "readOnly": True}] if "pvc" in uri else [])


def test_a_hub_model_is_pinned_and_its_token_is_a_reference() -> None:
    template = target_of(resource(LLAMA))
    values = environment_of(template)
    assert values["SSD_TARGET_MODEL"].endswith(f"@{LLAMA.target.source.revision}")
    (fetch,) = template["spec"]["initContainers"]
    (token,) = [each for each in fetch["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert "HF_HOME" not in environment_of(target_of(resource(cpu_demo())))


@pytest.mark.parametrize("template_of", [target_of, draft_of])
def test_only_the_container_that_fetches_uses_the_hub_and_its_token(
    template_of: Callable[[Resource], Object],
) -> None:
    template = template_of(resource(LLAMA))
    (fetch,) = template["spec"]["initContainers"]
    engine = container_of(template)
    values = {each["name"]: each.get("value") for each in engine["env"]}
    assert values["HF_HUB_OFFLINE"] == "1"
    assert "HF_TOKEN" not in values
    fetched = {each["name"]: each.get("value", "") for each in fetch["env"]}
    assert "HF_HUB_OFFLINE" not in fetched
    assert fetched["HF_HOME"] == values["HF_HOME"]
    assert fetched["SSD_FETCH_MODEL"] in values.values(), "as the engine will look for it"
    known = {name for name in fetched if name.startswith("SSD_FETCH_")}
    load(FetchSettings, [], prefix="SSD_FETCH", environ={name: fetched[name] for name in known})
    assert fetch["image"] == engine["image"]
    (weights,) = [each for each in engine["volumeMounts"] if each["mountPath"] == values["HF_HOME"]]
    assert weights["readOnly"], "pods share them"
    assert {mount["mountPath"] for mount in fetch["volumeMounts"]} == {
        "/tmp",
        reserved.CACHE_FOLDER,
    }


def test_a_fetch_reserves_no_more_than_its_engine_and_no_device() -> None:
    template = target_of(resource(LLAMA))
    (fetch,), engine = template["spec"]["initContainers"], container_of(template)
    assert engine["resources"]["limits"]["nvidia.com/gpu"]
    assert fetch["resources"]["requests"] == engine["resources"]["requests"]
    assert "limits" not in fetch["resources"], "an empty map is never as the server stores it"
    assert fetch["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_fetch_has_the_variables_and_mounts_of_the_user() -> None:
    proxy: Variable = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    mount: VolumeMount = {"name": "certificates", "mountPath": "/etc/ssl/certs"}
    added = PodTemplate(env=(proxy,), volume_mounts=(mount,))
    spec = LLAMA.changed(pod_template=added)
    (fetch,) = target_of(resource(spec))["spec"]["initContainers"]
    assert proxy in fetch["env"]
    assert mount in fetch["volumeMounts"]


@pytest.mark.parametrize(
    ("wanted", "requests", "limits"),
    [
        ({}, {"cpu": "500m", "memory": "1Gi"}, {"memory": "2Gi"}),
        ({"requests": {"memory": "9Gi"}}, {"cpu": "500m", "memory": "9Gi"}, {}),
        ({"limits": {"memory": "512Mi"}}, {"cpu": "500m"}, {"memory": "512Mi"}),
        ({"limits": {"cpu": "2"}}, {"memory": "1Gi"}, {"memory": "2Gi", "cpu": "2"}),
        (
            {"limits": {"ephemeral-storage": "1G"}},
            {"cpu": "500m", "memory": "1Gi"},
            {"memory": "2Gi", "ephemeral-storage": "1G"},
        ),
    ],
)
def test_an_amount_of_the_user_replaces_both_defaults(
    wanted: Resources, requests: Object, limits: Object
) -> None:
    found = resources_of(wanted)
    if "ephemeral-storage" not in limits:
        requests = requests | {"ephemeral-storage": "256Mi"}
    assert (found.get("requests", {}), found.get("limits", {})) == (requests, limits)


@pytest.mark.parametrize(
    ("wanted", "num_threads"),
    [
        ({}, "1"),
        ({"requests": {"cpu": "2"}}, "2"),
        ({"requests": {"cpu": "2001m"}}, "3"),
        ({"limits": {"cpu": "3500m"}}, "4"),
    ],
)
def test_a_cpu_pod_has_a_thread_for_each_requested_core(
    wanted: Resources, num_threads: str
) -> None:
    template = target_of(resource(cpu_demo(target=Target(source=DEMO_TARGET, resources=wanted))))
    assert environment_of(template)["SSD_TARGET_THREADS"] == num_threads


def test_targets_and_drafts_request_gpus_of_their_own_kind_and_tolerate_one_taint() -> None:
    spec = QWEN.changed(
        target=QWEN.target.changed(gpu_resource="nvidia.com/mig-3g.40gb"),
        draft=QWEN.draft.changed(gpu_resource="nvidia.com/mig-1g.10gb"),
    )
    target, draft = target_of(resource(spec)), draft_of(resource(spec))
    assert container_of(target)["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "2"}
    assert container_of(draft)["resources"]["limits"] == {"nvidia.com/mig-1g.10gb": "1"}
    for template in (target, draft):
        assert template["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


@pytest.mark.parametrize(
    ("uri", "size_limit", "requested"),
    [
        ("hf://a/b", "80Gi", "80Gi"),
        ("hf://a/b", None, "4Gi"),
        ("pvc://weights/b", "80Gi", "4Gi"),
    ],
)
def test_a_pod_requests_the_disk_that_its_weights_fill(
    uri: str, size_limit: str | None, requested: str
) -> None:
    source = Source(uri=uri, revision="0" * 40 if uri.startswith("hf") else None)
    cache = ModelCache(size_limit=size_limit)
    spec = QWEN.changed(target=QWEN.target.changed(source=source), model_cache=cache)
    template = target_of(resource(spec))
    containers = [container_of(template), *template["spec"].get("initContainers", [])]
    for container in containers:
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
    kinds = {
        "Required": {"requiredDuringSchedulingIgnoredDuringExecution"},
        "Preferred": {"preferredDuringSchedulingIgnoredDuringExecution"},
        "None": set(),
    }
    assert set(affinity) == kinds[policy]


def test_a_draft_follows_the_target_of_its_own_cell() -> None:
    affinity = engine_template(resource(LLAMA), SETTINGS, Component.DRAFT, 1)["spec"]["affinity"][
        "podAffinity"
    ]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == {
        "ssd.dev/name": "demo",
        "ssd.dev/component": "target",
        "ssd.dev/cell": "1",
    }


def test_an_exclusive_node_has_one_target_over_all_namespaces() -> None:
    affinity = target_of(resource(LLAMA))["spec"]["affinity"]["podAntiAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["namespaceSelector"] == {}
    assert term["labelSelector"] == {"matchLabels": {"ssd.dev/component": "target"}}


def test_the_grace_period_is_longer_than_the_drain() -> None:
    demo = resource(
        cpu_demo(
            target=Target(source=DEMO_TARGET, drain_seconds=60),
            draft=Draft(source=DEMO_DRAFT, drain_seconds=10),
        )
    )
    assert target_of(demo)["spec"]["terminationGracePeriodSeconds"] == 90
    assert draft_of(demo)["spec"]["terminationGracePeriodSeconds"] == 35


def test_only_the_startup_probe_waits_for_the_model() -> None:
    target = Target(source=DEMO_TARGET, startup_timeout_seconds=61)
    container = container_of(target_of(resource(cpu_demo(target=target))))
    assert container["startupProbe"]["failureThreshold"] == 31
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert "initialDelaySeconds" not in container[probe]


@pytest.mark.parametrize("template_of", [target_of, draft_of])
def test_a_process_that_hangs_is_not_drained(
    template_of: Callable[[Resource], Object],
) -> None:
    container = container_of(template_of(resource(cpu_demo())))
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["terminationGracePeriodSeconds"] == 10
    assert "terminationGracePeriodSeconds" not in container["readinessProbe"]


def test_pretend_gpus_run_on_cpu_code() -> None:
    pretend = PodOverrides(env=({"name": "SSD_TARGET_DEVICE", "value": "cpu"},))
    spec = QWEN.changed(target=QWEN.target.changed(pod_template=pretend))
    template = target_of(resource(spec))
    assert environment_of(template)["SSD_TARGET_DEVICE"] == "cpu"
    assert container_of(template)["resources"]["limits"] == {"nvidia.com/gpu": "2"}
