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
    between,
    kubernetes_object,
    text,
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


@kubernetes_object()
class ObjectKey(TypedDict):
    """A key of a Secret or ConfigMap in the namespace of the resource."""

    name: ObjectName
    """Name of the object."""
    key: Annotated[str, text(253, least=1)]
    """Key in its data."""


@kubernetes_object()
class Reference(TypedDict):
    """An object in the namespace of the resource."""

    name: ObjectName
    """Name of the object."""


@kubernetes_object(
    (
        "[has(self.requests) ? self.requests : {}, has(self.limits) ? self.limits : {}]"
        ".all(m, m.all(k, !k.endsWith('/gpu') && !k.startsWith('nvidia.com/')))",
        "leave GPUs out: their number follows from tensorParallelSize, their name from gpuResource",
    )
)
class Resources(TypedDict, total=False):
    """CPU, memory and disk of a pod."""

    requests: Annotated[dict[str, Quantity], Field(max_length=16)]
    """Amounts that the scheduler reserves, such as cpu: 500m."""
    limits: Annotated[dict[str, Quantity], Field(max_length=16)]
    """Maximum amounts, such as memory: 16Gi."""


@kubernetes_object()
class Toleration(TypedDict, total=False):
    """A taint of nodes that the pods tolerate."""

    key: Annotated[str, text(316)]
    """Key of the taint; empty with Exists matches every taint."""
    operator: Literal["Exists", "Equal"]
    """How key and value are compared."""
    value: Annotated[str, text(63)]
    """Value of the taint, with Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
    """Effect of the taint."""
    tolerationSeconds: Annotated[int, between(0, 2**31 - 1)]
    """How long NoExecute is tolerated."""


@kubernetes_object()
class FieldReference(TypedDict):
    """A field of the pod."""

    fieldPath: Annotated[str, text(256, least=1)]
    """Path, such as status.podIP."""


@kubernetes_object(
    (
        "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)]"
        ".filter(x, x).size() == 1",
        "give exactly one of secretKeyRef, configMapKeyRef and fieldRef",
    )
)
class ValueSource(TypedDict, total=False):
    """Source of a value."""

    secretKeyRef: ObjectKey
    """A key of a Secret."""
    configMapKeyRef: ObjectKey
    """A key of a ConfigMap."""
    fieldRef: FieldReference


@kubernetes_object(_NOT_RESERVED)
class PlainVariable(TypedDict, total=False):
    """An environment variable."""

    name: Required[_VariableName]
    """Name of the variable."""
    value: Annotated[str, text(4096)]
    """Its value."""


@kubernetes_object(
    (
        "!(has(self.value) && has(self.valueFrom))",
        "a variable has a value or a valueFrom: leave one out",
    ),
    _NOT_RESERVED,
)
class Variable(TypedDict, total=False):
    """An environment variable."""

    name: Required[_VariableName]
    """Name of the variable."""
    value: Annotated[str, text(4096)]
    """Its value."""
    valueFrom: ValueSource


@kubernetes_object()
class EmptyDir(TypedDict, total=False):
    """A folder that exists as long as the pod."""

    medium: Literal["", "Memory"]
    """Empty for the disk of the node."""
    sizeLimit: Quantity
    """Maximum size; a pod that exceeds it is evicted."""


@kubernetes_object()
class SecretFiles(TypedDict):
    """The files of a Secret."""

    secretName: ObjectName
    """Name of the Secret."""


@kubernetes_object()
class ClaimFolder(TypedDict):
    """A PersistentVolumeClaim of this namespace."""

    claimName: ObjectName
    """Name of the claim."""


@kubernetes_object()
class HostPath(TypedDict):
    """A folder of the node; needs a privileged namespace."""

    path: Annotated[str, text(1024, least=1, pattern="^/.*$")]
    """Path on the node."""


@kubernetes_object(
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

    name: Required[Annotated[str, text(63, least=1, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]]
    """Name of the volume."""
    emptyDir: EmptyDir
    configMap: Reference
    """The files of a ConfigMap."""
    secret: SecretFiles
    persistentVolumeClaim: ClaimFolder
    hostPath: HostPath


@kubernetes_object(
    (
        # The kubelet mounts /tmp and /tmp/ at one place.
        f"!self.mountPath.matches('^({'|'.join(sorted(reserved.PATHS))})/*$')",
        "pods have a volume there: use another path",
    )
)
class VolumeMount(TypedDict, total=False):
    """Where a container sees a volume."""

    name: Required[Annotated[str, text(63, least=1)]]
    """Name of the volume."""
    mountPath: Required[Annotated[str, text(1024, least=1, pattern="^/[^:]*$")]]
    """Path in the container."""
    subPath: Annotated[str, text(1024)]
    """Folder or file of the volume; absent means all of it."""
    readOnly: bool
    """Whether the container cannot write to it."""


@kubernetes_object()
class LabelSelector(TypedDict, total=False):
    """Objects with these labels; {} selects all."""

    matchLabels: Annotated[dict[str, LabelValue], Field(max_length=16)]
    """Labels and their values."""


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


@kubernetes_object()
class IpBlock(_Exceptions):
    """A range of addresses."""

    cidr: Annotated[str, text(64, least=1)]
    """Addresses, such as 10.0.0.0/8."""


@kubernetes_object(
    (
        "has(self.ipBlock) != (has(self.podSelector) || has(self.namespaceSelector))",
        "a client is either an ipBlock, or pods and namespaces: give one of them",
    )
)
class NetworkPeer(TypedDict, total=False):
    """One side of a NetworkPolicy rule."""

    podSelector: LabelSelector
    """Pods, of this namespace or of the selected ones."""
    namespaceSelector: LabelSelector
    """Namespaces; {} selects all."""
    ipBlock: IpBlock
