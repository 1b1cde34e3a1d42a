"""What pods get for the sake of their links, tier by tier."""

from dataclasses import replace

import pytest
from tests.unit.ssd_operator.resources import (
    CONFIG,
    LLAMA,
    NVLINK,
    QWEN,
    RDMA,
    UID,
    cpu_demo,
    resource,
)

from ssd_operator.pods import draft_template, target_template
from ssd_operator.spec import Object, PodTemplate, Rdma, Spec, Tier, Transport


def pods(spec: Spec) -> dict[str, Object]:
    """Pod specs by component."""
    demo = resource(spec)
    made = (target_template(demo, CONFIG, 0), draft_template(demo, CONFIG, None))
    return {each["metadata"]["labels"]["ssd.dev/component"]: each["spec"] for each in made}


def variables(pod: Object) -> Object:
    return {each.pop("name"): each for each in map(dict, pod["containers"][0]["env"])}


def annotations(spec: Spec) -> Object:
    found = target_template(resource(spec), CONFIG, 0)["metadata"]
    return dict(found.get("annotations", {}))


@pytest.mark.parametrize("transport", [Transport(), Transport(tier="TCP")])
def test_the_default_and_tcp_take_no_privilege_and_set_nothing(transport: Transport) -> None:
    plain = pods(replace(QWEN, transport=transport))
    assert plain == pods(QWEN)
    assert "NCCL" not in str(plain)
    assert annotations(QWEN) == {}


def test_what_links_must_be_is_said_to_the_target_alone() -> None:
    made = pods(NVLINK)
    target, draft = variables(made["target"]), variables(made["draft"])
    assert target["SSD_TARGET_REQUIRE_TRANSPORT"] == {"value": "nvlink"}
    assert target["SSD_TARGET_MAX_ROUND_TRIP_US"] == {"value": "50"}
    assert not [name for name in draft if "REQUIRE" in name or "ROUND_TRIP" in name]
    unasked = variables(pods(cpu_demo())["target"])
    assert not [name for name in unasked if "REQUIRE" in name or "ROUND_TRIP" in name]


def test_a_round_trip_may_be_limited_over_tcp() -> None:
    spec = replace(cpu_demo(), transport=Transport(max_round_trip_microseconds=900))
    assert variables(pods(spec)["target"])["SSD_TARGET_MAX_ROUND_TRIP_US"] == {"value": "900"}


def test_rdma_gives_cards_and_the_right_to_pin_memory_and_no_more() -> None:
    transport = Transport(tier="RDMA", rdma=Rdma(resource_name="rdma/hca", count=2))
    spec = replace(QWEN, transport=transport)
    assert transport.effective_tier is Tier.RDMA
    for name, pod in pods(spec).items():
        (container,) = pod["containers"]
        gpus = {"target": "2", "draft": "1"}[name]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": gpus, "rdma/hca": "2"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
            "readOnlyRootFilesystem": True,
        }
        assert "hostIPC" not in pod
        assert [each["name"] for each in pod["initContainers"]] == ["fetch"]
        assert [each["name"] for each in pod["volumes"]] == ["tmp", "cache", "shm"]
        assert not [each for each in variables(pod) if each.startswith("NCCL")]


def test_auto_with_a_card_is_rdma() -> None:
    named = replace(RDMA, transport=replace(RDMA.transport, tier="RDMA"))
    assert pods(named) == pods(RDMA)
    assert variables(pods(RDMA)["draft"])["NCCL_IB_GID_INDEX"] == {"value": "3"}


@pytest.mark.parametrize("component", ["target", "draft"])
def test_pods_over_nvlink_look_like_one_host_to_nccl(component: str) -> None:
    pod = pods(NVLINK)[component]
    assert pod["hostIPC"] is True
    assert pod["containers"][0]["securityContext"] == {
        "privileged": True,
        "readOnlyRootFilesystem": True,
    }
    volumes = {each.pop("name"): each for each in map(dict, pod["volumes"])}
    assert set(volumes) == {"tmp", "cache"}, "/dev/shm is the host's: with hostIPC it is shared"
    path = f"/var/run/ssd/default.{UID}"
    assert volumes["tmp"] == {"hostPath": {"path": path, "type": "DirectoryOrCreate"}}
    assert "/dev/shm" not in str(pod["containers"][0]["volumeMounts"])
    found = variables(pod)
    assert found["NCCL_HOSTID"] == {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert found["NCCL_P2P_LEVEL"] == {"value": "NVL"}
    assert found["NCCL_IPC_USE_ABSTRACT_SOCKET"] == found["NCCL_RAS_ENABLE"] == {"value": "0"}
    assert found["NCCL_CUMEM_ENABLE"] == {"value": "0"}, "the user's word wins"


def test_root_gives_the_shared_folder_away_and_the_processes_stay_who_they_are() -> None:
    pod = pods(NVLINK)["target"]
    scratch, fetch = pod["initContainers"]
    assert fetch["name"] == "fetch", "it writes to the folder: it comes after"
    assert scratch["image"] == pod["containers"][0]["image"]
    assert scratch["command"] == [
        *("python", "-c"),
        "import os; os.chown('/tmp', 10001, 10001); os.chmod('/tmp', 0o700)",
    ]
    assert scratch["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert scratch["securityContext"]["runAsUser"] == 0
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_two_resources_never_share_a_folder_of_a_node() -> None:
    one, other = resource(NVLINK), replace(resource(NVLINK), uid="another")
    folders = {
        target_template(each, CONFIG, 0)["spec"]["volumes"][0]["hostPath"]["path"]
        for each in (one, other, replace(one, namespace="elsewhere"))
    }
    assert len(folders) == 3


@pytest.mark.parametrize("transport", [NVLINK.transport, RDMA.transport])
def test_the_host_id_is_never_a_users(transport: Transport) -> None:
    constant = replace(transport, nccl_env={"NCCL_HOSTID": "one"})
    for pod in pods(replace(QWEN, transport=constant)).values():
        assert variables(pod).get("NCCL_HOSTID") != {"value": "one"}


def test_no_sidecar_stands_between_two_ends_of_nccl_unless_the_user_insists() -> None:
    off = {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"}
    assert annotations(NVLINK) == annotations(RDMA) == off
    insists = PodTemplate(annotations={"linkerd.io/inject": "enabled"})
    spec = replace(NVLINK, target=replace(NVLINK.target, pod_template=insists))
    assert annotations(spec) == off | {"linkerd.io/inject": "enabled"}


def test_a_tier_changes_no_other_pod() -> None:
    assert annotations(LLAMA) == {}
    assert "rdma" not in str(pods(LLAMA))
