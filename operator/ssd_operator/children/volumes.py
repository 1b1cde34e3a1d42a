"""Volumes of pods, each with the place where the containers see it. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from ssd_operator.api import reserved
from ssd_operator.api.spec import Object
from ssd_operator.children.environment import ADMIN_TOKENS, CLIENT_TOKENS, LINK_TOKENS
from ssd_operator.children.objects import Workload
from ssd_operator.children.processes import process_of
from ssd_operator.children.resources import present

_SECRET_MODE = 0o440
"""The process reads files of Secrets as their group."""


class Volume(NamedTuple):
    """A volume and its folder in the containers."""

    name: str
    folder: str
    source: Object
    is_read_only: bool = False

    @property
    def spec(self) -> Object:
        """The volume of a pod."""
        return {"name": self.name, **self.source}

    @property
    def mount(self) -> Object:
        """Its mount, without subPath: the kubelet replaces files when a Secret changes."""
        read_only = {"readOnly": True} if self.is_read_only else {}
        return {"name": self.name, "mountPath": self.folder} | read_only


SCRATCH = Volume("tmp", reserved.SCRATCH_FOLDER, {"emptyDir": {}})


def engine_volumes(workload: Workload) -> list[Volume]:
    """Volumes of an engine's pods, without the user's own; scratch and cache first."""
    block, cache, security = workload.block, workload.spec.model_cache, workload.spec.security
    size = process_of(workload.resource, workload.component).shared_memory[workload.device]
    caches: dict[str, Object] = {
        "PVC": {"persistentVolumeClaim": {"claimName": cache.claim_name}},
        "HostPath": {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}},
        "EmptyDir": {"emptyDir": present(sizeLimit=str(cache.size_limit or ""))},
    }
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
    found = [
        SCRATCH,
        Volume("cache", reserved.CACHE_FOLDER, caches[cache.type]),
        Volume("shm", reserved.SHARED_MEMORY, memory),
    ]
    if claim := block.source.claim:
        claimed = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        found.append(Volume("models", reserved.MODELS_FOLDER, claimed, is_read_only=True))
    if (tls := security.tls) is not None:
        secret = tls.target_secret_name if workload.is_target else tls.draft_secret_name
        found.append(secret_volume(reserved.TLS_VOLUME, reserved.TLS_FOLDER, secret))
    if (name := security.token_secret_name) is not None:
        # A draft has no token of a client.
        clients = [CLIENT_TOKENS] if workload.is_target else []
        files = {key: key for key in (*clients, LINK_TOKENS, ADMIN_TOKENS)}
        found.append(secret_volume(reserved.TOKENS_VOLUME, reserved.TOKENS_FOLDER, name, files))
    return found


def secret_volume(
    name: str, folder: str, secret: str, files: Mapping[str, str] | None = None
) -> Volume:
    """A volume of a Secret, with these of its keys by name of the file, or with all."""
    items = [{"key": key, "path": path} for path, key in (files or {}).items()]
    source = {"secretName": secret, "defaultMode": _SECRET_MODE} | present(items=items)
    return Volume(name, folder, {"secret": source}, is_read_only=True)
