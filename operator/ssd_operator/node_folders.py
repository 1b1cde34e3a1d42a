"""Folders of the node, which the kubelet makes as root, given to the user of the processes."""

from ssd_operator import fabric
from ssd_operator.fabric import SCRATCH_FOLDER, USER
from ssd_operator.reserved import CACHE_FOLDER
from ssd_operator.spec import Object, Resource

_OPEN_SCRATCH = (
    f"import os; os.chown({SCRATCH_FOLDER!r}, {USER}, {USER}); os.chmod({SCRATCH_FOLDER!r}, 0o700)"
)
# A folder that somebody else has prepared, or that holds something, stays theirs.
_OPEN_CACHE = (
    f"import os; p = {CACHE_FOLDER!r}; "
    f"os.stat(p).st_uid or os.listdir(p) or os.chown(p, {USER}, {USER})"
)


def init_containers(resource: Resource, image: str, pull_policy: str) -> list[Object]:
    """What runs as root before the processes, in namespaces that allow it; usually nothing."""
    found = []
    if fabric.shares_node(resource):
        mount = {"name": "tmp", "mountPath": SCRATCH_FOLDER}
        # FOWNER: a second pod finds the folder already given away.
        found.append(("scratch", _OPEN_SCRATCH, ["CHOWN", "FOWNER"], mount))
    if resource.spec.model_cache.host_path:
        mount = {"name": "cache", "mountPath": CACHE_FOLDER}
        found.append(("cache", _OPEN_CACHE, ["CHOWN"], mount))
    return [
        {
            "name": name,
            "image": image,
            "imagePullPolicy": pull_policy,
            "command": ["python", "-c", program],
            "securityContext": {
                "runAsNonRoot": False,
                "runAsUser": 0,
                "runAsGroup": 0,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], "add": capabilities},
                "readOnlyRootFilesystem": True,
            },
            "volumeMounts": [mount],
        }
        for name, program, capabilities, mount in found
    ]
