"""The spec of an SSDDeployment: the one description of its fields.

The CRD is generated from these models (``schema.py``), and ``parse.py`` reads resources with them.
Docstrings of blocks and fields are what ``kubectl explain`` shows. Each states which pods a change
replaces: none, all targets (one cell after another) or all drafts (one after another).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from ssd_operator.api import reserved
from ssd_operator.api.engine_rules import VLLM_ARGS_RULES, VLLM_RULES
from ssd_operator.api.fields import RESOURCE_NAME, Block, Visible, between, checked, rules, text
from ssd_operator.api.gateway import Gateway
from ssd_operator.api.kubernetes_types import ObjectKey, Resources
from ssd_operator.api.model_cache import ModelCache
from ssd_operator.api.pod_template import PodOverrides, PodTemplate
from ssd_operator.api.security import Security

GROUP = reserved.GROUP
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "SSDDeployment"
PLURAL = "ssddeployments"
POOL_KIND = "SSDDraftPool"
POOL_PLURAL = "ssddraftpools"
RESOURCE_KINDS = frozenset({KIND, POOL_KIND})
"""Kinds that have passes; objects of other kinds are children."""

GPU = "nvidia.com/gpu"
"""Extended resource of a whole GPU, and the taint of GPU nodes, also of those with MIG slices."""

Object = dict[str, Any]
"""A Kubernetes object as JSON has it."""

_MOST_DRAFTS = 64
_URI = (
    r"^(demo://(target|draft)"
    r"|hf://[A-Za-z0-9][-A-Za-z0-9_.]*/[A-Za-z0-9][-A-Za-z0-9_.]*"
    r"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[-A-Za-z0-9_./]*)?)$"
)

Accelerator = Literal["nvidia", "cpu"]
Sharing = Literal["Cell", "Pool"]
ScalingMode = Literal["None", "Internal", "External"]


class ModelFormat(Block):
    """Length and number format, which targets and drafts share."""

    max_model_len: Annotated[int, between(128, 1 << 20)] | None = None
    """Maximum prompt and output tokens of a sequence; absent means the model's own length.
    A change replaces targets and drafts."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Number format of arithmetic and KV. auto: bfloat16 on GPUs, and the faster one for the model
    on CPUs; status.model shows the choice and its reason. A change replaces targets and drafts."""


class Model(ModelFormat):
    """How the model is served."""

    name: Annotated[str, text(128, pattern="^[!-~]*$")] | None = None
    """Id that clients use; absent means the name of the resource. A change replaces targets."""


class Source(Block):
    """Where the weights come from. A change replaces the pods that load them."""

    model_config = checked(
        (
            f"self.uri.matches(r'{_URI}')",
            "uri: give demo://target or demo://draft, hf://org/name, or pvc://claim/path; "
            "a folder of a node is reached through a claim",
        ),
        ("!self.uri.contains('..')", "uri: '..' is not allowed, write the path itself"),
        (
            "self.uri.startsWith('hf://') == has(self.revision)",
            "revision: required with hf:// and refused elsewhere; give the commit's 40 hex digits",
        ),
        (
            "!has(self.tokenSecretRef) || self.uri.startsWith('hf://')",
            "tokenSecretRef: only an hf:// model has one, leave it out",
        ),
    )
    uri: Annotated[str, text(512)]
    """demo://target or demo://draft (the embedded pair), hf://org/name (Hugging Face), or
    pvc://claim/path (a folder of a claim, mounted read-only)."""
    revision: Annotated[str, text(40, pattern="^[0-9a-f]{40}$")] | None = None
    """Commit of an hf:// model, 40 hex digits, so that every pod loads identical weights."""
    token_secret_ref: ObjectKey | None = None
    """Access token of an hf:// model. Only the container that fetches the model receives it; the
    operator never reads it."""

    @property
    def is_on_hub(self) -> bool:
        """Whether the model is fetched before the engine starts."""
        return self.uri.startswith("hf://")

    @property
    def claim(self) -> str:
        """Claim of a ``pvc://claim/path`` source; empty for others."""
        return self.uri[6:].partition("/")[0] if self.uri.startswith("pvc://") else ""

    @property
    def folder(self) -> str:
        """Folder of a claim in the pod; other sources as they are."""
        path = self.uri.removeprefix(f"pvc://{self.claim}").strip("/")
        return f"{reserved.MODELS_FOLDER}/{path}".rstrip("/") if self.claim else self.uri


