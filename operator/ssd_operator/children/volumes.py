"""Volumes of engine pods: scratch, shared memory, the model cache and a claim with weights."""

from ssd_operator.api import reserved
from ssd_operator.api.spec import Object, Resource, Source
from ssd_operator.children.environment import is_on_hub, volume_claim
from ssd_operator.children.names import Component

USER = 10001
"""uid and gid of the images' user ``ssd``."""
_GPU_SHARED_MEMORY = {Component.TARGET: "8Gi", Component.DRAFT: "1Gi"}
# A folder that a person has prepared, or that holds files, keeps its owner.
_OPEN_CACHE = (
    f"import os; p = {reserved.CACHE_FOLDER!r}; "
    f"os.stat(p).st_uid or os.listdir(p) or os.chown(p, {USER}, {USER})"
)


def volumes(resource: Resource, component: Component, source: Source) -> list[Object]:
    """Volumes of a pod, without the user's own."""
    size = _GPU_SHARED_MEMORY[component] if resource.spec.is_gpu else "64Mi"
    found: list[Object] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", **_cache(resource)},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
    ]
    if claim := volume_claim(source):
        claimed = {"claimName": claim, "readOnly": True}
        found.append({"name": "models", "persistentVolumeClaim": claimed})
    return found


def fetch_mounts() -> list[Object]:
    """Where the container that fetches a model writes."""
    return [_mount("tmp", reserved.SCRATCH_FOLDER), _mount("cache", reserved.CACHE_FOLDER)]


def volume_mounts(source: Source) -> list[Object]:
    """Where the engine sees the volumes."""
    mounts = fetch_mounts()
    if is_on_hub(source):
        # Weights that pods share: an engine compiles beside them and never writes to them.
        hub = {"subPath": reserved.HUB_SUBFOLDER, "readOnly": True}
        mounts.append(_mount("cache", reserved.HUB_FOLDER) | hub)
    mounts.append(_mount("shm", reserved.SHARED_MEMORY))
    if volume_claim(source):
        mounts.append(_mount("models", reserved.MODELS_FOLDER) | {"readOnly": True})
    return mounts


def node_folder_container(image: str, pull_policy: str) -> Object:
    """Init container that gives the node's cache folder, which the kubelet makes as root, to us."""
    return {
        "name": "cache",
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": ["python", "-c", _OPEN_CACHE],
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "runAsGroup": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [_mount("cache", reserved.CACHE_FOLDER)],
    }


def _mount(name: str, path: str) -> Object:
    return {"name": name, "mountPath": path}


def _cache(resource: Resource) -> Object:
    cache = resource.spec.model_cache
    match cache.type:
        case "PVC":
            return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
        case "HostPath":
            return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
        case _:
            return {"emptyDir": {"sizeLimit": str(cache.size_limit)} if cache.size_limit else {}}
