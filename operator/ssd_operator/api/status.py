"""The status of an SSDDeployment. Its lists are maps, so that a partial apply keeps other items.

Bounds are wide here, because a status that the API server rejects reports nothing at all.
"""

from typing import Annotated, Literal, Required

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from ssd_operator.api.fields import about, items, text

MOST_LINKS = 64
"""Links that a status lists."""
_Count = Annotated[int, Field(ge=0, le=2**53 - 1, json_schema_extra={"format": "int64"})]
_Time = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 64})]
_Short = Annotated[str, text(32)]
_Word = Annotated[str, text(64)]
_Pod = Annotated[str, text(253, least=1)]


class Condition(TypedDict, total=False):
    """A condition; True is good."""

    type: Required[Annotated[str, text(316, "Name of the condition.", least=1)]]
    status: Required[Annotated[Literal["True", "False", "Unknown"], about("Whether it holds.")]]
    reason: Required[
        Annotated[
            str,
            text(
                1024,
                "Reason in one word.",
                least=1,
                pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            ),
        ]
    ]
    message: Required[
        Annotated[
            str, text(32768, "One sentence with the actual value, the allowed value and the fix.")
        ]
    ]
    lastTransitionTime: Required[Annotated[_Time, about("Time of the last change of status.")]]
    observedGeneration: Annotated[
        _Count, about("Generation of the spec that the condition describes.")
    ]


class Endpoint(TypedDict, total=False):
    """Where clients call."""

    grpc: Annotated[str, text(512, "host:port of Generate, for gRPC clients.")]


class ServedModel(TypedDict, total=False):
    """The model that is served."""

    name: Annotated[str, text(256, "Id that clients use.")]
    targetRevision: Annotated[
        str, text(128, "Fingerprint of the weights that all ready targets run.")
    ]
    targetDtype: Annotated[str, text(128, "Number formats that targets compute with.")]
    targetDtypeReason: Annotated[
        str, text(1024, "Why these formats are used: set explicitly, or selected by auto.")
    ]
    draftRevision: Annotated[
        str, text(128, "Fingerprint of the weights that all linked drafts run.")
    ]


class Targets(TypedDict, total=False):
    """The targets of all cells."""

    replicas: Annotated[_Count, about("Number of target pods.")]
    readyReplicas: Annotated[_Count, about("Number of target pods that serve.")]
    updatedReplicas: Annotated[_Count, about("Number of target pods with the wanted template.")]
    summary: Annotated[_Short, about("Ready over wanted.")]
    revision: Annotated[_Word, about("Hash of the wanted pod template.")]


class Drafts(TypedDict, total=False):
    """The drafts of all cells."""

    replicas: Annotated[_Count, about("Number of draft pods that the selector selects.")]
    readyReplicas: Annotated[_Count, about("Number of draft pods that have loaded their model.")]
    activeReplicas: Annotated[_Count, about("Number of draft pods with an active link.")]
    pendingReplicas: Annotated[_Count, about("Number of draft pods without a node.")]
    drainingReplicas: Annotated[_Count, about("Number of draft pods that are draining.")]
    desiredReplicas: Annotated[_Count, about("Number of wanted drafts.")]
    summary: Annotated[_Short, about("Active links over wanted.")]
    revision: Annotated[_Word, about("Hash of the wanted pod template.")]
    selector: Annotated[str, text(512, "Labels of exactly these pods, for autoscalers.")]
    lastScaleTime: Annotated[_Time, about("When the operator last changed the number of drafts.")]
    lastScaleReason: Annotated[str, text(128, "Why the operator changed it.")]


class UsedTransport(TypedDict, total=False):
    """How tables are sent."""

    effective: Annotated[_Word, about("The worst transport that was measured on an active link.")]


class Link(TypedDict, total=False):
    """A link between a target and a draft, with its measurements."""

    target: Required[Annotated[_Pod, about("Pod of the target.")]]
    draft: Required[
        Annotated[_Pod, about("Pod of the draft, or its address until the name is known.")]
    ]
    node: Annotated[str, text(253, "Node of the draft.")]
    cell: Annotated[_Count, about("Cell of the target.")]
    transport: Annotated[_Word, about("Measured transport: TCP, RDMA or NVLink.")]
    roundTripMicroseconds: Annotated[_Count, about("Lowest measured round trip.")]
    state: Annotated[_Word, about("Active, Connecting, Quarantined, Draining, Lost or Refused.")]
    reason: Annotated[
        str, text(1024, "Why the link is not active; for a link that is too slow, the numbers.")
    ]


class SpeculationFigures(TypedDict, total=False):
    """Last measured effect of speculation."""

    tokensPerRound: Annotated[_Short, about("Tokens per target step.")]
    hitRate: Annotated[_Short, about("Hits divided by rounds that needed a table.")]
    efficiency: Annotated[_Short, about("Time of verification divided by time of a round.")]


class Status(TypedDict, total=False):
    """Observed state. There is no phase; use the conditions."""

    observedGeneration: Annotated[
        _Count, about("Generation of the spec that this status describes.")
    ]
    conditions: Annotated[
        list[Condition], items(16, "type", about="Current conditions; True is good.")
    ]
    endpoint: Endpoint
    model: ServedModel
    target: Targets
    draft: Drafts
    transport: UsedTransport
    links: Annotated[
        list[Link],
        items(
            MOST_LINKS,
            "target",
            "draft",
            about="Links between targets and drafts, with their measurements.",
        ),
    ]
    speculation: SpeculationFigures
