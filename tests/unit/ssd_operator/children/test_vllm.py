"""Targets with engine vllm: what vLLM gets, who calls it, and how drafts stay as they are."""

import json
from dataclasses import fields
from typing import Any, Literal

import pytest
from tests.unit.ssd_operator.resources import (
    DEMO_TARGET,
    OPERATOR_PEER,
    SAMPLES,
    SETTINGS,
    cpu_demo,
    deployments,
    of_kind,
    resource,
    secured,
    template_of,
)

from ssd_operator.api.kubernetes_types import NetworkPeer
from ssd_operator.api.security import Security
from ssd_operator.api.spec import Object, Resource, Source, Spec, TargetSpec
from ssd_operator.children.objects import Component
from ssd_operator.children.pods import preflight_spec
from ssd_vllm.settings import PluginSettings, read

LLAMA = SAMPLES["llama-3.1-70b-vllm"]


def vllm_demo(security: Security | None = None, **target: Any) -> Spec:
    wanted: dict[str, Any] = {"source": DEMO_TARGET, "engine": "vllm"} | target
    return cpu_demo(target=TargetSpec(**wanted), security=security)


def container_of(resource: Resource, component: Component = Component.TARGET) -> Object:
    (container,) = template_of(resource, component)["spec"]["containers"]
    return dict(container)


def arguments_of(resource: Resource) -> dict[str, str]:
    """Arguments by name; the last one counts, as for vLLM."""
    return dict(each.removeprefix("--").split("=", 1) for each in container_of(resource)["args"])


def plugin_of(resource: Resource) -> dict[str, Any]:
    """Settings of the plugin."""
    return dict(json.loads(arguments_of(resource)["additional-config"])["ssd"])


def test_fields_of_the_resource_are_arguments_of_vllm() -> None:
    found = arguments_of(LLAMA)
    speculation = json.loads(found.pop("speculative-config"))
    assert speculation["num_speculative_tokens"] == LLAMA.spec.speculation.lookahead
    assert found.pop("additional-config")
    assert found == {
        "model": "meta-llama/Llama-3.1-70B-Instruct",
        "revision": "0" * 40,
        "served-model-name": "llama-70b",
        "port": "8000",
        "tensor-parallel-size": "4",
        "max-model-len": "16384",
        "shutdown-timeout": "300",
        "worker-cls": "ssd_vllm.Worker",
        # The user's own.
        "max-num-seqs": "32",
        "gpu-memory-utilization": "0.92",
    }
    assert container_of(LLAMA)["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_services_of_an_engine_select_no_pod_of_the_other_one() -> None:
    resources = [resource(cpu_demo()), resource(vllm_demo())]
    for each in resources:
        for name in ("demo", "demo-targets"):
            selected = of_kind(each, "Service")[name]["spec"]["selector"].items()
            labels = [template_of(other)["metadata"]["labels"].items() for other in resources]
            assert [selected <= found for found in labels] == [other is each for other in resources]


def test_the_plugin_connects_to_the_drafts_of_the_cell_and_serves_the_operator() -> None:
    found = plugin_of(LLAMA)
    assert found["drafts"] == ["llama-70b-draft-0:50052"]
    assert (found["admin_port"], found["admin_host"]) == (50051, "0.0.0.0")
    assert found["branches"] == LLAMA.spec.speculation.branches
    on_cpus = resource(vllm_demo().changed(speculation=LLAMA.spec.speculation))
    assert plugin_of(on_cpus)["draft_deadline_ms"] == 100


def test_defaults_of_the_plugin_are_not_given() -> None:
    defaults = {each.name: each.default for each in fields(PluginSettings)}
    found = plugin_of(resource(vllm_demo()))
    names = found.keys() & defaults.keys() - {"branches", "allow_insecure"}
    assert [name for name in names if found[name] == defaults[name]] == []


def test_an_argument_of_the_user_cannot_replace_one_of_a_field() -> None:
    args = ("--max-num-seqs=8", "--tensor-parallel-siz=2")
    given = container_of(resource(vllm_demo(args=args, tensor_parallel_size=1)))["args"]
    assert given[:2] == list(args)
    assert given[-1].startswith("--additional-config=")


@pytest.mark.parametrize(
    ("uri", "model"), [("pvc://claim/a/b", "/models/a/b"), ("demo://target", "demo://target")]
)
def test_a_folder_or_the_embedded_model_has_no_revision(uri: str, model: str) -> None:
    found = arguments_of(resource(vllm_demo(source=Source(uri=uri))))
    assert found["model"] == model
    assert "revision" not in found


def test_vllm_reads_the_fetched_model_and_has_no_setting_of_our_target() -> None:
    names = {each["name"] for each in container_of(LLAMA)["env"]}
    assert names == {"HF_HOME", "HF_HUB_OFFLINE"}
    pod = template_of(LLAMA)["spec"]
    assert [each["command"] for each in pod["initContainers"]] == [["python", "-m", "ssd.fetch"]]
    on_cpus = container_of(resource(vllm_demo(resources={"requests": {"cpu": 3}})))
    assert on_cpus["env"] == [{"name": "OMP_NUM_THREADS", "value": "3"}]


def test_the_image_is_that_of_vllm_unless_the_resource_sets_one() -> None:
    assert container_of(LLAMA)["image"] == SETTINGS.vllm_image
    assert container_of(resource(vllm_demo(image="r/own:1")))["image"] == "r/own:1"
    assert container_of(LLAMA, Component.DRAFT)["image"] == SETTINGS.draft_image


def test_probes_and_metrics_are_pages_of_vllms_own_port() -> None:
    container = container_of(LLAMA)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"grpc": 50051, "http": 8000}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["livenessProbe"]["failureThreshold"] == 6, (
        "its loop answers, if it is not busy"
    )


