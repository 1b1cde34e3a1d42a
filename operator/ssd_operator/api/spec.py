"""An SSDDeployment as the operator reads it: typed, complete, every default filled in.

Field names are those of the resource in snake case. ``parse`` is the only way in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

GROUP = "ssd.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "SSDDeployment"
PLURAL = "ssddeployments"

GPU = "nvidia.com/gpu"
"""Extended resource of a whole GPU, and the taint of GPU nodes, also of those with MIG slices."""

Object = dict[str, Any]
"""A Kubernetes object as JSON has it."""


class Accelerator(StrEnum):
    """Device of target and drafts."""

    NVIDIA = "nvidia"
    CPU = "cpu"


class Sharing(StrEnum):
    """Which drafts a target dials."""

    CELL = "Cell"
    POOL = "Pool"


class ScalingMode(StrEnum):
    """Who writes ``draft.replicas``."""

    NONE = "None"
    INTERNAL = "Internal"
    HPA = "HPA"
    KEDA = "KEDA"
    EXTERNAL = "External"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKey:
    """A key of a Secret in the resource's namespace."""

    name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where weights come from."""

    uri: str
    revision: str = ""
    token_secret: SecretKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How the model is served; empty or 0 leaves it to the process."""

    name: str = ""
    max_model_len: int = 0
    dtype: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The target engine's own settings; None leaves one to the process."""

    max_num_seqs: int | None = None
    max_queue: int | None = None
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOverrides:
    """What the pods of targets or of drafts have of their own."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    priority_class_name: str = ""
    env: tuple[Object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTemplate:
    """The subset of a pod that users may set; lists and maps as in the pod's own schema."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Object, ...] = ()
    priority_class_name: str = ""
    runtime_class_name: str = ""
    scheduler_name: str = ""
    image_pull_secrets: tuple[Object, ...] = ()
    env: tuple[Object, ...] = ()
    volumes: tuple[Object, ...] = ()
    volume_mounts: tuple[Object, ...] = ()

    def overridden(self, own: PodOverrides) -> "PodTemplate":
        """The template with what one kind of pods has of its own, which has precedence."""
        by_name = {each["name"]: each for each in (*self.env, *own.env)}
        return replace(
            self,
            labels={**self.labels, **own.labels},
            annotations={**self.annotations, **own.annotations},
            node_selector={**self.node_selector, **own.node_selector},
            priority_class_name=own.priority_class_name or self.priority_class_name,
            env=tuple(by_name.values()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The verifiers: one pod a cell."""

    source: Source
    replicas: int = 1
    tensor_parallel_size: int = 1
    """Filled in: 4 for nvidia, 1 for cpu, where the resource says nothing."""
    gpu_resource: str = GPU
    engine: Engine = field(default_factory=Engine)
    image: str = ""
    resources: Object = field(default_factory=dict)
    startup_timeout_seconds: int = 1800
    drain_seconds: int = 300
    pod_template: PodOverrides = field(default_factory=PodOverrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """Bounds and tempo of the number of drafts."""

    mode: ScalingMode = ScalingMode.INTERNAL
    min_replicas: int = 1
    max_replicas: int = 4
    target_occupancy: float = 0.8
    scale_down_stabilization_seconds: int = 300
    cooldown_seconds: int = 30
    keda_server_address: str = ""
    keda_fallback_replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The drafts of all cells together."""

    source: Source
    replicas: int = 1
    sharing: Sharing = Sharing.CELL
    sequences_per_replica: int = 32
    drain_seconds: int = 20
    gpu_resource: str = GPU
    image: str = ""
    resources: Object = field(default_factory=dict)
    startup_timeout_seconds: int = 600
    autoscaling: Autoscaling | None = None
    pod_template: PodOverrides = field(default_factory=PodOverrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Shapes and policies of speculation."""

    lookahead: int = 6
    branches: int = 24
    fan_out: str = "Adaptive"
    backup: str = "Ngram"
    draft_deadline_milliseconds: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Requirements on the links between targets and drafts."""

    max_round_trip_microseconds: int = 0
    """0 sets no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Drafts beside their target."""

    policy: str = "Auto"
    topology_key: str = "kubernetes.io/hostname"
    exclusive_node: bool = False
    gpu_products: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCache:
    """Where fetched weights stay between starts."""

    type: str = "EmptyDir"
    host_path: str = ""
    claim_name: str = ""
    size_limit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Who may call."""

    network_policy: bool = True
    clients: tuple[Object, ...] = ()
    """NetworkPolicy peers; empty for any pod of the cluster."""
    read_only_root_filesystem: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Observability:
    """What is published."""

    pod_monitor: bool = False
    reflection: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the user asked for."""

    accelerator: Accelerator
    target: Target
    draft: Draft
    paused: bool = False
    pod_template: PodTemplate = field(default_factory=PodTemplate)
    model: Model = field(default_factory=Model)
    speculation: Speculation = field(default_factory=Speculation)
    transport: Transport = field(default_factory=Transport)
    placement: Placement = field(default_factory=Placement)
    model_cache: ModelCache = field(default_factory=ModelCache)
    security: Security = field(default_factory=Security)
    observability: Observability = field(default_factory=Observability)

    @property
    def num_cells(self) -> int:
        """One target pod each."""
        return self.target.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One SSDDeployment of the API server."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: Spec
    annotations: Mapping[str, str] = field(default_factory=dict)
    is_deleting: bool = False


def drafts_of_cell(replicas: int, num_cells: int, cell: int) -> int:
    """Drafts of one cell: n // C each, the first n mod C cells one more."""
    each, left = divmod(replicas, num_cells)
    return each + (cell < left)
