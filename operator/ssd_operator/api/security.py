"""The security block of a resource: who may call, and what pods may do. See ``spec.py``."""

from typing import Annotated, Any, Literal

from ssd_operator.api.fields import Block, ObjectName, checked, items, text
from ssd_operator.api.kubernetes_types import NetworkPeer


class DraftTls(Block):
    """Certificates of the gRPC ports of drafts.

    A change replaces them. New contents of a Secret replace no pod.
    """

    mode: Literal["Server", "Mutual"] = "Server"
    """Server: targets and drafts have certificates. Mutual: callers need one too, clients of vLLM a
    token instead. Then only a certificate with the URI spiffe://ssd/ns/NAMESPACE/sa/NAME-target
    opens a link to a draft, and NAME-pool-target to a draft of the SSDDraftPool NAME."""
    draft_secret_name: ObjectName
    """Secret with tls.crt, tls.key and ca.crt of drafts. Name in the certificate:
    NAME-draft.NAMESPACE.svc, or NAME-pool-draft.NAMESPACE.svc for an SSDDraftPool."""


_ABSENT: Any = None
"""Secret of a spec with ``draft.poolRef``: the pool names the certificate of its drafts."""


class Tls(DraftTls):
    """Certificates of the gRPC ports, and of the port of vLLM.

    A change replaces targets and drafts. New contents of a Secret replace no pod.
    """

    model_config = checked(
        (
            "!has(self.clientNames) || self.clientNames.size() == 0 || self.mode == 'Mutual'",
            "clientNames: clients have certificates only with mode Mutual",
        )
    )
    draft_secret_name: ObjectName = _ABSENT
    """Secret with tls.crt, tls.key and ca.crt of drafts. Name in the certificate:
    NAME-draft.NAMESPACE.svc. Required, except with draft.poolRef: then it has no effect, because
    security.tls of the SSDDraftPool names the certificate of its drafts."""
    target_secret_name: ObjectName
    """Secret with tls.crt, tls.key and ca.crt of targets. Names in the certificate: those by which
    clients call, NAME.NAMESPACE.svc, and with Mutual the URI above."""
    client_names: Annotated[
        tuple[Annotated[str, text(253, least=1, pattern="^[!-+.-~-]+$")], ...], items(64)
    ] = ()
    """With Mutual: names in certificates that may call Generate; none permits every certificate
    that an authority of the target's ca.crt signed."""


class DraftSecurity(Block):
    """Who may call, and what pods may do."""

    tls: DraftTls | None = None
    """Absent: gRPC is plain text."""
    token_secret_name: ObjectName | None = None
    """Secret with the keys clients, links and admins: bearer tokens of at least 16 characters, one
    a line. Callers of Generate and of vLLM need one of clients, targets present the first of links
    to drafts, and the operator needs one of admins. Absent: callers need no token. A change
    replaces targets and drafts; new contents of the Secret replace no pod."""

    network_policy: bool = True
    """Whether the operator creates NetworkPolicies for its pods. A change replaces no pod."""
    read_only_root_filesystem: bool = True
    """Whether pods cannot write to the file system of their image; some GPU runtimes must be able
    to. A change replaces targets and drafts."""


class Security(DraftSecurity):
    """Who may call, and what pods may do."""

    tls: Tls | None = None
    """Absent: gRPC is plain text."""
    clients: Annotated[tuple[NetworkPeer, ...], items(16)] = ()
    """NetworkPolicy peers that may call Generate and gateways; none allows every pod of the
    cluster. A change replaces no pod."""
