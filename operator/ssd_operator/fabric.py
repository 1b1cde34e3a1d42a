"""What pods get for the sake of their links, by tier. It alone grants them to engines.

*Decision*: only ``RDMA`` and ``NVLinkPrivileged`` take any. *Because* memory that a network card
reads must be pinned (IPC_LOCK), and two pods are two hosts to NCCL until they share its host id,
/tmp, IPC and devices. *Not chosen*: a claim that all pods of a cell share, which needs drivers that
are not released. *Revisit when* a link reports NVLink without these.
"""

from ssd_operator.spec import Object, Resource, Tier

USER = 10001
"""uid and gid of the images' user ``ssd``."""
HOST_FOLDER = "/var/run/ssd"
"""Of the node; below it each resource has a folder of its own."""
SCRATCH_FOLDER = "/tmp"  # noqa: S108 - the pod's own volume, or the resource's
HOST_ID = "NCCL_HOSTID"
"""Pods of one node say the same, or NCCL takes them for two hosts and uses sockets, silently."""
_NO_MESH = {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"}
_NVLINK_VARIABLES = {
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_IPC_USE_ABSTRACT_SOCKET": "0",
    "NCCL_P2P_LEVEL": "NVL",
    "NCCL_RAS_ENABLE": "0",
}


def is_collective(resource: Resource) -> bool:
    """Whether its links may use NCCL, which opens ports at random and is not encrypted."""
    return _tier(resource) is not Tier.TCP


def annotations(resource: Resource) -> dict[str, str]:
    """No sidecar stands between two ends of NCCL."""
    return dict(_NO_MESH) if is_collective(resource) else {}


def limits(resource: Resource) -> dict[str, str]:
    """Network cards of a pod."""
    rdma = resource.spec.transport.rdma
    return {} if rdma is None else {rdma.resource_name: str(rdma.count)}


def security_context(resource: Resource) -> Object:
    """What a container may do; the root file system aside."""
    match _tier(resource):
        case Tier.NVLINK_PRIVILEGED:
            return {"privileged": True}
        case Tier.RDMA:
            capabilities = {"drop": ["ALL"], "add": ["IPC_LOCK"]}
            return {"allowPrivilegeEscalation": False, "capabilities": capabilities}
        case Tier.TCP:
            return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def shares_node(resource: Resource) -> bool:
    """Whether its pods on a node share IPC and /tmp; /dev/shm is the node's own then."""
    return _tier(resource) is Tier.NVLINK_PRIVILEGED


def scratch_volume(resource: Resource) -> Object:
    """What is mounted at /tmp."""
    if not shares_node(resource):
        return {"emptyDir": {}}
    path = f"{HOST_FOLDER}/{resource.namespace}.{resource.uid}"
    return {"hostPath": {"path": path, "type": "DirectoryOrCreate"}}


def environment(resource: Resource) -> list[Object]:
    """Variables of NCCL: ours, then the user's, which win; the host id is never the user's."""
    if not is_collective(resource):
        return []
    values = _NVLINK_VARIABLES if shares_node(resource) else {}
    values = values | dict(resource.spec.transport.nccl_env)
    values.pop(HOST_ID, None)
    found: list[Object] = [{"name": name, "value": values[name]} for name in sorted(values)]
    if shares_node(resource):
        # By node: equal ids on two nodes break NCCL's start.
        found.append({"name": HOST_ID, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    return found


def _tier(resource: Resource) -> Tier:
    return resource.spec.transport.effective_tier
