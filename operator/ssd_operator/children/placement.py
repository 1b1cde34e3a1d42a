"""Where pods may run: drafts beside their target, targets apart.

*Decision*: a draft follows its target; a target looks for its drafts only softly. *Because* the
scheduler places a target without seeing its drafts: a hard rule in both directions would leave both
Pending. A target that is made again finds its way back to its drafts by the soft rule.
"""

from collections.abc import Mapping

from ssd_operator.api.spec import GPU, Accelerator, Object, Resource, Sharing
from ssd_operator.children.names import COMPONENT_LABEL, Component, draft_cell, selector

NODE_KEY = "kubernetes.io/hostname"
PRODUCT_KEY = "nvidia.com/gpu.product"
DRAFTS_WEIGHT = 100
"""Of a target's wish for the node of its drafts, and of a draft's wish for its target's."""
SPREAD_WEIGHT = 50
"""Of a target's wish for a node without another target."""


def target_affinity(resource: Resource, cell: int) -> Object:
    """Near its own drafts, away from other targets, on the GPUs that were asked for."""
    placement = resource.spec.placement
    drafts = _term(
        selector(resource, Component.DRAFT, draft_cell(resource, cell)), placement.topology_key
    )
    others = _term({COMPONENT_LABEL: str(Component.TARGET)}, NODE_KEY)
    affinity: Object = _product_affinity(resource)
    if placement.policy != "None":
        affinity["podAffinity"] = _preferred(drafts, DRAFTS_WEIGHT)
    if placement.exclusive_node:
        # All namespaces: the GPUs of a node belong to everybody.
        others["namespaceSelector"] = {}
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [others]}
    else:
        affinity["podAntiAffinity"] = _preferred(others, SPREAD_WEIGHT)
    return affinity


def draft_affinity(resource: Resource, cell: int | None) -> Object:
    """Beside the target that dials it; until that is placed, a draft that must is Pending.

    ``cell`` is None in a Pool: any target of the resource will do.
    """
    targets = selector(resource, Component.TARGET, cell)
    beside = _term(targets, resource.spec.placement.topology_key)
    affinity: Object = _product_affinity(resource)
    match effective_policy(resource):
        case "Required":
            affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [beside]}
        case "Preferred":
            affinity["podAffinity"] = _preferred(beside, DRAFTS_WEIGHT)
    return affinity


def effective_policy(resource: Resource) -> str:
    """``Required``, ``Preferred`` or ``None``: what ``Auto`` means here."""
    spec = resource.spec
    if spec.placement.policy != "Auto":
        return spec.placement.policy
    is_beside = spec.accelerator is Accelerator.NVIDIA and spec.draft.sharing is Sharing.CELL
    return "Required" if is_beside else "Preferred"


def tolerations(resource: Resource) -> list[Object]:
    """The taint of GPU nodes is ``nvidia.com/gpu`` also where their resources are MIG slices."""
    if resource.spec.accelerator is Accelerator.CPU:
        return []
    return [{"key": GPU, "operator": "Exists"}]


def _product_affinity(resource: Resource) -> Object:
    products = resource.spec.placement.gpu_products
    if resource.spec.accelerator is Accelerator.CPU or not products:
        return {}
    expression = {"key": PRODUCT_KEY, "operator": "In", "values": list(products)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _term(labels: Mapping[str, str], topology_key: str) -> Object:
    return {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": topology_key}


def _preferred(term: Object, weight: int) -> Object:
    return {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": weight, "podAffinityTerm": term}
        ]
    }
