"""Schemas of targets and drafts: their weights, their pods, their numbers."""

from ssd_operator.api.pod_schema import image, pod_overrides, resources, secret_key
from ssd_operator.api.structural import Schema, block, boolean, integer, one_of, rule, text

MOST_DRAFTS = 64
_URI = (
    r"^(demo://(target|draft)"
    r"|hf://[A-Za-z0-9][-A-Za-z0-9_.]*/[A-Za-z0-9][-A-Za-z0-9_.]*"
    r"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[-A-Za-z0-9_./]*)?)$"
)
_RESOURCE_KEY = r"^[a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*$"
"""Name of an extended resource."""
_OCCUPANCY = r"^(0\.(0[1-9]|[1-9][0-9]?)[0-9]{0,2}|1(\.0{1,4})?)$"


def target() -> Schema:
    """The model whose text is served."""
    fields = {
        "source": _source("targets"),
        "replicas": integer(
            "Cells: one target each, with its drafts. Replaces no pod; the highest cell leaves "
            "first.",
            1,
            8,
            1,
        ),
        "tensorParallelSize": integer(
            "GPUs of a target, 1, 2, 4 or 8; absent is 4. Refused with cpu. Cannot change.",
            1,
            8,
        )
        | {"enum": [1, 2, 4, 8]},
        "gpuResource": _gpu_resource("targets"),
        "engine": _engine(),
        "image": image(),
        "resources": resources(),
        "startupTimeoutSeconds": _startup_timeout("targets", 1800),
        "drainSeconds": integer(
            "Streams may finish this long after SIGTERM. Replaces targets.", 0, 3600, 300
        ),
        "podTemplate": pod_overrides("targets"),
    }
    return block("The model whose text is served.", fields, required=["source"])


def draft() -> Schema:
    """The small model beside it."""
    fields = {
        "source": _source("drafts"),
        "replicas": integer(
            "Drafts of all cells together, spread evenly; what kubectl scale and autoscalers "
            "write. Replaces no pod; one that leaves is drained first.",
            0,
            MOST_DRAFTS,
            1,
        ),
        "sharing": one_of(
            "Cell: a target dials the drafts of its cell. Pool: all targets dial all drafts. "
            "Cannot change.",
            ["Cell", "Pool"],
            "Cell",
        ),
        "sequencesPerReplica": integer(
            "Sessions of one draft at most, and its capacity while none is measured. "
            "Replaces drafts.",
            1,
            256,
            32,
        ),
        "drainSeconds": integer("Deadline of a drain. Replaces drafts.", 1, 300, 20),
        "gpuResource": _gpu_resource("drafts"),
        "image": image(),
        "resources": resources(),
        "startupTimeoutSeconds": _startup_timeout("drafts", 600),
        "autoscaling": _autoscaling(),
        "podTemplate": pod_overrides("drafts"),
    }
    same_sharing = rule(
        "self.sharing == oldSelf.sharing",
        "sharing cannot change: delete the resource and create it anew",
    )
    about = "The small model that prepares outcomes ahead of the target."
    return block(about, fields, required=["source"], rules=[same_sharing])


def _source(replaces: str) -> Schema:
    fields = {
        "uri": text(
            "demo://target or demo://draft (the embedded pair), hf://org/name (Hugging Face), or "
            f"pvc://claim/path (a folder of a claim, mounted read-only). Replaces {replaces}.",
            512,
        ),
        "revision": text(
            "Commit of an hf:// model, 40 hex digits: every pod loads identical weights. "
            f"Replaces {replaces}.",
            40,
            pattern="^[0-9a-f]{40}$",
        ),
        "tokenSecretRef": secret_key(
            "Access token of an hf:// model, for the container that fetches it and no other; the "
            f"operator never reads it. Replaces {replaces}."
        ),
    }
    rules = [
        rule(
            f"self.uri.matches(r'{_URI}')",
            "uri: give demo://target or demo://draft, hf://org/name, or pvc://claim/path; "
            "a folder of a node is reached through a claim",
        ),
        rule("!self.uri.contains('..')", "uri: '..' is not allowed, write the path itself"),
        rule(
            "self.uri.startsWith('hf://') == has(self.revision)",
            "revision: required with hf:// and refused elsewhere; give the commit's 40 hex digits",
        ),
        rule(
            "!has(self.tokenSecretRef) || self.uri.startsWith('hf://')",
            "tokenSecretRef: only an hf:// model has one, leave it out",
        ),
    ]
    return block("Where the weights come from.", fields, required=["uri"], rules=rules)


def _gpu_resource(replaces: str) -> Schema:
    return text(
        "Extended resource that is one GPU, or one MIG slice such as nvidia.com/mig-1g.10gb. "
        f"Unused with cpu. Replaces {replaces}.",
        253,
        pattern=_RESOURCE_KEY,
        default="nvidia.com/gpu",
    )


def _engine() -> Schema:
    fields = {
        "maxNumSeqs": integer(
            "Sequences that run together; absent is the process's own. Replaces targets.", 1, 256
        ),
        "maxQueue": integer(
            "Requests that may wait, one more is refused; absent is the process's own. "
            "Replaces targets.",
            0,
            100_000,
        ),
        "deterministic": boolean(
            "Tokens never depend on what else runs; costs speed. Replaces targets.", default=False
        ),
    }
    return block("The target engine's own settings.", fields, default={})


def _startup_timeout(who: str, default: int) -> Schema:
    about = f"From the start of a pod to being ready; longer restarts it. Replaces {who}."
    return integer(about, 10, 7200, default)


def _autoscaling() -> Schema:
    keda = {
        "serverAddress": text("URL of Prometheus.", 512, pattern="^https?://[!-~]+$"),
        "fallbackReplicas": integer("Drafts while Prometheus is silent.", 0, MOST_DRAFTS, 1),
    }
    fields = {
        "mode": one_of(
            "Who writes draft.replicas. None: you. Internal: the operator. HPA, KEDA: an object "
            "that the operator makes. External: another scaler, through /scale.",
            ["None", "Internal", "HPA", "KEDA", "External"],
            "Internal",
        ),
        "minReplicas": integer("Fewest drafts.", 0, MOST_DRAFTS, 1),
        "maxReplicas": integer("Most drafts.", 1, MOST_DRAFTS, 4),
        "targetOccupancy": text(
            "Sessions wanted per unit of capacity, 0.01 to 1, as a string.",
            8,
            pattern=_OCCUPANCY,
            default="0.8",
        ),
        "scaleDownStabilizationSeconds": integer(
            "Demand must have been lower for this long.", 0, 3600, 300
        ),
        "cooldownSeconds": integer(
            "Mode Internal: least time from any change to a fall. Rises are 10 s apart.", 0, 600, 30
        ),
        "keda": block("For mode KEDA.", keda, required=["serverAddress"]),
    }
    rules = [
        rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas is above maxReplicas: lower the one or raise the other",
        ),
        rule("self.mode != 'KEDA' || has(self.keda)", "mode KEDA asks Prometheus: give keda"),
    ]
    about = "Scaling of the drafts; absent keeps draft.replicas as it is. Replaces no pod."
    return block(about, fields, rules=rules)
