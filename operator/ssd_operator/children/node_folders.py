"""Folders of the node, which the kubelet makes as root, given to the user of the processes."""

from ssd_operator.api.reserved import CACHE_FOLDER
from ssd_operator.api.spec import Object, Resource

USER = 10001
"""uid and gid of the images' user ``ssd``."""
# A folder that somebody else has prepared, or that holds something, stays theirs.
_OPEN_CACHE = (
    f"import os; p = {CACHE_FOLDER!r}; "
    f"os.stat(p).st_uid or os.listdir(p) or os.chown(p, {USER}, {USER})"
)


def init_containers(resource: Resource, image: str, pull_policy: str) -> list[Object]:
    """What runs as root before the processes, in namespaces that allow it; usually nothing."""
    if not resource.spec.model_cache.host_path:
        return []
    return [
        {
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
            "volumeMounts": [{"name": "cache", "mountPath": CACHE_FOLDER}],
        }
    ]
