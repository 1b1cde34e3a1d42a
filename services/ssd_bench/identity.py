"""A name of a run, by which the same one goes on with what an ended one has measured."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import ssd
from ssd.settings import inherited_variables
from ssd_bench.machine import machine

SOURCES = Path(ssd.__file__).parents[1]
LIBRARIES = ("torch", "openvino", "transformers")
"""Libraries that compute."""


def identity(
    settings: Mapping[str, str], texts: Mapping[str, Sequence[object]], models: Iterable[Path]
) -> str:
    """Return a name of all that changes what a run measures.

    Args:
        settings: of the run.
        texts: its data sets or batches of prompts, as values of JSON.
        models: their folders.
    """
    files = sorted(path for folder in models for path in folder.iterdir())
    factors = {
        "settings": dict(settings),
        "texts": {name: list(prompts) for name, prompts in texts.items()},
        "models": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "machine": machine(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "variables": inherited_variables(),
        "code": max(path.stat().st_mtime_ns for path in SOURCES.rglob("*.py")),
        "libraries": [(library, _version(library)) for library in LIBRARIES],
    }
    text = json.dumps(factors, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
