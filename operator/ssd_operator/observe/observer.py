"""Collects what one pass sees of a resource: cached objects, and objects read by name."""

from collections.abc import Mapping

from ssd_operator.api.spec import KIND, Object, Resource
from ssd_operator.children.manifests import wanted
from ssd_operator.children.names import ENGINES, Component, draft_cells, draft_deployment
from ssd_operator.observe.cluster import Cluster, Ref, ref_of
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.observe.pod_state import (
    controller_of,
    endpoints_of,
    is_ours,
    is_owned_by,
    is_pod_of,
    is_terminating,
    maker_of,
    to_seconds,
)
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.settings import OperatorSettings


async def observe(
    cluster: Cluster,
    cache: ObjectCache,
    settings: OperatorSettings,
    found: Object,
    resource: Resource,
    now: float,
) -> Snapshot:
    """Collect the state of a resource, ``found`` and parsed, and of everything around it.

    The cluster is read where the cache has no child of a wanted name: watches bring only what
    carries our label.

    Raises:
        ClusterError: the API server does not answer.
    """
    seen = cache.children((resource.namespace, resource.name))
    children = {
        ref: each
        for ref, each in seen.items()
        if (is_owned_by if ref.kind == "Pod" else is_ours)(each, resource.uid)
    }
    pods, gateways = (
        tuple(
            each
            for ref, each in seen.items()
            if ref.kind == "Pod"
            and ref not in children
            and is_pod_of(each, resource.name, components)
            and not _is_older(each, found, children.get(Ref("Deployment", maker_of(each))))
        )
        for components in (ENGINES, (Component.GATEWAY,))
    )
    replicas = {cell: _most_drafts(resource, cell, children) for cell in draft_cells(resource)}
    names = dict.fromkeys(map(ref_of, wanted(resource, settings, replicas)))
    # One that is not wanted and has lost its labels would never be deleted, but its pods show it.
    names |= {Ref("Deployment", maker_of(pod)): None for pod in pods if not is_terminating(pod)}
    foreign, former = dict[Ref, str](), set[Ref]()
    for ref in [each for each in names if each not in children]:
        if (live := await cluster.get(resource.namespace, ref)) is None:
            continue
        owner = controller_of(live)
        if is_ours(live, resource.uid):
            children[ref] = live
        elif (owner.get("kind"), owner.get("name")) == (KIND, resource.name):
            former.add(ref)
        else:
            foreign[ref] = f"{owner['kind']} {owner['name']}" if owner else "another owner"
    return Snapshot(
        resource=resource,
        now=now,
        children=children,
        pods=pods,
        gateways=gateways,
        endpoints=endpoints_of(resource.name, seen.values()),
        foreign=foreign,
        former=frozenset(former),
        status=found.get("status") or {},
    )


def _most_drafts(resource: Resource, cell: int, children: Mapping[Ref, Object]) -> int:
    """The most replicas that this pass may want of a draft Deployment: a drain shrinks it later."""
    live = children.get(Ref("Deployment", draft_deployment(resource, cell)))
    number = resource.spec.draft.replicas
    return number if live is None else max(number, int(live["spec"]["replicas"]))


def _is_older(pod: Object, resource: Object, deployment: Object | None) -> bool:
    """Whether a pod is of a former resource of this name: nothing that is ours existed before it.

    One that is older than the resource alone came with a Deployment that was left for us to adopt;
    one that is older than its Deployment alone was adopted by that.
    """
    makers = [resource] if deployment is None else [resource, deployment]
    return all(_made_at(pod) < _made_at(each) for each in makers)


def _made_at(thing: Object) -> float:
    return to_seconds(thing["metadata"].get("creationTimestamp")) or 0.0
