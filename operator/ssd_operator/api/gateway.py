"""The block ``gateway`` of a spec."""

from typing import Annotated

from pydantic import Field

from ssd_operator.api.fields import Block, ObjectName, Visible, between
from ssd_operator.api.kubernetes_types import ObjectKey, Resources


class Gateway(Block):
    """OpenAI-compatible HTTP front of all cells, with the Service NAME-gateway on port 8000."""

    enabled: bool = False
    """Whether gateways run. A change replaces no pod of targets and drafts."""
    replicas: Annotated[int, between(1, 16)] = 1
    """Number of gateways. A change replaces no pod."""
    api_keys_secret_ref: ObjectKey | None = None
    """File of API keys: one NAME:HASH per line, HASH is the SHA-256 of the key. A change of the
    Secret takes effect within two minutes. Absent: requests need no key. A change replaces
    gateways."""
    tls_secret_name: ObjectName | None = None
    """Secret with tls.crt and tls.key: the certificate that gateways present to targets, needed
    with security.tls.mode Mutual. A change replaces gateways."""
    playground: bool = True
    """Whether the playground is served at /. A change replaces gateways."""
    image: Visible | None = None
    """Image; absent means the image of the chart. A change replaces gateways."""
    resources: Resources = Field(default_factory=Resources)
    """CPU, memory and disk of a pod; an amount given here replaces the operator's own. A change
    replaces gateways."""