def test_clients_reach_the_api_of_vllm_and_only_the_operator_its_admin_port() -> None:
    client: NetworkPeer = {"podSelector": {"matchLabels": {"app": "chat"}}}
    demo = resource(vllm_demo(security=Security(clients=(client,))))
    rules = of_kind(demo, "NetworkPolicy")["demo-target"]["spec"]["ingress"]
    allowed = {rule["ports"][0]["port"]: rule["from"] for rule in rules}
    assert allowed == {50051: [OPERATOR_PEER], 8000: [client]}
    services = of_kind(demo, "Service")
    for name in ("demo", "demo-targets"):
        (port,) = services[name]["spec"]["ports"]
        assert (port["name"], port["port"], port["targetPort"]) == ("http", 8000, "http")


@pytest.mark.parametrize("mode", ["Server", "Mutual"])
def test_the_plugin_has_the_security_of_our_target(mode: Literal["Server", "Mutual"]) -> None:
    security = secured(mode)
    ours = container_of(resource(cpu_demo(security=security)))["env"]
    values = {each["name"].removeprefix("SSD_TARGET_"): each.get("value") for each in ours}
    words = ("TLS", "LINK", "TOKEN", "NAMES")
    expected = {
        name.lower(): value for name, value in values.items() if any(word in name for word in words)
    }
    plugin = plugin_of(resource(vllm_demo(security=security)))
    assert {name: plugin.get(name) for name in expected} == expected
    assert expected["admin_token_file"] == "/etc/ssd/tokens/admins"
    assert expected["token_file"] == "/etc/ssd/tokens/clients"
    assert ("admin_names" in expected) is ("tls_client_ca" in expected) is (mode == "Mutual")
    read({"ssd": plugin}).check_drafts()


def test_the_port_of_vllm_has_the_certificate_and_probes_use_it() -> None:
    demo = resource(vllm_demo(security=secured("Server")))
    found, container = arguments_of(demo), container_of(demo)
    assert (found["ssl-certfile"], found["ssl-keyfile"]) == (
        "/etc/ssd/tls/tls.crt",
        "/etc/ssd/tls/tls.key",
    )
    assert {each["name"] for each in container["volumeMounts"]} >= {"ssd-tls", "ssd-tokens"}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = {"path": "/health", "port": "http", "scheme": "HTTPS"}
        assert container[probe]["httpGet"] == get
    template = template_of(demo)
    assert template["metadata"]["annotations"] == {"ssd.dev/scheme": "https"}
    (port,) = of_kind(demo, "Service")["demo"]["spec"]["ports"]
    assert port["appProtocol"] == "https"


def test_tokens_alone_leave_the_port_of_vllm_in_plain_text() -> None:
    demo = resource(vllm_demo(security=Security(token_secret_name="tokens")))
    assert "ssl-certfile" not in arguments_of(demo)
    assert plugin_of(demo)["token_file"] == "/etc/ssd/tokens/clients"
    assert container_of(demo)["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    (port,) = of_kind(demo, "Service")["demo"]["spec"]["ports"]
    assert "appProtocol" not in port


@pytest.mark.parametrize("is_secured", [False, True])
def test_the_engine_of_the_target_changes_nothing_of_the_drafts(*, is_secured: bool) -> None:
    security = secured("Mutual") if is_secured else None
    ours = resource(cpu_demo(security=security))
    theirs = resource(vllm_demo(security=security))
    assert deployments(ours, "draft") == deployments(theirs, "draft")
    for kind, name in (("NetworkPolicy", "demo-draft"), ("Service", "demo-draft-0")):
        assert of_kind(ours, kind)[name] == of_kind(theirs, kind)[name]


def test_a_preflight_checks_the_arguments_of_vllm() -> None:
    (deployment,) = deployments(LLAMA, "target")
    (container,) = preflight_spec(deployment, "node")["containers"]
    assert container["command"] == ["python", "-m", "ssd_vllm"]
    assert container["args"] == [*container_of(LLAMA)["args"], "--print-config"]


def test_vllm_may_finish_its_requests_before_the_pod_is_killed() -> None:
    demo = resource(vllm_demo(drain_seconds=60))
    assert arguments_of(demo)["shutdown-timeout"] == "60"
    assert template_of(demo)["spec"]["terminationGracePeriodSeconds"] == 90
