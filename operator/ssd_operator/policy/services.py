"""What Services and NetworkPolicies describe while targets change: the present targets. Pure.

A change may wait, or its preflight may fail, while the former targets serve. So ports, protocols
(TLS or plain text) and the ports of a collective channel change with the targets. Protocols follow
the same rule as the ports of an engine.

*Decision*: while targets change their engine, the Services keep the former port and selector until
no Deployment of the former engine is left, or more new targets serve than former ones, or as many
and no cell waits. The selector has the label of the engine if exactly the targets that run this
engine have the label. The engine of a target is the one whose ports its container has. *Because*
Generate over gRPC and the API of vLLM have no port in common: the port of a Service leads to the
admin or metrics port of the other engine's pods. A Deployment that is refused leaves the former
target, ready or restarting, as the only one. A cell that waits may be down, or wait for long.
Targets of an older operator, or targets whose labels a policy changes, would lose their Service.
*Not chosen*: the module in a container's command, which webhooks for secrets replace; names of
ports that only one engine has: the name of a headless Service resolves to pods without such a port
too (tried). *Revisit when* a headless name resolves only to pods with the port.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from ssd_operator.api.spec import Object, Resource
from ssd_operator.children.objects import COMPONENT_LABEL, ENGINE_LABEL, Component
from ssd_operator.children.processes import process_of
from ssd_operator.observe.cluster import Ref, ref_of
from ssd_operator.observe.pod_state import has_ended, is_tls, labels_of, name_of
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.rollout import kept_pod, serving_pod

_COLLECTIVE: Object = {"name": "SSD_TARGET_CHANNEL", "value": "collective"}
"""Variable of a target with a collective channel."""


def labels_fit(snapshot: Snapshot) -> bool:
    """Whether exactly the targets that run the engine of the resource have its label."""
    resource = snapshot.resource
    templates = (deployment["spec"]["template"] for deployment in snapshot.target_deployments)
    return all(
        _is_of_engine(pod, resource)
        == (labels_of(pod).get(ENGINE_LABEL) == resource.spec.target.engine)
        for pod in (*templates, *snapshot.targets)
    )


def keeps_ports(wanted: Sequence[Object], snapshot: Snapshot, targets_held: Set[Ref]) -> bool:
    """Whether Services and NetworkPolicies of targets keep the ports of a former engine.

    If targets serve, at least one of them has the ports that this selects.
    """
    is_new = {
        name_of(target): _is_of_engine(target["spec"]["template"], snapshot.resource)
        for target in snapshot.target_deployments
    }
    return _keeps_former(wanted, snapshot, targets_held, is_new)


def keeps_protocol(wanted: Sequence[Object], snapshot: Snapshot, targets_held: Set[Ref]) -> bool:
    """Whether Services of targets keep the protocol of former targets, TLS or plain text."""
    has_tls = snapshot.resource.spec.security.tls is not None
    is_new = {
        name_of(target): is_tls(target["spec"]["template"]) == has_tls
        for target in snapshot.target_deployments
    }
    return _keeps_former(wanted, snapshot, targets_held, is_new)


def _keeps_former(
    wanted: Sequence[Object],
    snapshot: Snapshot,
    targets_held: Set[Ref],
    is_new: Mapping[str, bool],
) -> bool:
    """Whether Services stay as former targets need them; ``is_new`` is by live Deployment."""
    serving = [
        target
        for target in wanted
        if serving_pod(target, snapshot) is not None
        or (is_new.get(name_of(target)) is False and kept_pod(target, snapshot) is not None)
    ]
    num_new = sum(is_new[name_of(target)] for target in serving)
    num_former = len(serving) - num_new
    wins_tie = num_new > 0 and not targets_held
    is_taken_over = num_new > num_former or (num_new == num_former and wins_tie)
    return not all(is_new.values()) and not is_taken_over


def _is_of_engine(pod: Object, resource: Resource) -> bool:
    """Whether a pod of a target, or its template, has the ports of the resource's engine."""
    ports = process_of(resource, Component.TARGET).ports.items()
    return any(
        ports
        <= {(port.get("name"), port["containerPort"]) for port in container.get("ports") or ()}
        for container in pod["spec"]["containers"]
    )


def has_channel(snapshot: Snapshot) -> bool:
    """Whether a target, or the template of one, still has a collective channel."""
    templates = (deployment["spec"]["template"] for deployment in snapshot.target_deployments)
    present = (pod for pod in snapshot.pods if not has_ended(pod))
    return any(
        _COLLECTIVE in (container.get("env") or ())
        for pod in (*templates, *present)
        for container in pod["spec"].get("containers") or ()
    )


def differing(
    wanted: Iterable[Object], snapshot: Snapshot, read: Callable[[Object], object]
) -> frozenset[Ref]:
    """Objects of targets from which ``read`` returns another value than from the live ones."""
    return frozenset(
        ref
        for child in wanted
        if labels_of(child).get(COMPONENT_LABEL) == Component.TARGET
        and (live := snapshot.children.get(ref := ref_of(child))) is not None
        and read(live) != read(child)
    )


def protocols_of(child: Object) -> list[str]:
    """The application protocols of the ports of a Service; empty for other kinds."""
    ports = child["spec"].get("ports") if child["kind"] == "Service" else None
    return [port.get("appProtocol", "") for port in ports or ()]


def ports_of(child: Object) -> set[int]:
    """The port numbers of a Service or a NetworkPolicy; empty for other kinds."""
    match child["kind"]:
        case "Service":
            rows = [child["spec"]]
        case "NetworkPolicy":
            rows = child["spec"].get("ingress") or []
        case _:
            rows = []
    return {port["port"] for row in rows for port in row.get("ports") or () if "port" in port}
