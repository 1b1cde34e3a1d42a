"""The parts of Kubernetes types that users may write in a spec, spelled as Kubernetes does.

Only the API server validates them: by the CRD, and again as a part of the child that has them.
Amounts of resources are read here too, because the number of threads is calculated from them.
"""

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import WithJsonSchema

from ssd_operator.api import reserved
from ssd_operator.api.fields import LABEL, NAME, QUANTITY, Quantity, block, rules, string

_VOLUME_KINDS = ("emptyDir", "configMap", "secret", "persistentVolumeClaim", "hostPath")
_GIVEN_KINDS = ", ".join(f"has(self.{kind})" for kind in _VOLUME_KINDS)


def _list_of(words: Collection[str]) -> str:
    """Return a list as CEL spells it, always in one order."""
    return f"[{', '.join(repr(word) for word in sorted(words))}]"


def _name(about: str = "Name of the object.") -> dict[str, Any]:
    return string(about, 253, minLength=1, pattern=NAME)


def _map(about: str, values: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": about,
        "type": "object",
        "additionalProperties": values,
        "maxProperties": 16,
    }


def _key(about: str) -> dict[str, Any]:
    key = string("Key in its data.", 253, minLength=1)
    return block(about, "name key", name=_name(), key=key)


_NOT_RESERVED = (
    f"!(self.name in {_list_of(reserved.ENV)})",
    "the operator sets the pod's name, node, cell, host and ports: leave this variable out",
)
_VARIABLE = {
    "name": string(
        "Name of the variable.", 128, minLength=1, pattern=r"^[-._A-Za-z][-._A-Za-z0-9]*$"
    ),
    "value": string("Its value.", 4096),
}
_VALUE_SOURCE = block(
    "Source of a value.",
    secretKeyRef=_key("A key of a Secret."),
    configMapKeyRef=_key("A key of a ConfigMap."),
    fieldRef=block(
        "A field of the pod.",
        "fieldPath",
        fieldPath=string("Path, such as status.podIP.", 256, minLength=1),
    ),
) | rules(
    (
        "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)]"
        ".filter(x, x).size() == 1",
        "give exactly one of secretKeyRef, configMapKeyRef and fieldRef",
    )
)
_RESOURCES = block(
    "CPU, memory and disk of a pod.",
    requests=_map("Amounts that the scheduler reserves, such as cpu: 500m.", QUANTITY),
    limits=_map("Maximum amounts, such as memory: 16Gi.", QUANTITY),
) | rules(
    (
        "[has(self.requests) ? self.requests : {}, has(self.limits) ? self.limits : {}]"
        ".all(m, m.all(k, !k.endsWith('/gpu') && !k.startsWith('nvidia.com/')))",
        "leave GPUs out: their number follows from tensorParallelSize, their name from gpuResource",
    )
)
_SECONDS = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOLERATION = block(
    "A taint of nodes that the pods tolerate.",
    key=string("Key of the taint; empty with Exists matches every taint.", 316),
    operator=string("How key and value are compared.", enum=["Exists", "Equal"]),
    value=string("Value of the taint, with Equal.", 63),
    effect=string("Effect of the taint.", enum=["NoSchedule", "PreferNoSchedule", "NoExecute"]),
    tolerationSeconds={"description": "How long NoExecute is tolerated.", **_SECONDS},
)
_PLAIN_VARIABLE = block("An environment variable.", "name", **_VARIABLE)
_SOURCED_VARIABLE = block("An environment variable.", "name", **_VARIABLE, valueFrom=_VALUE_SOURCE)
_MAX_SIZE = {"description": "Maximum size; a pod that exceeds it is evicted."}
_VOLUME = block(
    "A volume.",
    "name",
    name=string("Name of the volume.", 63, minLength=1, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
    emptyDir=block(
        "A folder that exists as long as the pod.",
        medium=string("Empty for the disk of the node.", enum=["", "Memory"]),
        sizeLimit=_MAX_SIZE | QUANTITY,
    ),
    configMap=block("The files of a ConfigMap.", "name", name=_name()),
    secret=block("The files of a Secret.", "secretName", secretName=_name("Name of the Secret.")),
    persistentVolumeClaim=block(
        "A PersistentVolumeClaim of this namespace.",
        "claimName",
        claimName=_name("Name of the claim."),
    ),
    hostPath=block(
        "A folder of the node; needs a privileged namespace.",
        "path",
        path=string("Path on the node.", 1024, minLength=1, pattern="^/.*$"),
    ),
) | rules(
    (
        f"[{_GIVEN_KINDS}].filter(x, x).size() == 1",
        f"give exactly one of {', '.join(_VOLUME_KINDS)}",
    ),
    (
        f"!(self.name in {_list_of(reserved.VOLUMES)})",
        "pods have a volume of this name: use another one",
    ),
)
_MOUNT = block(
    "Where a container sees a volume.",
    "name mountPath",
    name=string("Name of the volume.", 63, minLength=1),
    mountPath=string("Path in the container.", 1024, minLength=1, pattern="^/[^:]*$"),
    subPath=string("Folder or file of the volume; absent means all of it.", 1024),
    readOnly={"description": "Whether the container cannot write to it.", "type": "boolean"},
) | rules(
    (
        # The kubelet mounts /tmp and /tmp/ at one place.
        f"!self.mountPath.matches('^({'|'.join(sorted(reserved.PATHS))})/*$')",
        "pods have a volume there: use another path",
    )
)
_LABELS = _map("Labels and their values.", LABEL)
_PARTS = {"description": "Parts of the range that are left out.", "type": "array", "maxItems": 16}
_PART = {"type": "string", "minLength": 1, "maxLength": 64}
_PEER = block(
    "One side of a NetworkPolicy rule.",
    podSelector=block("Pods, of this namespace or of the selected ones.", matchLabels=_LABELS),
    namespaceSelector=block("Namespaces; {} selects all.", matchLabels=_LABELS),
    ipBlock=block(
        "A range of addresses.",
        "cidr",
        **{"except": {**_PARTS, "items": _PART}},
        cidr=string("Addresses, such as 10.0.0.0/8.", 64, minLength=1),
    ),
) | rules(
    (
        "has(self.ipBlock) != (has(self.podSelector) || has(self.namespaceSelector))",
        "a client is either an ipBlock, or pods and namespaces: give one of them",
    )
)
_ONE_VALUE = (
    "!(has(self.value) && has(self.valueFrom))",
    "a variable has a value or a valueFrom: leave one out",
)

_Part = dict[str, Any]
ObjectKey = Annotated[
    _Part, WithJsonSchema(_key("A key of a Secret or ConfigMap in the namespace of the resource."))
]
Reference = Annotated[
    _Part,
    WithJsonSchema(block("An object in the namespace of the resource.", "name", name=_name())),
]
Resources = Annotated[dict[str, dict[str, Quantity]], WithJsonSchema(_RESOURCES)]
Toleration = Annotated[_Part, WithJsonSchema(_TOLERATION)]
PlainVariable = Annotated[_Part, WithJsonSchema(_PLAIN_VARIABLE | rules(_NOT_RESERVED))]
Variable = Annotated[_Part, WithJsonSchema(_SOURCED_VARIABLE | rules(_ONE_VALUE, _NOT_RESERVED))]
Volume = Annotated[_Part, WithJsonSchema(_VOLUME)]
VolumeMount = Annotated[_Part, WithJsonSchema(_MOUNT)]
NetworkPeer = Annotated[_Part, WithJsonSchema(_PEER)]
