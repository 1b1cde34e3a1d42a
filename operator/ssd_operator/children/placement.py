"""Where pods may run: drafts beside their target, targets apart.

*Decision*: a draft must follow its target; a target only prefers the node of its drafts. *Because*
the scheduler places a target without seeing its drafts: a hard rule in both directions would leave
both Pending. A target that is created again returns to its drafts by the preference.
"""

from collections.abc import Mapping

from ssd_operator.api.spec import GPU, Object, Resource
from ssd_operator.children.objects import COMPONENT_LABEL, Component, Workload, peers

_NODE_KEY = "kubernetes.io/hostname"
_PRODUCT_KEY = "nvidia.com/gpu.product"
_BESIDE_WEIGHT = 100
"""Weight of a target's preference for the node of its drafts, and of the reverse."""
_SPREAD_WEIGHT = 50
"""Weight of a target's preference for a node without another target."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def affinity(workload: Workload) -> Object:
    """Affinity of a pod; the drafts of a Pool follow any target of theirs."""
    resource, placement, affinities = workload.resource, workload.spec.placement, Object()
    policy = effective_policy(resource)
    if workload.device == "nvidia" and placement.gpu_products:
        products = list(placement.gpu_products)
        expression = {"key": _PRODUCT_KEY, "operator": "In", "values": products}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
        affinities["nodeAffinity"] = {_REQUIRED: terms}
    beside = _term(peers(resource, workload.component, workload.cell or 0), placement.topology_key)
    if policy == "Required" and not workload.is_target:
        # Until the target has a node, the draft is Pending.
        affinities["podAffinity"] = {_REQUIRED: [beside]}
    elif policy != "None":
        affinities["podAffinity"] = _preferred(beside, _BESIDE_WEIGHT)
    if workload.is_target:
        others = _term({COMPONENT_LABEL: str(Component.TARGET)}, _NODE_KEY)
        if placement.exclusive_node:
            # The GPUs of a node belong to everybody. A target on CPUs needs so little of a node
            # that a user of one namespace could exclude the others from all nodes.
            everywhere: Object = {"namespaceSelector": {}} if resource.spec.is_gpu else {}
            affinities["podAntiAffinity"] = {_REQUIRED: [others | everywhere]}
        else:
            affinities["podAntiAffinity"] = _preferred(others, _SPREAD_WEIGHT)
    return affinities


def effective_policy(resource: Resource) -> str:
    """``Required``, ``Preferred`` or ``None``: what ``Auto`` means here."""
    spec = resource.spec
    if spec.placement.policy != "Auto":
        return spec.placement.policy
    is_bound = spec.is_gpu and spec.draft.sharing == "Cell"
    return "Required" if is_bound else "Preferred"


def tolerations(resource: Resource) -> list[Object]:
    """The taint of GPU nodes is ``nvidia.com/gpu`` also where their resources are MIG slices.

    Drafts on CPUs run on these nodes too.
    """
    return [{"key": GPU, "operator": "Exists"}] if resource.spec.is_gpu else []


def _term(labels: Mapping[str, str], topology_key: str) -> Object:
    return {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": topology_key}


def _preferred(term: Object, weight: int) -> Object:
    return {_PREFERRED: [{"weight": weight, "podAffinityTerm": term}]}
