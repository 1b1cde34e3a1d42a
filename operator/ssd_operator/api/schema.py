"""The CustomResourceDefinition of SSDDeployment, from one table a block.

``python -m ssd_operator.api.schema`` prints it; ``charts/ssd/files/crd.yaml`` is its output.
Each field says who pays for a change of it: no pod, all targets (one cell after another), all
drafts (one after another), or that it cannot change.
"""

import json
import sys

import yaml

from ssd_operator.api.pod_schema import network_peer, object_name, pod_template
from ssd_operator.api.process_schema import draft, target
from ssd_operator.api.spec import GROUP, KIND, PLURAL, VERSION, Object
from ssd_operator.api.status_schema import status
from ssd_operator.api.structural import (
    VISIBLE,
    Schema,
    array,
    block,
    boolean,
    integer,
    one_of,
    quantity,
    rule,
    text,
    unique,
)

_SYSTEM_FOLDERS = (
    "^(/+[.])*/+("
    "(home|opt|srv|tmp|var)?/*"
    "|(bin|boot|dev|etc|lib|lib32|lib64|proc|root|run|sbin|sys|usr)(/.*)?"
    "|var/+(cache|lib|log|spool|tmp)/*"
    "|var/+(run|lib/+(containerd|docker|etcd|kubelet))(/.*)?"
    ")$"
)
_RESOURCE_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


