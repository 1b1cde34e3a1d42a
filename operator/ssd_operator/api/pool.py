"""The spec of an SSDDraftPool: drafts that several SSDDeployments share."""

from pydantic import Field

from ssd_operator.api.fields import checked
from ssd_operator.api.model_cache import ModelCache
from ssd_operator.api.pod_template import PodOverrides, PodTemplate
from ssd_operator.api.security import DraftSecurity, Security, Tls
from ssd_operator.api.spec import (
    Accelerator,
    Drafts,
    DraftSpec,
    Model,
    ModelFormat,
    Spec,
    Speculation,
    TargetSpec,
    TreeSize,
)


class PoolSpec(Drafts):
    """What is wanted: the drafts, with what their targets must have in common with them."""

    model_config = checked(
        (
            "self.device == oldSelf.device",
            "device cannot change: delete the resource and create it anew",
        ),
        (
            "self.device == 'cpu' || self.weights in ['Auto', 'Same']",
            "weights: only CPUs run Int8 and Int4, give device cpu or leave it out",
        ),
        (
            "self.source.uri != 'demo://target'",
            "source.uri: demo://target is for targets, give demo://draft",
        ),
    )
    device: Accelerator = "nvidia"
    """Device of the drafts. A pod without its device fails; it never uses the CPU instead. Cannot
    change."""
    paused: bool = False
    """Whether the operator writes only the status. A change replaces no pod."""
    model: ModelFormat = ModelFormat()
    speculation: TreeSize = TreeSize()
    pod_template: PodTemplate = Field(default_factory=PodTemplate)
    model_cache: ModelCache = ModelCache()
    security: DraftSecurity = DraftSecurity()


def spec_of(pool: PoolSpec) -> Spec:
    """Return the spec of an SSDDeployment that has the drafts of the pool, and no cell.

    The code for drafts of a resource then makes, drains and scales the drafts of a pool.
    """
    draft_fields = {name: value for name, value in pool if name in Drafts.model_fields}
    tls, security = pool.security.tls, dict(pool.security)
    if tls is not None:
        security["tls"] = Tls(**dict(tls), target_secret_name=tls.draft_secret_name)
    return Spec(
        accelerator=pool.device,
        paused=pool.paused,
        model=Model(**dict(pool.model)),
        target=TargetSpec(source=pool.source).changed(replicas=0),
        draft=DraftSpec(**draft_fields | {"pod_template": PodOverrides(), "sharing": "Pool"}),
        pod_template=pool.pod_template,
        speculation=Speculation(**dict(pool.speculation)),
        model_cache=pool.model_cache,
        security=Security(**security),
    )
