"""Schema of the status. Its lists are maps, so that a write replaces nothing that it leaves out."""

from ssd_operator.api.structural import (
    Schema,
    array,
    block,
    integer,
    one_of,
    text,
    time,
)

MOST_LINKS = 64
"""Links that a status lists."""
_MOST = 2**53 - 1
"""Bounds are wide here: a status that is refused tells nothing at all."""


def status() -> Schema:
    """What the operator has found; there is no phase, conditions are the truth."""
    fields = {
        "observedGeneration": _count("Generation of the spec that this status tells of."),
        "conditions": array("What holds now; True is good.", _condition(), 16, keys=["type"]),
        "endpoint": block(
            "Where clients call.",
            {"grpc": text("host:port of Generate, for gRPC clients.", 512)},
        ),
        "model": block("What is served.", _model()),
        "target": block("The targets of all cells.", _target()),
        "draft": block("The drafts of all cells.", _draft()),
        "transport": block(
            "How tables travel.",
            {"effective": text("The worst that an active link was measured to use.", 64)},
        ),
        "links": array(
            "Links between targets and drafts, with what was measured on them.",
            _link(),
            MOST_LINKS,
            keys=["target", "draft"],
        ),
        "speculation": block(
            "What speculation brings, as it was last measured.",
            {
                "tokensPerRound": text("Tokens a target writes in one forward pass.", 32),
                "hitRate": text("Part of the rounds whose outcome was foreseen.", 32),
                "efficiency": text("Part of a round that is the target's own work.", 32),
            },
        ),
    }
    return block("What the operator has found.", fields)


def _count(about: str) -> Schema:
    return integer(about, 0, _MOST) | {"format": "int64"}


def _condition() -> Schema:
    fields = {
        "type": text("What it is about.", 316, least=1),
        "status": one_of("Whether it holds.", ["True", "False", "Unknown"]),
        "reason": text(
            "One word why.", 1024, least=1, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
        ),
        "message": text("One sentence: what was found, what is allowed, the cure.", 32768),
        "lastTransitionTime": time("When the status changed last."),
        "observedGeneration": _count("Generation of the spec that it tells of."),
    }
    required = ["type", "status", "reason", "message", "lastTransitionTime"]
    return block("What holds now.", fields, required=required)


def _model() -> dict[str, Schema]:
    return {
        "name": text("Id that clients use.", 256),
        "targetRevision": text("Fingerprint of the weights that all ready targets run.", 128),
        "targetDtype": text("Number formats that targets compute with.", 128),
        "targetDtypeReason": text("Why these: set explicitly, or what auto found.", 1024),
        "draftRevision": text("Fingerprint of the weights that all linked drafts run.", 128),
    }


def _target() -> dict[str, Schema]:
    return {
        "replicas": _count("Target pods that exist."),
        "readyReplicas": _count("Those that serve."),
        "updatedReplicas": _count("Those with the template wanted now."),
        "summary": text("Ready over wanted.", 32),
        "revision": text("Hash of the pod template wanted now.", 64),
    }


def _draft() -> dict[str, Schema]:
    return {
        "replicas": _count("Draft pods that the selector covers."),
        "readyReplicas": _count("Those that have loaded."),
        "activeReplicas": _count("Those that a target has a link to."),
        "pendingReplicas": _count("Those without a node."),
        "drainingReplicas": _count("Those on their way out."),
        "desiredReplicas": _count("Drafts wanted."),
        "summary": text("Active links over wanted.", 32),
        "revision": text("Hash of the pod template wanted now.", 64),
        "selector": text("Labels of exactly these pods, for autoscalers.", 512),
        "lastScaleTime": time("When the operator last changed their number."),
        "lastScaleReason": text("Why it did.", 128),
    }


def _link() -> Schema:
    fields = {
        "target": text("Pod of the target.", 253, least=1),
        "draft": text("Pod of the draft, or its address until it has said its name.", 253, least=1),
        "node": text("Node of the draft.", 253),
        "cell": _count("Cell of the target."),
        "transport": text("How tables travel, as measured: TCP, RDMA or NVLink.", 64),
        "roundTripMicroseconds": _count("Measured round trip."),
        "state": text("Active, Connecting, Quarantined, Draining, Lost or Refused.", 64),
        "reason": text("Why it is not active; of a link that is too slow, the numbers.", 1024),
    }
    return block("A link.", fields, required=["target", "draft"])
