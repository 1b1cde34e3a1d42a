"""The folder in which the processes of one vLLM server keep their metrics."""

import os
import tempfile

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder."""
_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Removed at the end of the process."""


def make_metrics_folder() -> None:
    """Make the folder, unless the environment has one.

    Called before ``prometheus_client`` is imported. vLLM's ``/metrics`` then has the metrics of its
    worker, which is another process.
    """
    if METRICS_FOLDER not in os.environ:  # noqa: TID251 - prometheus_client reads it there
        _folders.append(tempfile.TemporaryDirectory(prefix="ssd-metrics-"))
        os.environ[METRICS_FOLDER] = _folders[0].name  # noqa: TID251