class SsdEngine(Block):
    """Settings of a target with engine ssd. A change replaces targets."""

    max_num_seqs: Annotated[int, between(1, 256)] | None = None
    """Maximum number of running sequences; absent means the default of the process."""
    max_queue: Annotated[int, between(0, 100_000)] | None = None
    """Maximum number of waiting requests; further requests are refused. Absent means the default
    of the process."""
    deterministic: bool = False
    """Whether tokens never depend on the other running sequences; decoding is slower."""


class Process(Block):
    """Settings that targets and drafts share. A change replaces their pods."""

    source: Source
    weights: Literal["Auto", "Same", "Int8", "Int4"] = "Auto"
    """Format of the weights in memory. Same: that of dtype. Int8, Int4: quantised by the process
    when it loads the model, only on CPUs. Auto: not quantised for a target, and what makes tables
    sooner for a draft. A change replaces the pods."""
    gpu_resource: Annotated[
        str, text(253, pattern=r"^[a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*$")
    ] = GPU
    """Extended resource that is one GPU, or one MIG slice such as nvidia.com/mig-1g.10gb. Unused
    by pods on CPUs. A change replaces the pods."""
    image: Visible | None = None
    """Image; absent means the image of the chart. A chart upgrade does not replace pods whose image
    is pinned by digest. A change replaces the pods."""
    resources: Resources = Field(default_factory=Resources)
    """CPU, memory and disk of a pod; an amount given here replaces the operator's own. Of drafts on
    the CPUs of GPU nodes, it is request and limit. A change replaces the pods."""
    pod_template: PodOverrides = Field(default_factory=PodOverrides)


class TargetSpec(Process):
    """The model whose text is served, one pod per cell."""

    replicas: Annotated[int, between(1, 8)] = 1
    """Number of cells; a cell is one target with its drafts. A change replaces no pod; the cell
    with the highest number is removed first."""
    tensor_parallel_size: Literal[1, 2, 4, 8] | None = None
    """GPUs of a target, 1, 2, 4 or 8, with one rank of the model on each; absent means 4. It must
    divide the attention heads of the model. vLLM receives it as --tensor-parallel-size. Refused
    with accelerator cpu. Cannot change."""
    engine: Literal["ssd", "vllm"] = "ssd"
    """Program that serves the model. vllm: vLLM's OpenAI server with the plugin ssd_vllm, which
    clients call at http://NAME:8000/v1. A change replaces targets."""
    ssd: SsdEngine | None = None
    """Settings of engine ssd; refused with engine vllm."""
    args: Annotated[
        tuple[Annotated[str, text(1024, least=1)], ...],
        Field(max_length=64, json_schema_extra=rules(*VLLM_ARGS_RULES)),
    ] = ()
    """Additional arguments of vLLM's server, such as --max-num-seqs=64; refused with engine ssd,
    and so are those that other fields set. A change replaces targets."""
    startup_timeout_seconds: Annotated[int, between(10, 7200)] = 1800
    """Maximum time from the start of a pod until it is ready; after that it is restarted. A change
    replaces targets."""
    drain_seconds: Annotated[int, between(0, 3600)] = 300
    """Time after SIGTERM in which open streams may finish. A change replaces targets."""


