"""Names that users may not give, because the operator has given them to every engine pod."""

GROUP = "ssd.dev"
"""API group, and the prefix of the operator's labels and annotations."""
SCRATCH_FOLDER = "/tmp"  # noqa: S108 - a volume of the pod
MODELS_FOLDER = "/models"
CACHE_FOLDER = "/var/cache/ssd"
HUB_SUBFOLDER = "hf"
HUB_FOLDER = f"{CACHE_FOLDER}/{HUB_SUBFOLDER}"
"""Where fetched models are."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108
TLS_VOLUME = "ssd-tls"
TLS_FOLDER = "/etc/ssd/tls"
TOKENS_VOLUME = "ssd-tokens"
TOKENS_FOLDER = "/etc/ssd/tokens"
VOLUMES = frozenset({"tmp", "cache", "shm", "models", TLS_VOLUME, TOKENS_VOLUME})
"""Names of volumes."""
PATHS = frozenset(
    {
        *(SCRATCH_FOLDER, CACHE_FOLDER, HUB_FOLDER, SHARED_MEMORY, MODELS_FOLDER),
        *(TLS_FOLDER, TOKENS_FOLDER),
    }
)
"""Paths where the volumes are mounted."""
ENV = frozenset(
    f"SSD_{process}_{name}"
    for process in ("TARGET", "DRAFT")
    # The first three identify a pod for its links, the others are the ports of Services and probes.
    for name in ("POD_NAME", "NODE_NAME", "CELL", "HOST", "PORT", "HTTP_PORT")
)
"""Names of environment variables."""
