"""Settings of the operator; the chart sets them as ``SSD_OPERATOR_*``. See ``ssd.settings``."""

from dataclasses import dataclass, field
from typing import Literal

import ssd
from ssd.errors import SettingsError

UNTOUCHED_NAMESPACE = "kube-system"
"""Nothing is written here, even if it is watched: the right to run pods here is cluster-admin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Settings of ``python -m ssd_operator``."""

    target_image: str = f"localhost/ssd-target:{ssd.__version__}"
    """Image of targets whose resource sets none."""
    draft_image: str = f"localhost/ssd-draft:{ssd.__version__}"
    """Image of drafts whose resource sets none."""
    vllm_image: str = f"localhost/ssd-vllm:{ssd.__version__}"
    """Image of targets with engine vllm whose resource sets none."""
    gateway_image: str = f"localhost/ssd-gateway:{ssd.__version__}"
    """Image of gateways whose resource sets none."""
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """When images of engines are pulled."""
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces that are watched; none for the operator's own."""
    watch_all_namespaces: bool = False
    """Whether all namespaces are watched but kube-system."""
    pod_namespace: str = "default"
    """Where the operator runs; network policies of engines allow its calls from there."""
    service_account: str = "ssd-operator"
    """Service account of the operator: with mutual TLS, its certificate has the URI
    spiffe://ssd/ns/NAMESPACE/sa/ACCOUNT."""
    credentials: str = ""
    """Folder with what the operator presents to engines: ca.crt for TLS, tls.crt and tls.key for
    mutual TLS, and token. Each may be missing; empty for none."""
    num_workers: int = field(default=8, metadata={"min": 1, "max": 64})
    """Passes at the same time."""
    http_port: int = field(default=9090, metadata={"min": 1, "max": 65535})
    """Port of /livez, /readyz and /metrics."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe log lines that are written."""
    log_format: Literal["json", "text"] = "json"
    """One JSON object a line, or text for a terminal."""

    @property
    def scope(self) -> tuple[str, ...]:
        """Namespaces that are watched; empty for all.

        Raises:
            SettingsError: one of them is never written, or both settings are set.
        """
        if self.watch_all_namespaces and self.watch_namespaces:
            raise SettingsError("watch_all_namespaces and watch_namespaces: choose one of them")
        scope = self.watch_namespaces or (self.pod_namespace,)
        if UNTOUCHED_NAMESPACE in scope and not self.watch_all_namespaces:
            raise SettingsError(
                f"watch_namespaces: nothing is written in {UNTOUCHED_NAMESPACE}; name others"
            )
        return () if self.watch_all_namespaces else scope

    @property
    def version(self) -> str:
        """Label of objects, never of pods: an upgrade of the operator alone replaces no pod."""
        return ssd.__version__
