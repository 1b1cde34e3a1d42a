"""A fingerprint of the weights of a folder, from samples of the files."""

import hashlib
from pathlib import Path

from ssd.engine.models.headers import weight_files
from ssd.errors import WeightsError

SAMPLES = 16
"""Number of samples of a file, including its start and its end."""
SAMPLE_BYTES = 64 * 1024
"""Size of a sample; the first one contains the names, types and shapes of most files."""


def weights_fingerprint(folder: Path) -> str:
    """Return ``sha256:…`` of the configuration and of each weight file's name, size and samples.

    Equal folders have the same fingerprint. Training changes values everywhere, so it changes the
    fingerprint. A deliberate change between the samples is not detected. 140 GB take a second.
    *Not chosen*: the revision on the hub, which a folder does not have.

    Raises:
        WeightsError: no weights, or a file that cannot be read.
    """
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in weight_files(folder):
            size = path.stat().st_size
            digest.update(f"\0{path.name}\0{size}\0".encode())
            with path.open("rb", buffering=0) as stream:
                for number in range(SAMPLES):
                    stream.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                    digest.update(stream.read(SAMPLE_BYTES))
    except OSError as error:
        raise WeightsError(f"{folder}: cannot be read: {error}") from error
    return f"sha256:{digest.hexdigest()}"
