"""Where pods may run: drafts beside their target, targets apart.

*Decision*: a draft must follow its target; a target only prefers the node of its drafts. *Because*
the scheduler places a target without seeing its drafts: a hard rule in both directions would leave
both Pending. A target that is created again returns to its drafts by the preference.
"""

from collections.abc import Mapping

from ssd_operator.api.spec import GPU, Accelerator, Object, Resource
from ssd_operator.children.names import COMPONENT_LABEL, Component, draft_cell, selector

_NODE_KEY = "kubernetes.io/hostname"
_PRODUCT_KEY = "nvidia.com/gpu.product"
_BESIDE_WEIGHT = 100
"""Of a target's preference for the node of its drafts, and of a draft's for its target's."""
_SPREAD_WEIGHT = 50
"""Of a target's preference for a node without another target."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def device_of(resource: Resource, component: Component) -> Accelerator:
    """Device of the pods of a component."""
    spec = resource.spec
    return spec.accelerator if component is Component.TARGET else spec.draft_device


def affinity(resource: Resource, component: Component, cell: int | None) -> Object:
    """Affinity of a pod; ``cell`` is None for the drafts of a Pool, which follow any target."""
    found = _product_affinity(resource, component)
    placement, policy = resource.spec.placement, effective_policy(resource)
    if component is Component.DRAFT:
        beside = _term(selector(resource, Component.TARGET, cell), placement.topology_key)
        if policy == "Required":
            # Until the target has a node, the draft is Pending.
            found["podAffinity"] = {_REQUIRED: [beside]}
        elif policy == "Preferred":
            found["podAffinity"] = _preferred(beside, _BESIDE_WEIGHT)
        return found
    if policy != "None":
        own_cell = draft_cell(resource, cell or 0)
        drafts = _term(selector(resource, Component.DRAFT, own_cell), placement.topology_key)
        found["podAffinity"] = _preferred(drafts, _BESIDE_WEIGHT)
    others = _term({COMPONENT_LABEL: str(Component.TARGET)}, _NODE_KEY)
    if placement.exclusive_node:
        # All namespaces: the GPUs of a node belong to everybody.
        found["podAntiAffinity"] = {_REQUIRED: [others | {"namespaceSelector": {}}]}
    else:
        found["podAntiAffinity"] = _preferred(others, _SPREAD_WEIGHT)
    return found


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


def _product_affinity(resource: Resource, component: Component) -> Object:
    products = resource.spec.placement.gpu_products
    if device_of(resource, component) == "cpu" or not products:
        return {}
    expression = {"key": _PRODUCT_KEY, "operator": "In", "values": list(products)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {_REQUIRED: terms}}


def _term(labels: Mapping[str, str], topology_key: str) -> Object:
    return {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": topology_key}


def _preferred(term: Object, weight: int) -> Object:
    return {_PREFERRED: [{"weight": weight, "podAffinityTerm": term}]}
