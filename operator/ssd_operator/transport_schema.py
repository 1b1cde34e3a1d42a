"""Schema of the transport between targets and drafts, and the rules that it has with other blocks.

A tier decides what pods may do, so it is the user's word and never the operator's: ``Auto`` takes
no privileges. It says what is asked for; what a link was measured to use stands in the status.
"""

from ssd_operator.fabric import HOST_ID
from ssd_operator.spec import Object
from ssd_operator.structural import Schema, block, integer, mapping, one_of, rule, text

RESOURCE_KEY = r"^[a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*$"
"""Name of an extended resource."""
_NOT_YET = (
    "The collective channel (NCCL), by which RDMA and NVLink are reached, comes with the CUDA "
    "engine; until a link reports one of them, all links run over TCP"
)


def transport() -> Schema:
    """How targets and drafts reach each other."""
    fields = {
        "tier": one_of(
            "What pods get for the sake of their links. Auto: as TCP, or as RDMA with rdma given. "
            "TCP: nothing. RDMA: rdma and the capability IPC_LOCK. NVLinkPrivileged: privileged "
            "pods with the host's IPC; both of them need a privileged namespace and nvidia. "
            f"{_NOT_YET} and the condition FastPath says FellBack. Cannot change.",
            ["Auto", "TCP", "RDMA", "NVLinkPrivileged"],
            "Auto",
        ),
        "require": one_of(
            "At least this: a link measured worse is refused and the target serves on without it. "
            f"{_NOT_YET}, so RDMA and NVLink refuse every link. Replaces targets.",
            ["Any", "RDMA", "NVLink"],
            "Any",
        ),
        "maxRoundTripMicroseconds": integer(
            "A link whose round trip is measured longer is refused and the target serves on "
            "without it; absent sets no limit. Replaces targets.",
            1,
            1_000_000,
        ),
        "rdma": _rdma(),
        "ncclEnv": _nccl_env(),
    }
    return block(
        "How targets and drafts reach each other.",
        fields,
        rules=_rules(),
        default={"tier": "Auto", "require": "Any"},
    )


def rules_of_spec() -> list[Object]:
    """What the transport has to do with the rest of a resource."""
    most_drafts = (
        "(has(self.draft.autoscaling) && self.draft.autoscaling.mode != 'None'"
        " && self.draft.autoscaling.maxReplicas > self.draft.replicas"
        " ? self.draft.autoscaling.maxReplicas : self.draft.replicas)"
    )
    gpus_of_a_cell = (
        "(has(self.target.tensorParallelSize) ? self.target.tensorParallelSize : 4)"
        f" + ({most_drafts} + self.target.replicas - 1) / self.target.replicas"
    )
    return [
        rule(
            "self.accelerator != 'cpu' || (self.transport.tier in ['Auto', 'TCP']"
            " && self.transport.require == 'Any' && !has(self.transport.rdma))",
            "a cpu has no fabric between pods: take transport.tier Auto or TCP and require Any, "
            "without rdma",
        ),
        rule(
            "self.draft.sharing != 'Pool' || self.transport.tier in ['Auto', 'TCP', 'RDMA']",
            "NVLink ends at the node and a Pool does not: take sharing Cell, or another tier",
        ),
        rule(
            "self.accelerator == 'cpu' || self.transport.require != 'NVLink'"
            f" || {gpus_of_a_cell} <= self.placement.gpusPerNode",
            "NVLink ends at the node: tensorParallelSize and the most drafts of a cell exceed "
            "placement.gpusPerNode; fewer drafts, more cells, or require Any",
        ),
        rule(
            "!has(self.transport.rdma)"
            " || self.transport.rdma.resourceName != self.placement.gpuResource",
            "rdma.resourceName is what a network card is called, not a GPU: see "
            "kubectl describe node",
        ),
    ]


def _rules() -> list[Object]:
    return [
        rule(
            "self.tier == oldSelf.tier && has(self.rdma) == has(oldSelf.rdma)",
            "transport.tier cannot change, nor rdma come or go: "
            "delete the resource and create it anew",
        ),
        rule("self.tier != 'RDMA' || has(self.rdma)", "tier RDMA needs a card: give rdma"),
        rule(
            "!has(self.rdma) || self.tier in ['Auto', 'RDMA']",
            "rdma: only the tiers Auto and RDMA use it, leave it out",
        ),
        rule(
            "self.require != 'NVLink' || self.tier.startsWith('NVLink')",
            "require NVLink takes privileges, which Auto never does: take tier NVLinkPrivileged",
        ),
        rule(
            "self.require != 'RDMA'"
            " || self.tier != 'TCP' && (self.tier != 'Auto' || has(self.rdma))",
            "require RDMA needs a tier that may reach it: give rdma, or take NVLinkPrivileged",
        ),
        rule(
            "!has(self.ncclEnv) || self.tier in ['RDMA', 'NVLinkPrivileged'] || has(self.rdma)",
            "ncclEnv: links over TCP do not use NCCL, leave it out",
        ),
    ]


def _rdma() -> Schema:
    fields = {
        "resourceName": text(
            "What a card is called by its device plugin, such as rdma/hca_shared_devices_a. "
            "Replaces targets and drafts.",
            253,
            pattern=RESOURCE_KEY,
        ),
        "count": integer("Cards of each pod. Replaces targets and drafts.", 1, 8, 1),
    }
    about = "Network cards of targets and drafts; with tier Auto it makes the tier RDMA."
    return block(about, fields, required=["resourceName"])


def _nccl_env() -> Schema:
    only_nccl = rule(
        f"self.all(k, k.startsWith('NCCL_') && k != '{HOST_ID}')",
        f"ncclEnv: only variables that begin with NCCL_, and not {HOST_ID}, which is the "
        "operator's",
    )
    return mapping(
        "Variables of NCCL, in targets and drafts. They win over the operator's own. "
        "Replaces targets and drafts.",
        text("Its value.", 1024),
        32,
        [only_nccl],
    )
