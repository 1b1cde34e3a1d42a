"""Which weights a folder holds, told without reading them all."""

import hashlib
from pathlib import Path

from ssd.engine.models.weights import weight_files
from ssd.errors import WeightsError

SAMPLES = 16
"""Pieces read of a file, the first and the last among them."""
SAMPLE_BYTES = 64 * 1024
"""Of a piece: the first holds the names, types and shapes of a usual file's tensors."""


def weights_fingerprint(folder: Path) -> str:
    """``sha256:…`` of the configuration, and of each weight file's name, size and samples.

    The same for equal folders wherever they lie, and another one after any training: that changes
    numbers everywhere. A change made to hide between the samples is not found, and 140 GB are told
    in a second. *Not chosen*: the hub's revision, which a folder does not have.

    Raises:
        WeightsError: no weights, or a file that cannot be read.
    """
    whole = hashlib.sha256()
    try:
        whole.update((folder / "config.json").read_bytes())
        for path in weight_files(folder):
            size = path.stat().st_size
            whole.update(f"\0{path.name}\0{size}\0".encode())
            with path.open("rb", buffering=0) as stream:
                for number in range(SAMPLES):
                    stream.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                    whole.update(stream.read(SAMPLE_BYTES))
    except OSError as error:
        raise WeightsError(f"{folder}: cannot be read: {error}") from error
    return f"sha256:{whole.hexdigest()}"
