"""All objects that a resource owns, in the order in which they are applied. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ssd_operator.api.spec import Object, Resource
from ssd_operator.children.objects import (
    KINDS,
    Component,
    Workload,
    draft_cell,
    draft_cells,
    peers,
    selector,
    targets_service,
)
from ssd_operator.children.pods import engine_template, gateway_template
from ssd_operator.children.processes import has_tls, process_of
from ssd_operator.settings import OperatorSettings

PROGRESS_SECONDS = 600
"""A Deployment may take its start-up timeout and this long, for pulls and scheduling."""
LINK_SECONDS = 20
"""A draft of a pool is ready for this long before the next one is replaced: meanwhile targets
resolve its name, link to it and report whether it fits. Without it, each change of a pool left all
targets without a link for one to two seconds (tried)."""
_ANY_POD: Object = {"namespaceSelector": {}}
"""Every pod of the cluster, as a peer."""
_RECREATE: Object = {"type": "Recreate"}
"""No node has spare GPUs for a second target."""


def wanted(
    resource: Resource,
    settings: OperatorSettings,
    replicas: Mapping[int, int],
    *,
    selects_engine: bool = True,
    opens_channel: bool = False,
) -> list[Object]:
    """The children of a resource: whole objects.

    ``replicas`` are those of each draft Deployment, by cell, draining drafts included; a Pool has
    cell 0 only. With ``selects_engine``, the Services of targets select the label of the engine.
    With ``opens_channel``, NetworkPolicies admit a collective channel although the resource has
    none.
    """
    opens_channel |= resource.spec.transport.channel == "Collective"
    objects = list[Object]()
    for component in components_of(resource):
        workload = Workload(resource=resource, settings=settings, component=component)
        # No token of the account is mounted anywhere.
        objects.append(workload.make("ServiceAccount", automountServiceAccountToken=False))
        if resource.spec.security.network_policy:
            policy = _network_policy(workload, opens_channel=opens_channel)
            objects.append(workload.make("NetworkPolicy", spec=policy))
        objects += [
            *_services(workload, selects_engine=selects_engine),
            *_deployments(workload, replicas),
        ]
        objects += _budgets(workload, replicas)
    order = tuple(KINDS)
    return sorted(objects, key=lambda child: order.index(child["kind"]))


def components_of(resource: Resource) -> Iterator[Component]:
    """Components of a resource; a pool has no targets, and with ``poolRef`` there are no drafts."""
    if not resource.is_pool:
        yield Component.TARGET
    if resource.pool_prefix is None:
        yield Component.DRAFT
    if resource.spec.gateway.enabled:
        yield Component.GATEWAY


def _network_policy(workload: Workload, *, opens_channel: bool) -> Object:
    """Who may reach the pods of a component."""
    resource, spec, component = workload.resource, workload.spec, workload.component
    namespace = {"kubernetes.io/metadata.name": workload.settings.pod_namespace}
    operator = _pods({"app.kubernetes.io/name": "ssd-operator"}) | {
        "namespaceSelector": {"matchLabels": namespace}
    }
    gateways = _pods(selector(resource, Component.GATEWAY))
    linked = _pods(peers(resource, component))
    named_clients = [dict(client) for client in spec.security.clients]
    clients = named_clients or [_ANY_POD]
    # Gateways are always clients.
    own = [gateways] if named_clients and spec.gateway.enabled else []
    callers = {
        Component.TARGET: [*clients, *own],
        Component.DRAFT: [linked],
        Component.GATEWAY: clients,
    }
    process = process_of(resource, component)
    # Pages that no client calls are metrics and probes, without a prompt or a secret.
    allowed = {"grpc": [operator], "http": [_ANY_POD]}
    allowed[process.api] = callers[component] + ([operator] if process.api == "grpc" else [])
    ingress = [
        {"from": allowed[name], "ports": [_tcp(port)]} for name, port in process.ports.items()
    ]
    if opens_channel and component is not Component.GATEWAY:
        # gloo and NCCL listen on ports that the system selects.
        ingress.append({"from": [linked], "ports": [{"protocol": "TCP"}]})
    return _pods(selector(resource, component)) | {"policyTypes": ["Ingress"], "ingress": ingress}


def _services(workload: Workload, *, selects_engine: bool) -> Iterator[Object]:
    """The endpoint, the headless Service for clients that balance, and what targets resolve.

    A target resolves the Service of its drafts every 2 s; there is no other registration. Services
    leave out pods that are not ready, so targets open no link to a draining draft.
    """
    resource, component = workload.resource, workload.component
    process, headless = process_of(resource, component), {"clusterIP": "None"}
    rows: list[tuple[str, int | None, Object]] = [("", None, {})]
    if workload.is_target:
        rows = [(resource.name, None, {}), (targets_service(resource), None, headless)]
    elif component is Component.DRAFT:
        cells = [draft_cell(resource, cell) for cell in draft_cells(resource)]
        rows = [("", cell, headless) for cell in cells]
    plain = {"appProtocol": "kubernetes.io/h2c"} if process.api == "grpc" else {}
    protocols = {"appProtocol": "https"} if has_tls(resource, component, process.api) else plain
    engine = workload.engine_label if selects_engine else {}
    port = {"name": process.api} | _tcp(process.ports[process.api])
    for name, cell, address in rows:
        spec = {
            "type": "ClusterIP",
            "selector": selector(resource, component, cell) | engine,
            "ports": [port | {"targetPort": process.api} | protocols],
            "publishNotReadyAddresses": False,
        }
        yield replace(workload, cell=cell).make("Service", name, spec=spec | address)


def _deployments(workload: Workload, replicas: Mapping[int, int]) -> Iterator[Object]:
    resource, is_gateway = workload.resource, workload.component is Component.GATEWAY
    numbers: dict[int | None, int] = dict.fromkeys(range(workload.spec.num_cells), 1)
    strategy = _RECREATE
    if is_gateway:
        numbers, strategy = {None: workload.spec.gateway.replicas}, _rolling(1, 0)
    elif not workload.is_target:
        numbers = {draft_cell(resource, cell): number for cell, number in replicas.items()}
        strategy = _rolling(0, 1)
    for cell, number in numbers.items():
        own = replace(workload, cell=cell)
        seconds = 0 if is_gateway else own.block.startup_timeout_seconds
        spec = {
            "replicas": number,
            "strategy": strategy,
            "paused": False,
            "selector": {"matchLabels": selector(resource, own.component, cell)},
            "template": gateway_template(own) if is_gateway else engine_template(own),
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": seconds + PROGRESS_SECONDS,
        }
        if resource.is_pool:
            spec["minReadySeconds"] = LINK_SECONDS
        yield own.make("Deployment", spec=spec)


def _budgets(workload: Workload, replicas: Mapping[int, int]) -> Iterator[Object]:
    """One pod at a time, from two on.

    A lone target has none, nor have the drafts of a cell: their replacement waits for the target to
    move, so a budget would block a node drain for ever.
    """
    spec = workload.spec
    numbers = {
        Component.TARGET: spec.num_cells,
        Component.DRAFT: replicas.get(0, 0) if spec.draft.sharing == "Pool" else 0,
    }
    if numbers.get(workload.component, spec.gateway.replicas) > 1:
        labels = selector(workload.resource, workload.component)
        budget = {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels},
        }
        yield workload.make("PodDisruptionBudget", spec=budget)


def _pods(labels: Mapping[str, str]) -> Object:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _tcp(port: int) -> Object:
    return {"port": port, "protocol": "TCP"}


def _rolling(surge: int, unavailable: int) -> Object:
    limits = {"maxSurge": surge, "maxUnavailable": unavailable}
    return {"type": "RollingUpdate", "rollingUpdate": limits}
