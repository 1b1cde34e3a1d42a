"""The parts of Kubernetes types that users may write in a spec, spelled as Kubernetes does."""

from collections.abc import Collection
from typing import Annotated, Literal, NotRequired, Required

from pydantic import Field
from typing_extensions import TypedDict

from ssd_operator.api import reserved
from ssd_operator.api.fields import (
    LabelValue,
    ObjectName,
    Quantity,
    about,
    between,
    text,
    with_rules,
)

_VariableName = Annotated[str, text(128, least=1, pattern=r"^[-._A-Za-z][-._A-Za-z0-9]*$")]
_VOLUME_KINDS = ("emptyDir", "configMap", "secret", "persistentVolumeClaim", "hostPath")
_GIVEN_KINDS = ", ".join(f"has(self.{kind})" for kind in _VOLUME_KINDS)


def _list_of(words: Collection[str]) -> str:
    """As CEL has it, always in one order."""
    return f"[{', '.join(repr(word) for word in sorted(words))}]"


_NOT_RESERVED = (
    f"!(self.name in {_list_of(reserved.ENV)})",
    "the operator sets the pod's name, node, cell, host and ports: leave this variable out",
)


class ObjectKey(TypedDict):
    """A key of a Secret or ConfigMap in the namespace of the resource."""

    name: Annotated[ObjectName, about("Name of the object.")]
    key: Annotated[str, text(253, "Key in its data.", least=1)]


class Reference(TypedDict):
    """An object in the namespace of the resource."""

    name: Annotated[ObjectName, about("Name of the object.")]


@with_rules(
    (
        "[has(self.requests) ? self.requests : {}, has(self.limits) ? self.limits : {}]"
        ".all(m, m.all(k, !k.endsWith('/gpu') && !k.startsWith('nvidia.com/')))",
        "leave GPUs out: their number follows from tensorParallelSize, their name from gpuResource",
    )
)
class Resources(TypedDict, total=False):
    """CPU, memory and disk of a pod."""

    requests: Annotated[
        dict[str, Quantity],
        Field(max_length=16, description="Amounts that the scheduler reserves, such as cpu: 500m."),
    ]
    limits: Annotated[
        dict[str, Quantity],
        Field(max_length=16, description="Maximum amounts, such as memory: 16Gi."),
    ]


class Toleration(TypedDict, total=False):
    """A taint of nodes that the pods tolerate."""

    key: Annotated[str, text(316, "Key of the taint; empty with Exists matches every taint.")]
    operator: Annotated[Literal["Exists", "Equal"], about("How key and value are compared.")]
    value: Annotated[str, text(63, "Value of the taint, with Equal.")]
    effect: Annotated[
        Literal["NoSchedule", "PreferNoSchedule", "NoExecute"], about("Effect of the taint.")
    ]
    tolerationSeconds: Annotated[int, between(0, 2**31 - 1, "How long NoExecute is tolerated.")]


class FieldReference(TypedDict):
    """A field of the pod."""

    fieldPath: Annotated[str, text(256, "Path, such as status.podIP.", least=1)]


@with_rules(
    (
        "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)]"
        ".filter(x, x).size() == 1",
        "give exactly one of secretKeyRef, configMapKeyRef and fieldRef",
    )
)
class ValueSource(TypedDict, total=False):
    """Source of a value."""

    secretKeyRef: Annotated[ObjectKey, about("A key of a Secret.")]
    configMapKeyRef: Annotated[ObjectKey, about("A key of a ConfigMap.")]
    fieldRef: FieldReference


@with_rules(_NOT_RESERVED)
class PlainVariable(TypedDict, total=False):
    """An environment variable."""

    name: Required[Annotated[_VariableName, about("Name of the variable.")]]
    value: Annotated[str, text(4096, "Its value.")]


@with_rules(
    (
        "!(has(self.value) && has(self.valueFrom))",
        "a variable has a value or a valueFrom: leave one out",
    ),
    _NOT_RESERVED,
)
class Variable(PlainVariable, total=False):
    """An environment variable."""

    valueFrom: ValueSource


class EmptyDir(TypedDict, total=False):
    """A folder that exists as long as the pod."""

    medium: Annotated[Literal["", "Memory"], about("Empty for the disk of the node.")]
    sizeLimit: Annotated[Quantity, about("Maximum size; a pod that exceeds it is evicted.")]


class SecretFiles(TypedDict):
    """The files of a Secret."""

    secretName: Annotated[ObjectName, about("Name of the Secret.")]


class ClaimFolder(TypedDict):
    """A PersistentVolumeClaim of this namespace."""

    claimName: Annotated[ObjectName, about("Name of the claim.")]


class HostPath(TypedDict):
    """A folder of the node; needs a privileged namespace."""

    path: Annotated[str, text(1024, "Path on the node.", least=1, pattern="^/.*$")]


@with_rules(
    (
        f"[{_GIVEN_KINDS}].filter(x, x).size() == 1",
        f"give exactly one of {', '.join(_VOLUME_KINDS)}",
    ),
    (
        f"!(self.name in {_list_of(reserved.VOLUMES)})",
        "pods have a volume of this name: use another one",
    ),
)
class Volume(TypedDict, total=False):
    """A volume."""

    name: Required[
        Annotated[
            str,
            text(63, "Name of the volume.", least=1, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
        ]
    ]
    emptyDir: EmptyDir
    configMap: Annotated[Reference, about("The files of a ConfigMap.")]
    secret: SecretFiles
    persistentVolumeClaim: ClaimFolder
    hostPath: HostPath


@with_rules(
    (
        # The kubelet mounts /tmp and /tmp/ at one place.
        f"!self.mountPath.matches('^({'|'.join(sorted(reserved.PATHS))})/*$')",
        "pods have a volume there: use another path",
    )
)
class VolumeMount(TypedDict, total=False):
    """Where a container sees a volume."""

    name: Required[Annotated[str, text(63, "Name of the volume.", least=1)]]
    mountPath: Required[
        Annotated[str, text(1024, "Path in the container.", least=1, pattern="^/[^:]*$")]
    ]
    subPath: Annotated[str, text(1024, "Folder or file of the volume; absent means all of it.")]
    readOnly: Annotated[bool, about("Whether the container cannot write to it.")]


class LabelSelector(TypedDict, total=False):
    """Objects with these labels; {} selects all."""

    matchLabels: Annotated[
        dict[str, LabelValue], Field(max_length=16, description="Labels and their values.")
    ]


_Exceptions = TypedDict(
    "_Exceptions",
    {  # The word cannot be the name of an attribute.
        "except": NotRequired[
            Annotated[
                list[Annotated[str, text(64, least=1)]],
                Field(max_length=16, description="Parts of the range that are left out."),
            ]
        ]
    },
)


class IpBlock(_Exceptions):
    """A range of addresses."""

    cidr: Annotated[str, text(64, "Addresses, such as 10.0.0.0/8.", least=1)]


@with_rules(
    (
        "has(self.ipBlock) != (has(self.podSelector) || has(self.namespaceSelector))",
        "a client is either an ipBlock, or pods and namespaces: give one of them",
    )
)
class NetworkPeer(TypedDict, total=False):
    """One side of a NetworkPolicy rule."""

    podSelector: Annotated[LabelSelector, about("Pods, of this namespace or of the selected ones.")]
    namespaceSelector: Annotated[LabelSelector, about("Namespaces; {} selects all.")]
    ipBlock: IpBlock