class Autoscaling(Block):
    """Scaling of the drafts; absent leaves replicas as it is. A change replaces no pod."""

    model_config = checked(
        (
            "self.minReplicas <= self.maxReplicas",
            "minReplicas is above maxReplicas: lower the one or raise the other",
        ),
    )
    mode: ScalingMode = "Internal"
    """Who writes replicas. None: you. Internal: the operator. External: another scaler, such
    as an HPA, through /scale; the other fields are then unused."""
    min_replicas: Annotated[int, between(0, _MOST_DRAFTS)] = 1
    """Minimum number of drafts. With sharing Cell, Internal keeps at least one in each cell."""
    max_replicas: Annotated[int, between(1, _MOST_DRAFTS)] = 4
    """Maximum number of drafts."""
    target_occupancy: Annotated[
        str, text(8, pattern=r"^(0\.(0[1-9]|[1-9][0-9]?)[0-9]{0,2}|1(\.0{1,4})?)$")
    ] = "0.8"
    """Wanted sessions divided by sustainable sessions, 0.01 to 1, as a string."""
    scale_down_stabilization_seconds: Annotated[int, between(0, 3600)] = 300
    """Time for which demand must have been lower before drafts are removed."""
    cooldown_seconds: Annotated[int, between(0, 600)] = 30
    """Minimum time from any change to a scale-down. Scale-ups are 10 s apart."""


class Drafts(Process):
    """Drafts: those of one resource, or a pool."""

    replicas: Annotated[int, between(0, _MOST_DRAFTS)] = 1
    """Number of drafts, of all cells together and spread evenly over them. kubectl scale and
    autoscalers write it. A change replaces no pod; a draft is drained before it is removed."""
    sequences_per_replica: Annotated[int, between(1, 256)] = 32
    """Maximum number of sessions of a draft, and its assumed sustainable sessions until they are
    measured. A change replaces drafts."""
    drain_seconds: Annotated[int, between(1, 300)] = 20
    """Deadline of a drain. A change replaces drafts."""
    startup_timeout_seconds: Annotated[int, between(10, 7200)] = 600
    """Maximum time from the start of a pod until it is ready; after that it is restarted. A change
    replaces drafts."""
    autoscaling: Autoscaling | None = None


class PoolRef(Block):
    """An SSDDraftPool of the same namespace."""

    name: Annotated[str, text(40, least=1, pattern=RESOURCE_NAME)]
    """Name of the pool. A change replaces targets."""


_ABSENT: Any = None
"""Source of a spec with ``pool_ref``: it makes no drafts, so nothing reads their source."""


class DraftSpec(Drafts):
    """The small model that prepares outcomes ahead of the target; the drafts of all cells."""

    model_config = checked(
        (
            "self.sharing == oldSelf.sharing",
            "sharing cannot change: delete the resource and create it anew",
        ),
        (
            "has(self.source) != has(self.poolRef)",
            "source, poolRef: give exactly one; the drafts of a pool load the source of the pool",
        ),
        (
            # The replicas are not compared, because a scaler may have stored them.
            "!has(self.poolRef) || (!has(self.autoscaling)"
            " && !has(self.device) && !has(self.image) && self.weights == 'Auto'"
            " && self.sequencesPerReplica == 32)",
            "autoscaling, poolRef: the pool has the drafts. Leave out autoscaling, device, image,"
            " weights and sequencesPerReplica here, and give them in the SSDDraftPool, which"
            " kubectl scale ssddp/NAME scales",
        ),
    )
    source: Source = _ABSENT
    pool_ref: PoolRef | None = None
    """Pool whose drafts serve this resource, in place of its own; then no other field of draft has
    an effect. Its model has the tokenizer of the target, its maxModelLen is as long, and its
    lookahead and branches are those of speculation. While there is no such pool, targets serve
    without drafts. A change replaces targets."""
    device: Accelerator | None = None
    """Device of the drafts; absent means accelerator. cpu with accelerator nvidia: a draft requests
    no GPU, and whole CPUs for itself. A change replaces drafts, and targets unless
    draftDeadlineMilliseconds is given."""
    sharing: Sharing = "Cell"
    """Cell: a target connects to the drafts of its cell. Pool: all targets connect to all drafts.
    Cannot change."""


class TreeSize(Block):
    """Size of speculation, which targets and drafts share."""

    lookahead: Annotated[int, between(1, 16)] = 6
    """Tokens of a full proposal (K). A change replaces targets and drafts."""
    branches: Annotated[int, between(1, 128)] = 24
    """Outcomes that a draft prepares per round (N). A change replaces targets and drafts."""


