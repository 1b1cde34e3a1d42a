"""What the operator's own installation decides about all resources."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """Images, and who the operator is. The chart says it, ``settings.py`` reads it."""

    target_image: str
    """Image of targets whose resource names none."""
    draft_image: str
    """Image of drafts whose resource names none."""
    image_pull_policy: str = "IfNotPresent"
    """``IfNotPresent``, ``Always`` or ``Never``, for all engine pods."""
    version: str = ""
    """Label of objects, never of pods: an upgrade of the operator alone touches no pod."""
    operator_namespace: str = "ssd"
    """Where the operator runs; network policies let it in from there."""
    operator_labels: Mapping[str, str] = field(
        default_factory=lambda: {"app.kubernetes.io/name": "ssd-operator"}
    )
    """Labels of the operator's pod, for the same."""
