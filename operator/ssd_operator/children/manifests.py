"""All that a resource owns, in the order in which it is applied. Pure.

Pods are drawn in ``pods.py``, Services and policies in ``network.py``, autoscalers in
``scalers.py``.
"""

from collections.abc import Mapping

from ssd_operator.api.spec import Object, Resource, Sharing
from ssd_operator.children import pods
from ssd_operator.children.config import OperatorConfig
from ssd_operator.children.names import (
    CELL_LABEL,
    COMPONENT_LABEL,
    NAME_LABEL,
    Component,
    account,
    draft_cell,
    draft_cells,
    draft_deployment,
    selector,
    target_deployment,
)
from ssd_operator.children.network import network_policies, services
from ssd_operator.children.objects import ChildFactory
from ssd_operator.children.scalers import scalers

OPTIONAL_KINDS = frozenset({"HorizontalPodAutoscaler", "ScaledObject", "PodMonitor"})
"""Kinds that a cluster may not serve; ``wanted`` asks for them all the same."""
REVISION_HISTORY = 2
PROGRESS_SECONDS = 600
"""A Deployment may take its start-up timeout and this long, for pulls and scheduling."""


def wanted(resource: Resource, config: OperatorConfig, replicas: Mapping[int, int]) -> list[Object]:
    """The children of a resource.

    Args:
        resource: what the user asked for.
        config: what the installation decides.
        replicas: of each draft Deployment, by cell; a Pool has cell 0 only. Those of a cell that is
            being drained are still counted: the caller owns the number.

    Returns:
        Whole objects: accounts, policies, Services, targets, drafts, budgets, scalers, monitor.

    Raises:
        KeyError: a cell has no number.
    """
    factory = ChildFactory(resource=resource, config=config)
    return [
        *_accounts(factory),
        *network_policies(factory),
        *services(factory),
        *(_target(factory, cell) for cell in range(resource.spec.num_cells)),
        *(_drafts(factory, cell, replicas[cell]) for cell in draft_cells(resource)),
        *_budgets(factory, replicas),
        *scalers(factory),
        *_monitors(factory),
    ]


def _accounts(factory: ChildFactory) -> list[Object]:
    """Identities; no token of theirs is mounted anywhere."""
    return [
        factory.make(
            "v1",
            "ServiceAccount",
            account(factory.resource, component),
            {"automountServiceAccountToken": False},
            of=(component, None),
        )
        for component in Component
    ]


def _target(factory: ChildFactory, cell: int) -> Object:
    resource = factory.resource
    spec = {
        "replicas": 1,
        "paused": False,
        # No spare place for a second pod of this many GPUs.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": selector(resource, Component.TARGET, cell)},
        "template": pods.target_template(resource, factory.config, cell),
    }
    spec |= _patience(resource.spec.target.startup_timeout_seconds)
    name = target_deployment(resource, cell)
    return factory.make("apps/v1", "Deployment", name, {"spec": spec}, of=(Component.TARGET, cell))


def _drafts(factory: ChildFactory, cell: int, num_replicas: int) -> Object:
    resource = factory.resource
    own_cell = draft_cell(resource, cell)
    spec = {
        "replicas": num_replicas,
        "paused": False,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "selector": {"matchLabels": selector(resource, Component.DRAFT, own_cell)},
        "template": pods.draft_template(resource, factory.config, own_cell),
    }
    spec |= _patience(resource.spec.draft.startup_timeout_seconds)
    name = draft_deployment(resource, cell)
    of = (Component.DRAFT, own_cell)
    return factory.make("apps/v1", "Deployment", name, {"spec": spec}, of=of)


def _patience(startup_timeout_seconds: int) -> Object:
    return {
        "revisionHistoryLimit": REVISION_HISTORY,
        "progressDeadlineSeconds": startup_timeout_seconds + PROGRESS_SECONDS,
    }


def _budgets(factory: ChildFactory, replicas: Mapping[int, int]) -> list[Object]:
    """One pod at a time, from two on.

    A lone target has none, nor have a cell's drafts: their replacement waits for the target to
    move, so a budget would hold a node drain for ever, to protect mere speed.
    """
    resource = factory.resource
    protected = []
    if resource.spec.num_cells > 1:
        protected.append(Component.TARGET)
    if resource.spec.draft.sharing is Sharing.POOL and replicas[0] > 1:
        protected.append(Component.DRAFT)
    return [_budget(factory, component) for component in protected]


def _budget(factory: ChildFactory, component: Component) -> Object:
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(factory.resource, component)},
    }
    name = account(factory.resource, component)
    return factory.make(
        "policy/v1", "PodDisruptionBudget", name, {"spec": spec}, of=(component, None)
    )


def _monitors(factory: ChildFactory) -> list[Object]:
    resource = factory.resource
    if not resource.spec.observability.pod_monitor:
        return []
    labels = selector(resource)
    spec = {
        "selector": {"matchLabels": labels},
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}],
        "podTargetLabels": [NAME_LABEL, COMPONENT_LABEL, CELL_LABEL],
    }
    return [factory.make("monitoring.coreos.com/v1", "PodMonitor", resource.name, {"spec": spec})]
