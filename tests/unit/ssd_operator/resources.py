"""Sample resources of tests. Run as a module, it writes the snapshots again, for review."""

import copy
from pathlib import Path

import yaml
from hypothesis import strategies as st

from ssd_operator.api.kubernetes_types import ObjectKey
from ssd_operator.api.pod_template import PodOverrides, PodTemplate
from ssd_operator.api.spec import (
    Accelerator,
    Autoscaling,
    Draft,
    Engine,
    Keda,
    Model,
    ModelCache,
    Object,
    Observability,
    Placement,
    Resource,
    ScalingMode,
    Security,
    Sharing,
    Source,
    Spec,
    Speculation,
    Target,
    Transport,
    drafts_of_cell,
)
from ssd_operator.children.kinds import KINDS
from ssd_operator.children.manifests import wanted
from ssd_operator.children.names import COMPONENT_LABEL, REVISION_LABEL, draft_cells
from ssd_operator.children.objects import ChildFactory
from ssd_operator.observe.cluster import ref_of
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.preflight import preflight_state
from ssd_operator.settings import OperatorSettings

SNAPSHOTS = Path(__file__).parent / "snapshots"


class PinnedSettings(OperatorSettings):
    """Settings whose manifests stay the same when the product has a new version."""

    version = "0.1.0"


SETTINGS = PinnedSettings(
    target_image="localhost/ssd-target:0.1.0",
    draft_image="localhost/ssd-draft:0.1.0",
    pod_namespace="ssd",
)
UID = "0f0e0d0c-0b0a-0908-0706-050403020100"
REVISION = "0123456789abcdef0123456789abcdef01234567"
DEMO_TARGET, DEMO_DRAFT = Source(uri="demo://target"), Source(uri="demo://draft")
KEDA = Keda(server_address="http://prometheus.monitoring:9090")
TOKEN = ObjectKey(name="hf", key="token")


def resource(spec: Spec, name: str = "demo", **annotations: str) -> Resource:
    return Resource(
        namespace="default",
        name=name,
        uid=UID,
        generation=1,
        spec=spec,
        annotations={f"ssd.dev/{key}": value for key, value in annotations.items()},
    )


def hub(name: str, token: ObjectKey | None = None) -> Source:
    return Source(uri=f"hf://{name}", revision=REVISION, token_secret_ref=token)


def replicas_of(resource: Resource) -> dict[int, int]:
    """Replicas of the draft Deployments when nothing is being drained."""
    cells = draft_cells(resource)
    wanted_drafts = resource.spec.draft.replicas
    return {cell: drafts_of_cell(wanted_drafts, len(cells), cell) for cell in cells}


def children(resource: Resource, settings: OperatorSettings = SETTINGS) -> list[Object]:
    return wanted(resource, settings, replicas_of(resource), KINDS)


def cpu_demo(
    draft: Draft | None = None, target: Target | None = None, security: Security | None = None
) -> Spec:
    return Spec(
        accelerator=Accelerator.CPU,
        target=target or Target(source=DEMO_TARGET),
        draft=draft or Draft(source=DEMO_DRAFT, replicas=2),
        speculation=Speculation(draft_deadline_milliseconds=20),
        security=security or Security(),
    )


LLAMA = Spec(
    accelerator=Accelerator.NVIDIA,
    target=Target(
        source=hub("meta-llama/Llama-3.1-70B-Instruct", TOKEN), replicas=2, tensor_parallel_size=4
    ),
    draft=Draft(
        source=hub("meta-llama/Llama-3.2-1B-Instruct", TOKEN),
        replicas=3,
        autoscaling=Autoscaling(mode=ScalingMode.INTERNAL, min_replicas=2, max_replicas=8),
    ),
    placement=Placement(exclusive_node=True, gpu_products=("NVIDIA-H100-80GB-HBM3",)),
    model_cache=ModelCache(type="PVC", claim_name="weights"),
)
QWEN = Spec(
    accelerator=Accelerator.NVIDIA,
    target=Target(source=hub("Qwen/Qwen3-32B"), tensor_parallel_size=2),
    draft=Draft(
        source=hub("Qwen/Qwen3-0.6B"),
        replicas=2,
        resources={"requests": {"ephemeral-storage": "8Gi"}},
    ),
    model_cache=ModelCache(size_limit="80Gi"),
)
POOL = Spec(
    accelerator=Accelerator.NVIDIA,
    target=Target(source=Source(uri="pvc://weights/llama-70b"), replicas=2, tensor_parallel_size=4),
    draft=Draft(source=Source(uri="pvc://weights/llama-1b"), replicas=4, sharing=Sharing.POOL),
)
EVERYTHING = Spec(
    accelerator=Accelerator.CPU,
    model=Model(name="tiny", max_model_len=512, dtype="float32"),
    target=Target(
        source=DEMO_TARGET,
        replicas=2,
        engine=Engine(max_num_seqs=8, max_queue=0, deterministic=True),
        image="localhost/ssd-target@sha256:00",
        resources={"requests": {"cpu": "2500m"}, "limits": {"memory": "4Gi"}},
        startup_timeout_seconds=61,
        drain_seconds=60,
        pod_template=PodOverrides(env=({"name": "SSD_TARGET_LOG_FORMAT", "value": "text"},)),
    ),
    pod_template=PodTemplate(
        labels={"team": "serving", "app.kubernetes.io/part-of": "theirs"},
        annotations={"note": "kept"},
        node_selector={"pool": "engines"},
        tolerations=({"key": "kwok.x-k8s.io/node", "operator": "Exists"},),
        priority_class_name="high",
        runtime_class_name="kata",
        scheduler_name="theirs",
        image_pull_secrets=({"name": "registry"},),
        env=(
            {"name": "SSD_TARGET_MAX_QUEUE", "value": "7"},
            {"name": "SSD_TARGET_POD_NAME", "value": "an-impostor"},
            {"name": "SSD_TARGET_LOG_FORMAT", "value": "json"},
        ),
        volumes=({"name": "extra", "configMap": {"name": "extra"}},),
        volume_mounts=({"name": "extra", "mountPath": "/extra"},),
    ),
    draft=Draft(
        source=DEMO_DRAFT,
        replicas=3,
        sequences_per_replica=8,
        drain_seconds=10,
        pod_template=PodOverrides(
            labels={"team": "drafts"}, node_selector={"gpu": "small"}, priority_class_name="low"
        ),
    ),
    speculation=Speculation(
        lookahead=4, branches=12, fan_out="Uniform", backup="None", draft_deadline_milliseconds=50
    ),
    transport=Transport(max_round_trip_microseconds=900),
    placement=Placement(policy="None"),
    model_cache=ModelCache(type="HostPath", host_path="/var/lib/ssd"),
    security=Security(
        clients=({"podSelector": {"matchLabels": {"app": "chat"}}},),
        read_only_root_filesystem=False,
    ),
    observability=Observability(pod_monitor=True, reflection=True),
)