def crd() -> Object:
    """The definition, as an API server takes it."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": _columns(),
        "schema": {"openAPIV3Schema": _root()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.draft.replicas",
                "statusReplicasPath": ".status.draft.replicas",
                "labelSelectorPath": ".status.draft.selector",
            },
        },
    }
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": KIND.lower(),
        "shortNames": ["ssd"],
        "categories": ["inference"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def spec() -> Schema:
    """What the user asks for."""
    fields = {
        "accelerator": one_of(
            "Device of target and drafts. A pod without its device fails; it never takes the CPU "
            "instead. Cannot change.",
            ["nvidia", "cpu"],
            "nvidia",
        ),
        "paused": boolean(
            "The operator writes the status and nothing else. Replaces no pod.", default=False
        ),
        "model": _model(),
        "target": target(),
        "draft": draft(),
        "podTemplate": pod_template(),
        "speculation": _speculation(),
        "transport": _transport(),
        "placement": _placement(),
        "modelCache": _model_cache(),
        "security": _security(),
        "observability": _observability(),
    }
    rules = [
        rule(
            "self.accelerator == oldSelf.accelerator",
            "accelerator cannot change: delete the resource and create it anew",
        ),
        rule(
            "self.target.source.uri.startsWith('demo://')"
            " == self.draft.source.uri.startsWith('demo://')",
            "the embedded pair fits no other model: give demo://target with demo://draft, "
            "or neither",
        ),
        rule(
            "self.target.source.uri != 'demo://draft' && self.draft.source.uri != 'demo://target'",
            "demo://target is for the target and demo://draft for the draft: swap them",
        ),
        rule(
            "self.accelerator != 'cpu' || !has(self.target.tensorParallelSize)"
            " || self.target.tensorParallelSize == 1",
            "tensorParallelSize is a number of GPUs: leave it out with accelerator cpu",
        ),
        # Stored resources with accelerator cpu may have any number, which must be removable.
        rule(
            "self.accelerator == 'cpu' || (has(self.target.tensorParallelSize)"
            " == has(oldSelf.target.tensorParallelSize)"
            " && (!has(self.target.tensorParallelSize)"
            " || self.target.tensorParallelSize == oldSelf.target.tensorParallelSize))",
            "tensorParallelSize cannot change: delete the resource and create it anew",
        ),
    ]
    return block("What is wanted.", fields, required=["target", "draft"], rules=rules)


def _root() -> Schema:
    named = rule(
        f"self.metadata.name.size() <= 40 && self.metadata.name.matches('{_RESOURCE_NAME}')",
        "metadata.name: children add to it, so it has at most 40 characters of a-z, 0-9 and '-', "
        "begins with a letter and does not end with '-'",
    )
    root = block(
        "A target, its drafts and what the link between them must be, served over gRPC.",
        {"spec": spec(), "status": status()},
        required=["spec"],
        rules=[named],
    )
    meta: dict[str, Schema] = {
        "apiVersion": {"description": f"{GROUP}/{VERSION}.", "type": "string"},
        "kind": {"description": f"{KIND}.", "type": "string"},
        # The API server describes and checks it itself, and takes no word on it.
        "metadata": {"type": "object"},
    }
    return root | {"properties": meta | root["properties"]}


def _columns() -> list[Object]:
    def column(name: str, path: str, about: str, priority: int = 0, kind: str = "string") -> Object:
        return {
            "name": name,
            "type": kind,
            "jsonPath": path,
            "description": about,
            "priority": priority,
        }

    def condition(kind: str, field: str) -> str:
        return f'.status.conditions[?(@.type=="{kind}")].{field}'

    return [
        column("Ready", condition("Ready", "status"), "Whether a target serves."),
        column("Targets", ".status.target.summary", "Ready over wanted."),
        column("Drafts", ".status.draft.summary", "Active links over wanted."),
        column(
            "Speculation",
            condition("SpeculationActive", "status"),
            "Whether each ready target has an active link.",
        ),
        column("Transport", ".status.transport.effective", "How tables travel."),
        column("Age", ".metadata.creationTimestamp", "Since it was created.", kind="date"),
        column("Model", ".status.model.name", "Id that clients use.", 1),
        column("Reason", condition("Ready", "reason"), "Why it is ready or not.", 1),
        column("Endpoint", ".status.endpoint.grpc", "Where clients call.", 1),
    ]


def _model() -> Schema:
    fields = {
        "name": text(
            "Id that clients use; absent is the resource's name. Replaces targets.",
            128,
            pattern=VISIBLE,
        ),
        "maxModelLen": integer(
            "Prompt and output tokens of a sequence; absent is the model's own length. "
            "Replaces targets and drafts.",
            128,
            1 << 20,
        ),
        "dtype": one_of(
            "Number format of weights and KV. auto: bfloat16, or float32 on a CPU that cannot pack "
            "bfloat16; status.model has the choice and its reason. Replaces targets and drafts.",
            ["auto", "bfloat16", "float32"],
            "auto",
        ),
    }
    return block("How the model is served.", fields, default={})


def _speculation() -> Schema:
    fields = {
        "lookahead": integer(
            "Tokens of a full proposal (K). Replaces targets and drafts.", 1, 16, 6
        ),
        "branches": integer(
            "Outcomes that a draft prepares for a round (N). Replaces targets and drafts.",
            1,
            128,
            24,
        ),
        "fanOut": one_of(
            "Which outcomes get a branch. Replaces targets.",
            ["Adaptive", "Geometric", "Uniform"],
            "Adaptive",
        ),
        "backup": one_of(
            "What is proposed after an outcome that was not foreseen. Replaces targets.",
            ["None", "Ngram"],
            "Ngram",
        ),
        "draftDeadlineMilliseconds": integer(
            "Longest wait of a round for its tables; absent is 20 with nvidia and 100 with cpu. "
            "Replaces targets.",
            1,
            1000,
        ),
    }
    return block("Shapes and policies of speculation.", fields, default={})


def _transport() -> Schema:
    fields = {
        "maxRoundTripMicroseconds": integer(
            "A link whose measured round trip is longer is refused, and the target serves without "
            "it; absent sets no limit. Replaces targets.",
            1,
            1_000_000,
        ),
    }
    return block("Requirements on the links between targets and drafts.", fields, default={})


def _placement() -> Schema:
    fields = {
        "policy": one_of(
            "Drafts beside their target. Auto: Required with nvidia and sharing Cell, else "
            "Preferred. Replaces drafts.",
            ["Auto", "Required", "Preferred", "None"],
            "Auto",
        ),
        "topologyKey": text(
            "Node label that says what beside means. Replaces targets and drafts.",
            316,
            least=1,
            default="kubernetes.io/hostname",
        ),
        "exclusiveNode": boolean("No two cells share a node. Replaces targets.", default=False),
        "gpuProducts": unique(
            "Values of the node label nvidia.com/gpu.product to choose from; none for any. "
            "Replaces targets and drafts.",
            text("A product.", 63, least=1, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"),
            8,
        ),
    }
    return block("Where pods go.", fields, default={})


def _model_cache() -> Schema:
    fields = {
        "type": one_of(
            "EmptyDir: fetched anew by each new pod. HostPath: kept on the node, needs a "
            "privileged namespace. PVC: kept in a claim. Replaces targets and drafts.",
            ["EmptyDir", "HostPath", "PVC"],
            "EmptyDir",
        ),
        "hostPath": text(
            "Folder of the node, with HostPath. A new one, or an empty one of root, is given to "
            "uid 10001 by an init container that runs as root. Replaces targets and drafts.",
            1024,
            pattern=r"^/[-A-Za-z0-9_./]*$",
        ),
        "claimName": object_name("Claim, with PVC. Replaces targets and drafts."),
        "sizeLimit": quantity(
            "Maximum size of an EmptyDir. Pods that fetch a model request as much ephemeral "
            "storage, so that their nodes have room for it. Replaces targets and drafts."
        ),
    }
    rules = [
        rule(
            "(self.type == 'HostPath') == has(self.hostPath)",
            "hostPath: required with type HostPath and refused elsewhere",
        ),
        rule(
            "(self.type == 'PVC') == has(self.claimName)",
            "claimName: required with type PVC and refused elsewhere",
        ),
        rule(
            "!has(self.sizeLimit) || self.type == 'EmptyDir'",
            "sizeLimit: only EmptyDir has one, leave it out",
        ),
        rule(
            "!has(self.hostPath) || !self.hostPath.contains('..')",
            "hostPath: '..' is not allowed, write the path itself",
        ),
        rule(
            f"!has(self.hostPath) || !self.hostPath.matches('{_SYSTEM_FOLDERS}')",
            "hostPath: a folder of the node's own system; give the cache one of its own, such as "
            "/var/cache/ssd",
        ),
    ]
    about = "Where fetched weights stay between starts."
    return block(about, fields, rules=rules, default={"type": "EmptyDir"})


def _security() -> Schema:
    fields = {
        "networkPolicy": boolean(
            "Make NetworkPolicies for targets and drafts. Replaces no pod.", default=True
        ),
        "clients": array(
            "Who may call Generate, as NetworkPolicy peers; none for any pod of the cluster. "
            "Replaces no pod.",
            network_peer(),
            16,
        ),
        "readOnlyRootFilesystem": boolean(
            "Pods cannot write into their image; some GPU runtimes must. "
            "Replaces targets and drafts.",
            default=True,
        ),
    }
    return block("Who may call, and what pods may do.", fields, default={})


def _observability() -> Schema:
    fields = {
        "podMonitor": boolean(
            "Make a PodMonitor, where that API is served. Replaces no pod.", default=False
        ),
        "reflection": boolean("Serve gRPC reflection. Replaces targets and drafts.", default=False),
    }
    return block("What is published.", fields, default={})


def crd_yaml() -> str:
    """The definition as the chart's file holds it."""
    head = "# Generated: python -m ssd_operator.api.schema > charts/ssd/files/crd.yaml\n"
    # By way of JSON no two blocks are one object, for which YAML would write an anchor.
    return head + yaml.safe_dump(json.loads(json.dumps(crd())), sort_keys=False, width=100)


if __name__ == "__main__":
    sys.stdout.write(crd_yaml())
