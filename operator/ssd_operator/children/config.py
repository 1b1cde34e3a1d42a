"""What the installation of the operator decides about all resources."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """Images, and where the operator runs. The chart sets it, ``settings.py`` reads it."""

    target_image: str
    """Image of targets whose resource names none."""
    draft_image: str
    """Image of drafts whose resource names none."""
    image_pull_policy: str = "IfNotPresent"
    """``IfNotPresent``, ``Always`` or ``Never``, for all engine pods."""
    version: str = ""
    """Label of objects, never of pods: an upgrade of the operator alone replaces no pod."""
    operator_namespace: str = "ssd"
    """Where the operator runs; network policies allow its calls from there."""