def scaled(mode: ScalingMode) -> Spec:
    """The demo with an autoscaler that is not the operator."""
    autoscaling = Autoscaling(
        mode=mode,
        max_replicas=6,
        keda=KEDA,
    )
    return cpu_demo(draft=Draft(source=DEMO_DRAFT, autoscaling=autoscaling))


SAMPLES = {
    "cpu-demo": resource(cpu_demo()),
    "llama-70b-two-cells": resource(LLAMA, "llama-70b"),
    "qwen3": resource(QWEN, "qwen3-32b"),
    "pool": resource(POOL, "pooled"),
    "hpa": resource(scaled(ScalingMode.HPA)),
    "keda": resource(scaled(ScalingMode.KEDA)),
    "everything": resource(EVERYTHING, "all", restart="1700000000"),
}


PREFLIGHTS = ("everything", "llama-70b-two-cells")
"""Samples whose preflight is reviewed, too."""


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Specs that the schema accepts."""
    accelerator = draw(st.sampled_from(Accelerator))
    is_gpu = accelerator is Accelerator.NVIDIA
    source = draw(st.sampled_from([hub("a/b", TOKEN), hub("a/b"), Source(uri="pvc://claim/x")]))
    cache = draw(
        st.sampled_from(
            [
                ModelCache(),
                ModelCache(size_limit="10Gi"),
                ModelCache(type="PVC", claim_name="weights"),
                ModelCache(type="HostPath", host_path="/srv"),
            ]
        )
    )
    autoscaling = draw(
        st.none()
        | st.builds(
            Autoscaling,
            mode=st.sampled_from(ScalingMode),
            max_replicas=st.just(9),
            keda=st.just(KEDA),
        )
    )
    return Spec(
        accelerator=accelerator,
        target=Target(
            source=source if is_gpu else DEMO_TARGET,
            replicas=draw(st.integers(1, 8)),
            tensor_parallel_size=draw(st.sampled_from([1, 2, 4, 8])) if is_gpu else 1,
            drain_seconds=draw(st.integers(0, 3600)),
            startup_timeout_seconds=draw(st.integers(10, 7200)),
        ),
        draft=Draft(
            source=source if is_gpu else DEMO_DRAFT,
            replicas=draw(st.integers(0, 64)),
            sharing=draw(st.sampled_from(Sharing)),
            sequences_per_replica=draw(st.integers(1, 256)),
            autoscaling=autoscaling,
        ),
        placement=Placement(
            policy=draw(st.sampled_from(["Auto", "Required", "Preferred", "None"])),
            exclusive_node=draw(st.booleans()),
            gpu_products=draw(st.sampled_from([(), ("H100",), ("H100", "H200")])),
        ),
        model_cache=cache,
        transport=draw(st.sampled_from([Transport(), Transport(max_round_trip_microseconds=900)])),
        security=Security(
            network_policy=draw(st.booleans()), read_only_root_filesystem=draw(st.booleans())
        ),
        observability=Observability(pod_monitor=draw(st.booleans())),
    )


NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)


def as_yaml(objects: list[Object]) -> str:
    return str(yaml.safe_dump_all(objects, sort_keys=False, default_flow_style=None, width=120))


def preflight_of(resource: Resource) -> Object:
    """The preflight pod of this resource for a target on node ``n1``."""
    targets = [
        each
        for each in children(resource)
        if each["kind"] == "Deployment" and each["metadata"]["labels"][COMPONENT_LABEL] == "target"
    ]
    live = copy.deepcopy(targets)
    for each in live:
        each["spec"]["template"]["metadata"]["labels"][REVISION_LABEL] = "older"
    pod: Object = {
        "metadata": {"name": "t0", "labels": live[0]["spec"]["template"]["metadata"]["labels"]},
        "spec": {"nodeName": "n1"},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    snapshot = Snapshot(
        resource=resource, now=0.0, children={ref_of(each): each for each in live}, pods=(pod,)
    )
    factory = ChildFactory(resource=resource, settings=SETTINGS)
    made = preflight_state(factory, targets, targets, snapshot).pod
    assert made is not None
    return made


if __name__ == "__main__":
    for title, sample in SAMPLES.items():
        (SNAPSHOTS / f"{title}.yaml").write_text(as_yaml(children(sample)))
    for title in PREFLIGHTS:
        (SNAPSHOTS / f"preflight-{title}.yaml").write_text(as_yaml([preflight_of(SAMPLES[title])]))
