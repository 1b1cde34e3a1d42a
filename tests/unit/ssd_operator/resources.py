"""Sample resources of tests. Run as a module, it writes the snapshots again, for review."""

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from hypothesis import strategies as st

from ssd_operator.api.gateway import Gateway
from ssd_operator.api.kubernetes_types import ObjectKey
from ssd_operator.api.model_cache import ModelCache
from ssd_operator.api.parse import parse
from ssd_operator.api.security import Security, Tls
from ssd_operator.api.spec import (
    Accelerator,
    Autoscaling,
    DraftSpec,
    Object,
    Placement,
    Resource,
    ScalingMode,
    Sharing,
    Source,
    Spec,
    Speculation,
    TargetSpec,
    Transport,
    drafts_of_cell,
)
from ssd_operator.children.manifests import wanted
from ssd_operator.children.objects import (
    CELL_LABEL,
    COMPONENT_LABEL,
    HASH_ANNOTATION,
    REVISION_LABEL,
    Component,
    Workload,
    draft_cell,
    draft_cells,
)
from ssd_operator.children.pods import USER, engine_template
from ssd_operator.observe.pod_state import cell_of, name_of
from ssd_operator.settings import OperatorSettings

ROOT = Path(__file__).resolve().parents[3]
SNAPSHOTS = Path(__file__).parent / "snapshots"
RESTRICTED_VOLUMES = {"name", "emptyDir", "persistentVolumeClaim", "configMap", "secret"}
CORPUS = ROOT / "tests" / "cluster" / "crd" / "good"


class PinnedSettings(OperatorSettings):
    """Settings whose manifests stay the same when the product has a new version."""

    version = "0.1.0"


SETTINGS = PinnedSettings(
    target_image="localhost/ssd-target:0.1.0",
    draft_image="localhost/ssd-draft:0.1.0",
    vllm_image="localhost/ssd-vllm:0.1.0",
    gateway_image="localhost/ssd-gateway:0.1.0",
    pod_namespace="ssd",
)
UID = "0f0e0d0c-0b0a-0908-0706-050403020100"
DEMO_TARGET, DEMO_DRAFT = Source(uri="demo://target"), Source(uri="demo://draft")
TOKEN = {"name": "hf", "key": "token"}


def resource(spec: Spec, name: str = "demo", **annotations: str) -> Resource:
    return Resource(
        namespace="default",
        name=name,
        uid=UID,
        generation=1,
        spec=spec,
        annotations={f"ssd.dev/{key}": value for key, value in annotations.items()},
    )


def parsed(document: Object) -> Resource:
    """The resource of a document, as an API server with nothing else stores it."""
    about = document["metadata"] | {"namespace": "default", "uid": UID, "generation": 1}
    return parse(document | {"metadata": about})


def read(path: Path) -> Resource:
    """The resource of a file."""
    return parsed(yaml.safe_load(path.read_text()))


def replicas_of(resource: Resource) -> dict[int, int]:
    """Replicas of the draft Deployments when nothing is being drained."""
    cells = draft_cells(resource)
    wanted_drafts = resource.spec.draft.replicas
    return {cell: drafts_of_cell(wanted_drafts, len(cells), cell) for cell in cells}


def children(resource: Resource, settings: OperatorSettings = SETTINGS) -> list[Object]:
    return wanted(resource, settings, replicas_of(resource))


def reviewed(name: str) -> list[Object]:
    """Children of a sample as in its snapshot.

    Children of later cells, which differ in their number only, are left out, and so are owner and
    namespace, which all children share. A snapshot beside ``everything`` has only what that sample
    lacks: policies, and drafts of a cell.
    """
    first = [each for each in children(SAMPLES[name]) if cell_of(each) == 0]
    if name != "everything":
        first = [each for each in first if is_of_cell(each) or each["kind"] == "NetworkPolicy"]
    # As JSON, values that several objects share are written out.
    made: list[Object] = json.loads(json.dumps(first))
    for each in made:
        del each["metadata"]["namespace"], each["metadata"]["ownerReferences"]
    return made


def is_of_cell(child: Object) -> bool:
    return CELL_LABEL in child["metadata"]["labels"]


def without_hashes(child: Object) -> str:
    """An object as JSON, with no value for the hashes that contain its name."""
    text = json.dumps(child)
    return re.sub(rf'("({HASH_ANNOTATION}|{REVISION_LABEL})": )"\w+"', r"\1", text)


def of_kind(
    resource: Resource, kind: str, settings: OperatorSettings = SETTINGS
) -> dict[str, Object]:
    """Its children of a kind, by name."""
    made = children(resource, settings)
    return {name_of(each): each for each in made if each["kind"] == kind}


def deployments(resource: Resource, component: str) -> list[Object]:
    """Those of targets or of drafts, by cell."""
    made = of_kind(resource, "Deployment").values()
    return [each for each in made if each["metadata"]["labels"][COMPONENT_LABEL] == component]


def template_of(
    resource: Resource, component: Component = Component.TARGET, cell: int = 0
) -> Object:
    """Pod template of the target or the drafts of a cell."""
    own = draft_cell(resource, cell) if component is Component.DRAFT else cell
    workload = Workload(resource=resource, settings=SETTINGS, component=component, cell=own)
    return engine_template(workload)


