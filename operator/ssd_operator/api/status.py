"""The schemas of the two statuses. Their lists are maps, so that a partial apply keeps other items.

Bounds are wide here, because a status that the API server rejects reports nothing at all.
"""

from typing import Any

from ssd_operator.api.fields import block, keyed, string

MOST_LINKS = 64
"""Links that a status lists."""
MOST_DEPLOYMENTS = 256
"""SSDDeployments that the status of a pool lists."""


def _count(about: str) -> dict[str, Any]:
    bounds = {"minimum": 0, "maximum": 2**53 - 1}
    return {"description": about, "type": "integer", "format": "int64", **bounds}


def _time(about: str) -> dict[str, Any]:
    return string(about, 64, format="date-time")


def _list(about: str, most: int, items: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {"description": about, "type": "array", "maxItems": most, "items": items, **keyed(*keys)}


_CONDITION = block(
    "A condition; True is good, except for NotWorthwhile.",
    "type status reason message lastTransitionTime",
    type=string("Name of the condition.", 316, minLength=1),
    status=string("Whether it holds.", enum=["True", "False", "Unknown"]),
    reason=string(
        "Reason in one word.",
        1024,
        minLength=1,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
    ),
    message=string("One sentence with the actual value, the allowed value and the fix.", 32768),
    lastTransitionTime=_time("Time of the last change of status."),
    observedGeneration=_count("Generation of the spec that the condition describes."),
)
_LINK = block(
    "A link between a target and a draft, with its measurements.",
    "target draft",
    target=string("Pod of the target.", 253, minLength=1),
    draft=string("Pod of the draft, or its address until the name is known.", 253, minLength=1),
    node=string("Node of the draft.", 253),
    cell=_count("Cell of the target."),
    channel=string("How commits and tables travel: Grpc or Collective.", 64),
    transport=string("TCP, or the path that NCCL reports, for example P2P/CUMEM.", 64),
    roundTripMicroseconds=_count("Lowest measured round trip."),
    state=string("Active, Connecting, Quarantined, Draining, Lost or Refused.", 64),
    reason=string(
        "Why the link is not active; for a link that is too slow, the numbers. For an active link, "
        "why it uses Grpc although Collective is wanted.",
        1024,
    ),
)
STATUS = block(
    "Observed state. There is no phase; use the conditions.",
    observedGeneration=_count("Generation of the spec that this status describes."),
    conditions=_list(
        "Current conditions; True is good, except for NotWorthwhile.", 16, _CONDITION, "type"
    ),
    endpoint=block(
        "Where clients call.",
        grpc=string("host:port of Generate, for gRPC clients of engine ssd.", 512),
        http=string("Base URL of the OpenAI API of engine vllm.", 512),
    ),
    model=block(
        "The model that is served.",
        name=string("Id that clients use.", 256),
        targetRevision=string("Fingerprint of the weights that all ready targets run.", 128),
        targetDtype=string("Number formats that targets compute with.", 128),
        targetDtypeReason=string(
            "Why these formats are used: set explicitly, or selected by auto.", 1024
        ),
        draftRevision=string("Fingerprint of the weights that all linked drafts run.", 128),
    ),
    target=block(
        "The targets of all cells.",
        replicas=_count("Number of target pods."),
        readyReplicas=_count("Number of target pods that serve."),
        updatedReplicas=_count("Number of target pods with the wanted template."),
        summary=string("Ready over wanted.", 32),
        revision=string("Hash of the wanted pod template.", 64),
    ),
    draft=block(
        "The drafts of all cells, or of the pool that the resource refers to.",
        pool=string("The pool.", 253),
        replicas=_count("Number of draft pods that the selector selects."),
        readyReplicas=_count("Number of draft pods that have loaded their model."),
        activeReplicas=_count("Number of draft pods with an active link."),
        pendingReplicas=_count("Number of draft pods without a node."),
        drainingReplicas=_count("Number of draft pods that are draining."),
        desiredReplicas=_count("Number of wanted drafts."),
        summary=string("Drafts with an active link over wanted; of a pool, ready over wanted.", 32),
        revision=string("Hash of the wanted pod template.", 64),
        device=string("Device of the wanted drafts: nvidia or cpu.", 64),
        selector=string("Labels of exactly these pods, for autoscalers.", 512),
        lastScaleTime=_time("When the operator last changed the number of drafts."),
        lastScaleReason=string("Why the operator changed it.", 128),
    ),
    transport=block(
        "How tables are sent.", effective=string("The slowest transport of an active link.", 64)
    ),
    links=_list(
        "Links between targets and drafts, with their measurements.",
        MOST_LINKS,
        _LINK,
        "target",
        "draft",
    ),
    speculation=block(
        "State and last measured effect of speculation.",
        state=string(
            "Active; Slower, while a target decodes without drafts because that is faster; else "
            "the reason of SpeculationActive.",
            1024,
        ),
        tokensPerRound=string("Tokens per target step.", 32),
        hitRate=string("Hits divided by rounds that needed a table.", 32),
        efficiency=string("Time of verification divided by time of a round.", 32),
    ),
)
_SHARED = ("observedGeneration", "conditions", "draft", "links")
POOL_STATUS = block(
    "Observed state. There is no phase; use the conditions.",
    **{name: STATUS["properties"][name] for name in _SHARED},
    deployments={
        "description": "SSDDeployments that refer to this pool.",
        "type": "array",
        "maxItems": MOST_DEPLOYMENTS,
        "items": string("Name.", 253),
    },
    target=block(
        "The targets with drafts of this pool.",
        readyReplicas=_count("Number of target pods that serve."),
        linkedReplicas=_count("Number of them with a link, active or suspended."),
        summary=string("Linked over ready.", 32),
    ),
    sessions=block(
        "Sessions of all links.",
        open=_count("Number of open sessions."),
        capacity=_count("Number of sessions that the ready drafts accept."),
    ),
)
