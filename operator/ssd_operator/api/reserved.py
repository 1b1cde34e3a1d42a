"""What ``podTemplate`` may not name, because every engine pod has it already."""

from ssd_operator.children.names import Component

SCRATCH_FOLDER = "/tmp"  # noqa: S108 - a volume of the pod
MODELS_FOLDER = "/models"
CACHE_FOLDER = "/var/cache/ssd"
HUB_SUBFOLDER = "hf"
HUB_FOLDER = f"{CACHE_FOLDER}/{HUB_SUBFOLDER}"
"""Where fetched models are."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108
VOLUMES = frozenset({"tmp", "cache", "shm", "models"})
"""Names of volumes."""
PATHS = frozenset({SCRATCH_FOLDER, CACHE_FOLDER, HUB_FOLDER, SHARED_MEMORY, MODELS_FOLDER})
"""Where they are mounted."""
IDENTITY = ("POD_NAME", "NODE_NAME", "CELL")
"""Who a pod is decides which links it gets."""
ADDRESS = ("HOST", "PORT", "HTTP_PORT")
"""Where it listens is where Services and probes lead."""
ENV = frozenset(
    {f"SSD_{component.upper()}_{name}" for component in Component for name in IDENTITY + ADDRESS}
)
