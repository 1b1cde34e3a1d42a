"""Additions of users to the pods of targets and drafts.

*Decision*: ``podTemplate`` is a subset of a pod for all pods; targets and drafts override the node,
the priority and variables. *Because* a whole pod template makes the CRD a megabyte, and the same 38
fields twice were half of the resource. *Revisit when* users need a volume for one of them alone.
"""

from typing import Annotated

from pydantic import Field

from ssd_operator.api.fields import Annotations, Block, Labels, NodeLabels, items, text
from ssd_operator.api.kubernetes_types import (
    PlainVariable,
    Reference,
    Toleration,
    Variable,
    Volume,
    VolumeMount,
)


class PodOverrides(Block):
    """Additions to these pods alone, with precedence over spec.podTemplate.

    Maps are merged by key, env by name. A change replaces these pods.
    """

    labels: Labels = Field(default_factory=dict)
    """Additional labels."""
    annotations: Annotations = Field(default_factory=dict)
    """Additional annotations."""
    node_selector: NodeLabels = Field(default_factory=dict)
    """Labels that the nodes must have."""
    priority_class_name: Annotated[str, text(253)] | None = None
    """PriorityClass of the pods."""
    env: Annotated[tuple[PlainVariable, ...], items(64, "name")] = ()
    """Environment variables, with precedence over the operator's. POD_NAME, NODE_NAME, CELL, HOST,
    PORT and HTTP_PORT of a process are refused."""


class PodTemplate(PodOverrides):
    """Additions to all pods of targets and drafts. A change replaces targets and drafts."""

    tolerations: Annotated[tuple[Toleration, ...], items(16)] = ()
    """Taints of nodes that the pods tolerate."""
    runtime_class_name: Annotated[str, text(253)] | None = None
    """RuntimeClass of the pods."""
    scheduler_name: Annotated[str, text(253)] | None = None
    """Scheduler of the pods."""
    image_pull_secrets: Annotated[tuple[Reference, ...], items(16, "name")] = ()
    """Secrets of the registries of the images."""
    env: Annotated[tuple[Variable, ...], items(64, "name")] = ()
    """Environment variables, with precedence over the operator's. POD_NAME, NODE_NAME, CELL, HOST,
    PORT and HTTP_PORT of a process are refused."""
    volumes: Annotated[tuple[Volume, ...], items(16, "name")] = ()
    """Additional volumes."""
    volume_mounts: Annotated[tuple[VolumeMount, ...], items(16, "mountPath")] = ()
    """Where the containers see the additional volumes."""

    def overridden(self, own: PodOverrides) -> "PodTemplate":
        """The template with the settings of one kind of pods, which have precedence."""
        by_name = {variable["name"]: variable for variable in (*self.env, *own.env)}
        return self.changed(
            labels=self.labels | own.labels,
            annotations=self.annotations | own.annotations,
            node_selector=self.node_selector | own.node_selector,
            priority_class_name=own.priority_class_name or self.priority_class_name,
            env=tuple(by_name.values()),
        )