class Speculation(TreeSize):
    """Size and policies of speculation."""

    fan_out: Literal["Adaptive", "Geometric", "Uniform"] = "Adaptive"
    """How branches are distributed over outcomes. A change replaces targets."""
    backup: Literal["None", "Ngram"] = "Ngram"
    """Proposal after a miss, and in a text that repeats itself. A change replaces targets."""
    draft_deadline_milliseconds: Annotated[int, between(1, 1000)] | None = None
    """Maximum time a round waits for its tables; absent means 20 for drafts on GPUs and 100 on
    CPUs, with draft.poolRef by accelerator. A change replaces targets."""


class Transport(Block):
    """The links between targets and drafts."""

    channel: Literal["Grpc", "Collective"] = "Grpc"
    """How commits and tables travel. Collective: a connection beside the gRPC stream, NCCL
    between GPUs, else gloo; it opens all TCP ports between targets and their drafts, and is refused
    with security.tls, because it is not encrypted. A link on which it does not connect uses Grpc.
    status.links has what is used and the reason. A change replaces targets and drafts."""
    max_round_trip_microseconds: Annotated[int, between(1, 1_000_000)] | None = None
    """A link with a longer measured round trip is refused, and the target serves without it; absent
    sets no limit. A change replaces targets."""


class Placement(Block):
    """Where pods run."""

    policy: Literal["Auto", "Required", "Preferred", "None"] = "Auto"
    """Whether drafts run beside their target. Auto: Required with nvidia and sharing Cell, else
    Preferred. A change replaces drafts."""
    topology_key: Annotated[str, text(316, least=1)] = "kubernetes.io/hostname"
    """Node label whose equal values mean beside, for example nvidia.com/gpu.clique for nodes that
    share an NVLink domain. A change replaces targets and drafts."""
    exclusive_node: bool = False
    """Whether no two cells share a node; with accelerator cpu, no two of this namespace. A change
    replaces targets."""
    gpu_products: Annotated[
        tuple[
            Annotated[
                str, text(63, least=1, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
            ],
            ...,
        ],
        Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Allowed values of the node label nvidia.com/gpu.product; none allows any. A change replaces
    targets and drafts."""


class Observability(Block):
    """What is published for observers."""

    reflection: bool = False
    """Whether gRPC reflection is served. A change replaces targets and drafts."""


class Spec(Block):
    """What is wanted."""

    model_config = checked(
        (
            "self.accelerator == oldSelf.accelerator",
            "accelerator cannot change: delete the resource and create it anew",
        ),
        (
            "!has(self.draft.source) || self.target.source.uri.startsWith('demo://')"
            " == self.draft.source.uri.startsWith('demo://')",
            "the embedded pair fits no other model: give demo://target with demo://draft, "
            "or neither",
        ),
        (
            "self.target.source.uri != 'demo://draft'"
            " && (!has(self.draft.source) || self.draft.source.uri != 'demo://target')",
            "demo://target is for the target and demo://draft for the draft: swap them",
        ),
        (
            "self.accelerator != 'cpu' || !has(self.target.tensorParallelSize)"
            " || self.target.tensorParallelSize == 1",
            "tensorParallelSize is a number of GPUs: leave it out with accelerator cpu",
        ),
        # Stored resources with accelerator cpu may have any number, which must be removable.
        (
            "self.accelerator == 'cpu'"
            " || (has(self.target.tensorParallelSize) ? self.target.tensorParallelSize : 4)"
            " == (has(oldSelf.target.tensorParallelSize)"
            " ? oldSelf.target.tensorParallelSize : 4)",
            "tensorParallelSize cannot change: delete the resource and create it anew",
        ),
        (
            "self.accelerator != 'cpu' || !has(self.draft.device) || self.draft.device == 'cpu'",
            "draft.device: with accelerator cpu drafts run on CPUs too, leave it out",
        ),
        (
            "self.accelerator == 'cpu' || self.target.weights in ['Auto', 'Same']",
            "target.weights: only CPUs run Int8 and Int4, leave it out with accelerator nvidia",
        ),
        (
            "self.accelerator == 'cpu' || (has(self.draft.device) && self.draft.device == 'cpu')"
            " || self.draft.weights in ['Auto', 'Same']",
            "draft.weights: only CPUs run Int8 and Int4, give draft.device cpu or leave it out",
        ),
        (
            "!has(self.security.tls) || self.security.tls.mode != 'Mutual'"
            " || !self.gateway.enabled || has(self.gateway.tlsSecretName)",
            "gateway.tlsSecretName: targets with mode Mutual need a certificate of the gateway",
        ),
        (
            "!has(self.security.tls) || has(self.security.tls.draftSecretName)"
            " || has(self.draft.poolRef)",
            "security.tls.draftSecretName: give the Secret of the drafts' certificate; only with "
            "draft.poolRef leave it out, and give it in security.tls of the SSDDraftPool",
        ),
        (
            "!has(self.security.tls) || self.transport.channel == 'Grpc'",
            "transport.channel: only Grpc is encrypted: leave Collective out with security.tls",
        ),
        (
            "!has(self.draft.poolRef) || self.transport.channel == 'Grpc'",
            "transport.channel: drafts of an SSDDraftPool open only the port of gRPC: leave "
            "Collective out with draft.poolRef, or give draft.source instead",
        ),
        *VLLM_RULES,
    )
    accelerator: Accelerator = "nvidia"
    """Device of targets, and of drafts without a device of their own. A pod without its device
    fails; it never uses the CPU instead. Cannot change."""
    paused: bool = False
    """Whether the operator writes only the status. A change replaces no pod."""
    model: Model = Model()
    target: TargetSpec
    draft: DraftSpec
    pod_template: PodTemplate = Field(default_factory=PodTemplate)
    speculation: Speculation = Speculation()
    transport: Transport = Transport()
    placement: Placement = Placement()
    gateway: Gateway = Gateway()
    model_cache: ModelCache = ModelCache()
    security: Security = Security()
    observability: Observability = Observability()

    @property
    def num_cells(self) -> int:
        """Number of cells; each has one target pod."""
        return self.target.replicas

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs of a target, as given or by default."""
        return self.target.tensor_parallel_size or (4 if self.is_gpu else 1)

    @property
    def draft_deadline_milliseconds(self) -> int:
        """Maximum time a round waits for its tables, as given or by default.

        Drafts on CPUs may share them, or exhaust their quota for tens of milliseconds: with the
        shorter one, the circuit breaker would suspend good links.
        """
        default = 20 if self.draft_device == "nvidia" else 100
        return self.speculation.draft_deadline_milliseconds or default

    @property
    def is_gpu(self) -> bool:
        """Whether targets run on GPUs."""
        return self.accelerator == "nvidia"

    @property
    def draft_device(self) -> Accelerator:
        """Device of the drafts, as given or by default."""
        return self.draft.device or self.accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One SSDDeployment of the API server, or an SSDDraftPool: drafts without targets."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: Spec
    annotations: Mapping[str, str] = field(default_factory=dict)
    kind: str = KIND

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and ``prefix``."""
        return self.namespace, self.prefix

    @property
    def prefix(self) -> str:
        """Begin of the names of children, and their label ``ssd.dev/name``."""
        return prefix_of(self.kind, self.name)

    @property
    def is_pool(self) -> bool:
        """Whether it is an SSDDraftPool."""
        return self.kind == POOL_KIND

    @property
    def pool_prefix(self) -> str | None:
        """``prefix`` of the pool that it refers to; None if it has drafts of its own."""
        reference = self.spec.draft.pool_ref
        return None if reference is None else prefix_of(POOL_KIND, reference.name)


def prefix_of(kind: str, name: str) -> str:
    """Return ``Resource.prefix``: two resources of one name and different kinds share no child."""
    return f"{name}-pool" if kind == POOL_KIND else name


def drafts_of_cell(replicas: int, num_cells: int, cell: int) -> int:
    """Drafts of one cell: n // C each, the first n mod C cells one more."""
    quotient, remainder = divmod(replicas, num_cells)
    return quotient + (cell < remainder)
