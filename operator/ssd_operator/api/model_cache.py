"""The block ``modelCache`` of a spec."""

from typing import Annotated, Literal

from ssd_operator.api.fields import Block, ObjectName, Quantity, checked, text

_SYSTEM_FOLDERS = (
    "^(/+[.])*/+("
    "(home|opt|srv|tmp|var)?/*"
    "|(bin|boot|dev|etc|lib|lib32|lib64|proc|root|run|sbin|sys|usr)(/.*)?"
    "|var/+(cache|lib|log|spool|tmp)/*"
    "|var/+(run|lib/+(containerd|docker|etcd|kubelet))(/.*)?"
    ")$"
)


class ModelCache(Block):
    """Where fetched weights are kept between starts."""

    model_config = checked(
        (
            "(self.type == 'HostPath') == has(self.hostPath)",
            "hostPath: required with type HostPath and refused elsewhere",
        ),
        (
            "(self.type == 'PVC') == has(self.claimName)",
            "claimName: required with type PVC and refused elsewhere",
        ),
        (
            "!has(self.sizeLimit) || self.type == 'EmptyDir'",
            "sizeLimit: only EmptyDir has one, leave it out",
        ),
        (
            "!has(self.hostPath) || !self.hostPath.contains('..')",
            "hostPath: '..' is not allowed, write the path itself",
        ),
        (
            f"!has(self.hostPath) || !self.hostPath.matches('{_SYSTEM_FOLDERS}')",
            "hostPath: a folder of the node's own system; give the cache one of its own, such "
            "as /var/cache/ssd",
        ),
    )
    type: Literal["EmptyDir", "HostPath", "PVC"] = "EmptyDir"
    """EmptyDir: each new pod fetches the weights. HostPath: they are kept on the node, which needs
    a privileged namespace. PVC: they are kept in a claim. A change replaces targets and drafts."""
    host_path: Annotated[str, text(1024, pattern=r"^/[-A-Za-z0-9_./]*$")] | None = None
    """Folder of the node, with HostPath. If it is new, or empty and owned by root, an init
    container that runs as root gives it to uid 10001. A change replaces targets and drafts."""
    claim_name: ObjectName | None = None
    """Claim, with PVC. A change replaces targets and drafts."""
    size_limit: Quantity | None = None
    """Maximum size of an EmptyDir. Pods that fetch a model request as much ephemeral storage, so
    that they run on nodes with room for it. A change replaces targets and drafts."""
