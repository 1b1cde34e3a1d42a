"""Schemas of the parts of a pod that users set: a subset, because a whole pod makes a megabyte.

*Decision*: ``spec.podTemplate`` applies to all pods, and targets and drafts override only the parts
that differ between them. *Because* the same 38 fields twice were half of the resource, and where
they differ it is the node, the priority and settings of the process. *Not chosen*: the whole
template three times. *Revisit when* users need another volume for one of the two alone.
"""

from collections.abc import Collection, Sequence

from ssd_operator.api import reserved
from ssd_operator.api.spec import GROUP, Object
from ssd_operator.api.structural import (
    VISIBLE,
    Schema,
    array,
    block,
    boolean,
    integer,
    mapping,
    one_of,
    quantity,
    rule,
    text,
)

_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_LABEL = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_OWN_PREFIX = f"{GROUP}/"


def object_name(about: str) -> Schema:
    """The name of an object of the resource's namespace."""
    return text(about, 253, least=1, pattern=_NAME)


def secret_key(about: str) -> Schema:
    """A key of a Secret."""
    fields = {
        "name": object_name("Name of the Secret."),
        "key": text("Key in its data.", 253, least=1),
    }
    return block(about, fields, required=["name", "key"])


def image() -> Schema:
    """An image instead of the chart's."""
    return text(
        "Image; absent is the chart's. Pinned by digest, a chart upgrade leaves the pods alone.",
        512,
        pattern=VISIBLE,
    )


def resources() -> Schema:
    """Requests and limits, without GPUs."""
    amounts = quantity("Amount, such as 500m or 16Gi.")
    no_gpus = rule(
        "[has(self.requests) ? self.requests : {}, has(self.limits) ? self.limits : {}]"
        ".all(m, m.all(k, !k.endsWith('/gpu') && !k.startsWith('nvidia.com/')))",
        "leave GPUs out: their number follows from tensorParallelSize, their name from gpuResource",
    )
    fields = {
        "requests": mapping("What the scheduler sets aside, by resource.", amounts, 16),
        "limits": mapping("What the pod may use at most, by resource.", amounts, 16),
    }
    about = (
        "CPU, memory and disk of a pod; a resource named here replaces the operator's own figures."
    )
    return block(about, fields, rules=[no_gpus])


def pod_template() -> Schema:
    """What is added to all pods."""
    fields = _common("pods") | {
        "tolerations": array("Taints of nodes that the pods tolerate.", _toleration(), 16),
        "runtimeClassName": text("RuntimeClass of the pods.", 253),
        "schedulerName": text("Scheduler of the pods.", 253),
        "imagePullSecrets": array(
            "Secrets of the images' registries.",
            block("A Secret.", {"name": object_name("Name of the Secret.")}, required=["name"]),
            16,
            keys=["name"],
        ),
        "env": _variables("Variables of the processes", {"valueFrom": _value_from()}, [_NOT_BOTH]),
        "volumes": array("Further volumes of the pods.", _volume(), 16, keys=["name"]),
        "volumeMounts": array(
            "Where the process sees them.", _volume_mount(), 16, keys=["mountPath"]
        ),
    }
    about = "Additions to all pods of targets and drafts. Replaces targets and drafts."
    return block(about, fields)


def pod_overrides(pods: str) -> Schema:
    """What differs between the pods of targets and those of drafts."""
    fields = _common(pods) | {"env": _variables(f"Variables of the processes of {pods}", {}, [])}
    about = (
        f"Additions to the pods of {pods} alone, with precedence over spec.podTemplate: maps by "
        f"key, env by name. Replaces {pods}."
    )
    return block(about, fields)


def network_peer() -> Schema:
    """One side of a NetworkPolicy rule."""
    blocks = {
        "cidr": text("Addresses, such as 10.0.0.0/8.", 64, least=1),
        "except": array("Parts of them that are left out.", text("Addresses.", 64, least=1), 16),
    }
    fields = {
        "podSelector": _label_selector("Pods, of this namespace or of those selected."),
        "namespaceSelector": _label_selector("Namespaces; {} is all of them."),
        "ipBlock": block("A range of addresses.", blocks, required=["cidr"]),
    }
    rules = [
        rule(
            "has(self.ipBlock) != (has(self.podSelector) || has(self.namespaceSelector))",
            "a client is either an ipBlock, or pods and namespaces: give one of them",
        )
    ]
    return block("Who may call.", fields, rules=rules)


def _common(pods: str) -> dict[str, Schema]:
    return {
        "labels": _own_names(f"Further labels of {pods}."),
        "annotations": _own_names(f"Further annotations of {pods}.", 4096, ""),
        "nodeSelector": mapping(
            f"Labels that the nodes of {pods} must have.", text("Value.", 63, pattern=_LABEL), 16
        ),
        "priorityClassName": text(f"PriorityClass of {pods}.", 253),
    }


