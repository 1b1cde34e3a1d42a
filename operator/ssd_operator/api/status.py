"""The status of an SSDDeployment. Its lists are maps, so that a partial apply keeps other items.

Bounds are wide here, because a status that the API server rejects reports nothing at all.
"""

from typing import Annotated, Literal, Required

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from ssd_operator.api.fields import items, kubernetes_object, text

MOST_LINKS = 64
"""Links that a status lists."""
_Count = Annotated[int, Field(ge=0, le=2**53 - 1, json_schema_extra={"format": "int64"})]
_Time = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 64})]
_Short = Annotated[str, text(32)]
_Word = Annotated[str, text(64)]
_Pod = Annotated[str, text(253, least=1)]


@kubernetes_object()
class Condition(TypedDict, total=False):
    """A condition; True is good."""

    type: Required[Annotated[str, text(316, least=1)]]
    """Name of the condition."""
    status: Required[Literal["True", "False", "Unknown"]]
    """Whether it holds."""
    reason: Required[
        Annotated[str, text(1024, least=1, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    ]
    """Reason in one word."""
    message: Required[Annotated[str, text(32768)]]
    """One sentence with the actual value, the allowed value and the fix."""
    lastTransitionTime: Required[_Time]
    """Time of the last change of status."""
    observedGeneration: _Count
    """Generation of the spec that the condition describes."""


@kubernetes_object()
class Endpoint(TypedDict, total=False):
    """Where clients call."""

    grpc: Annotated[str, text(512)]
    """host:port of Generate, for gRPC clients."""


@kubernetes_object()
class ServedModel(TypedDict, total=False):
    """The model that is served."""

    name: Annotated[str, text(256)]
    """Id that clients use."""
    targetRevision: Annotated[str, text(128)]
    """Fingerprint of the weights that all ready targets run."""
    targetDtype: Annotated[str, text(128)]
    """Number formats that targets compute with."""
    targetDtypeReason: Annotated[str, text(1024)]
    """Why these formats are used: set explicitly, or selected by auto."""
    draftRevision: Annotated[str, text(128)]
    """Fingerprint of the weights that all linked drafts run."""


@kubernetes_object()
class Targets(TypedDict, total=False):
    """The targets of all cells."""

    replicas: _Count
    """Number of target pods."""
    readyReplicas: _Count
    """Number of target pods that serve."""
    updatedReplicas: _Count
    """Number of target pods with the wanted template."""
    summary: _Short
    """Ready over wanted."""
    revision: _Word
    """Hash of the wanted pod template."""


@kubernetes_object()
class Drafts(TypedDict, total=False):
    """The drafts of all cells."""

    replicas: _Count
    """Number of draft pods that the selector selects."""
    readyReplicas: _Count
    """Number of draft pods that have loaded their model."""
    activeReplicas: _Count
    """Number of draft pods with an active link."""
    pendingReplicas: _Count
    """Number of draft pods without a node."""
    drainingReplicas: _Count
    """Number of draft pods that are draining."""
    desiredReplicas: _Count
    """Number of wanted drafts."""
    summary: _Short
    """Active links over wanted."""
    revision: _Word
    """Hash of the wanted pod template."""
    selector: Annotated[str, text(512)]
    """Labels of exactly these pods, for autoscalers."""
    lastScaleTime: _Time
    """When the operator last changed the number of drafts."""
    lastScaleReason: Annotated[str, text(128)]
    """Why the operator changed it."""


@kubernetes_object()
class UsedTransport(TypedDict, total=False):
    """How tables are sent."""

    effective: _Word
    """The worst transport that was measured on an active link."""


@kubernetes_object()
class Link(TypedDict, total=False):
    """A link between a target and a draft, with its measurements."""

    target: Required[_Pod]
    """Pod of the target."""
    draft: Required[_Pod]
    """Pod of the draft, or its address until the name is known."""
    node: Annotated[str, text(253)]
    """Node of the draft."""
    cell: _Count
    """Cell of the target."""
    transport: _Word
    """Measured transport: TCP, RDMA or NVLink."""
    roundTripMicroseconds: _Count
    """Measured round trip."""
    state: _Word
    """Active, Connecting, Quarantined, Draining, Lost or Refused."""
    reason: Annotated[str, text(1024)]
    """Why the link is not active; for a link that is too slow, the numbers."""


@kubernetes_object()
class SpeculationFigures(TypedDict, total=False):
    """Last measured effect of speculation."""

    tokensPerRound: _Short
    """Tokens per target step."""
    hitRate: _Short
    """Hits divided by rounds that needed a table."""
    efficiency: _Short
    """Time of verification divided by time of a round."""


@kubernetes_object()
class Status(TypedDict, total=False):
    """Observed state. There is no phase; use the conditions."""

    observedGeneration: _Count
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], items(16, "type")]
    """Current conditions; True is good."""
    endpoint: Endpoint
    model: ServedModel
    target: Targets
    draft: Drafts
    transport: UsedTransport
    links: Annotated[list[Link], items(MOST_LINKS, "target", "draft")]
    """Links between targets and drafts, with their measurements."""
    speculation: SpeculationFigures