def not_restricted(pod: Object) -> list[str]:
    """What the Pod Security level ``restricted`` rejects in a pod."""
    context, faults = pod["securityContext"], []
    if not context["runAsNonRoot"] or context["seccompProfile"]["type"] != "RuntimeDefault":
        faults.append("user or seccomp")
    faults += [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    faults += [each["name"] for each in pod["volumes"] if not set(each) <= RESTRICTED_VOLUMES]
    for container in pod["containers"] + pod.get("initContainers", []):
        own, name = container["securityContext"], container["name"]
        if own.get("privileged") or own["allowPrivilegeEscalation"]:
            faults.append(f"{name} may gain privileges")
        elif own["capabilities"] != {"drop": ["ALL"]}:
            faults.append(f"{name} has {', '.join(own['capabilities']['add'])}")
        if own.get("runAsUser", USER) == 0:
            faults.append(f"{name} is root")
        faults += [str(port) for port in container.get("ports", []) if "hostPort" in port]
    return faults


OPERATOR_PEER = {
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "ssd-operator"}},
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ssd"}},
}
"""The operator in a NetworkPolicy."""


def secured(mode: Literal["Server", "Mutual"] = "Mutual", **tls: Any) -> Security:
    """Certificates and tokens."""
    names = {"target_secret_name": "target-tls", "draft_secret_name": "draft-tls"}
    return Security(tls=Tls(mode=mode, **(tls | names)), token_secret_name="tokens")


def cpu_demo(
    draft: DraftSpec | None = None,
    target: TargetSpec | None = None,
    security: Security | None = None,
) -> Spec:
    return Spec(
        accelerator="cpu",
        target=target or TargetSpec(source=DEMO_TARGET),
        draft=draft or DraftSpec(source=DEMO_DRAFT, replicas=2),
        speculation=Speculation(draft_deadline_milliseconds=20),
        security=security or Security(),
    )


SAMPLES = {
    path.stem: read(path)
    for path in (
        *sorted((ROOT / "charts" / "ssd" / "samples").glob("*.yaml")),
        CORPUS / "everything.yaml",
    )
}
"""The samples of the chart, and a resource with every field."""
REVIEWED = ("llama-3.1-70b", "everything")
"""Samples with a snapshot; see ``reviewed``."""
DEMO, TWO_CELLS = SAMPLES["demo-cpu"], SAMPLES["llama-3.1-70b"]
LLAMA, QWEN = TWO_CELLS.spec, SAMPLES["qwen3-32b"].spec
CPU_DRAFTS = SAMPLES["llama-3.1-70b-cpu-drafts"].spec
POOL = LLAMA.changed(draft=LLAMA.draft.changed(sharing="Pool"))


def hub(name: str, token: ObjectKey | None = None) -> Source:
    return Source(uri=f"hf://{name}", revision="0" * 40, token_secret_ref=token)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Specs that the schema accepts."""
    accelerator = draw(st.sampled_from(get_args(Accelerator)))
    is_gpu = accelerator == "nvidia"
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
            Autoscaling, mode=st.sampled_from(get_args(ScalingMode)), max_replicas=st.just(9)
        )
    )
    return Spec(
        accelerator=accelerator,
        target=TargetSpec(
            source=source if is_gpu else DEMO_TARGET,
            replicas=draw(st.integers(1, 8)),
            tensor_parallel_size=draw(st.sampled_from([1, 2, 4, 8])) if is_gpu else 1,
            drain_seconds=draw(st.integers(0, 3600)),
            startup_timeout_seconds=draw(st.integers(10, 7200)),
        ),
        draft=DraftSpec(
            source=source if is_gpu else DEMO_DRAFT,
            replicas=draw(st.integers(0, 64)),
            sharing=draw(st.sampled_from(get_args(Sharing))),
            sequences_per_replica=draw(st.integers(1, 256)),
            device=draw(st.sampled_from([None, "cpu", accelerator])),
            autoscaling=autoscaling,
        ),
        placement=Placement(
            policy=draw(st.sampled_from(["Auto", "Required", "Preferred", "None"])),
            exclusive_node=draw(st.booleans()),
            gpu_products=draw(st.sampled_from([(), ("H100",), ("H100", "H200")])),
        ),
        model_cache=cache,
        transport=draw(
            st.sampled_from(
                [
                    Transport(),
                    Transport(channel="Collective"),
                    Transport(max_round_trip_microseconds=900),
                ]
            )
        ),
        security=Security(
            network_policy=draw(st.booleans()), read_only_root_filesystem=draw(st.booleans())
        ),
        gateway=Gateway(enabled=draw(st.booleans()), replicas=draw(st.integers(1, 16))),
    )


NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)


if __name__ == "__main__":
    for title in REVIEWED:
        made = reviewed(title)
        text = yaml.safe_dump_all(made, sort_keys=False, default_flow_style=None, width=120)
        (SNAPSHOTS / f"{title}.yaml").write_text(text)