def _own_names(about: str, most: int = 63, pattern: str = _LABEL) -> Schema:
    not_ours = rule(
        f"self.all(k, !k.startsWith('{_OWN_PREFIX}'))",
        f"names under {_OWN_PREFIX} are the operator's: use a prefix of your own",
    )
    return mapping(about, text("Value.", most, pattern=pattern), 32, [not_ours])


def _toleration() -> Schema:
    fields = {
        "key": text("Key of the taint; empty with Exists is every taint.", 316),
        "operator": one_of("How key and value are compared.", ["Exists", "Equal"]),
        "value": text("Value of the taint, with Equal.", 63),
        "effect": one_of("Effect of the taint.", ["NoSchedule", "PreferNoSchedule", "NoExecute"]),
        "tolerationSeconds": integer("How long NoExecute is put up with.", 0, 2**31 - 1),
    }
    return block("A taint that the pods put up with.", fields)


_NOT_BOTH = rule(
    "!(has(self.value) && has(self.valueFrom))",
    "a variable has a value or a valueFrom: leave one out",
)


def _variables(about: str, more: dict[str, Schema], rules: Sequence[Object]) -> Schema:
    """Variables with a value, and what ``more`` allows beside it."""
    not_ours = rule(
        f"!(self.name in {_list_of(reserved.ENV)})",
        "the operator sets the pod's name, node, cell, host and ports: leave this variable out",
    )
    fields = {
        "name": text(
            "Name of the variable.", 128, least=1, pattern=r"^[-._A-Za-z][-._A-Za-z0-9]*$"
        ),
        "value": text("Its value.", 4096),
    }
    variable = block("A variable.", fields | more, required=["name"], rules=[*rules, not_ours])
    about += ", with precedence over the operator's. POD_NAME, NODE_NAME, CELL, HOST, PORT and "
    return array(f"{about}HTTP_PORT of a process are refused.", variable, 64, keys=["name"])


def _value_from() -> Schema:
    def key_of(kind: str) -> Schema:
        fields = {
            "name": object_name("Name of the object."),
            "key": text("Key in its data.", 253, least=1),
        }
        return block(f"A key of a {kind}.", fields, required=["name", "key"])

    sources = {
        "secretKeyRef": key_of("Secret"),
        "configMapKeyRef": key_of("ConfigMap"),
        "fieldRef": block(
            "A field of the pod itself.",
            {"fieldPath": text("Such as status.podIP.", 256, least=1)},
            required=["fieldPath"],
        ),
    }
    one_source = rule(
        "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)]"
        ".filter(x, x).size() == 1",
        "give exactly one of secretKeyRef, configMapKeyRef and fieldRef",
    )
    return block("Source of its value.", sources, rules=[one_source])


def _volume() -> Schema:
    kinds = {
        "emptyDir": block(
            "A folder that lives as long as the pod.",
            {
                "medium": one_of("Empty for the node's disk.", ["", "Memory"]),
                "sizeLimit": quantity("The pod is evicted beyond it."),
            },
        ),
        "configMap": block(
            "The files of a ConfigMap.",
            {"name": object_name("Name of the ConfigMap.")},
            required=["name"],
        ),
        "secret": block(
            "The files of a Secret.",
            {"secretName": object_name("Name of the Secret.")},
            required=["secretName"],
        ),
        "persistentVolumeClaim": block(
            "A claim of this namespace.",
            {"claimName": object_name("Name of the claim.")},
            required=["claimName"],
        ),
        "hostPath": block(
            "A folder of the node; needs a privileged namespace.",
            {"path": text("Path on the node.", 1024, least=1, pattern="^/.*$")},
            required=["path"],
        ),
    }
    given = ", ".join(f"has(self.{kind})" for kind in kinds)
    one_kind = rule(
        f"[{given}].filter(x, x).size() == 1", f"give exactly one of {', '.join(kinds)}"
    )
    name = text("Name of the volume.", 63, least=1, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    not_ours = rule(
        f"!(self.name in {_list_of(reserved.VOLUMES)})",
        "pods have a volume of this name: use another one",
    )
    return block("A volume.", {"name": name} | kinds, required=["name"], rules=[one_kind, not_ours])


def _volume_mount() -> Schema:
    fields = {
        "name": text("Name of the volume.", 63, least=1),
        "mountPath": text("Where the process sees it.", 1024, least=1, pattern="^/[^:]*$"),
        "subPath": text("Folder or file of the volume; absent is all of it.", 1024),
        "readOnly": boolean("Whether it is read-only."),
    }
    # The kubelet mounts /tmp and /tmp/ at one place.
    not_ours = rule(
        f"!self.mountPath.matches('^({'|'.join(sorted(reserved.PATHS))})/*$')",
        "pods have a volume there: use another path",
    )
    return block("A place of a volume.", fields, required=["name", "mountPath"], rules=[not_ours])


def _list_of(words: Collection[str]) -> str:
    """As CEL has it, always in one order."""
    return f"[{', '.join(repr(word) for word in sorted(words))}]"


def _label_selector(about: str) -> Schema:
    labels = mapping("Labels and their values.", text("Value.", 63, pattern=_LABEL), 16)
    return block(about, {"matchLabels": labels})
