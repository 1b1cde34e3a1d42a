"""A run of ``ssd bench`` that was ended, and goes on with the same command."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ssd
from ssd.errors import SettingsError
from ssd.settings import inherited_variables
from ssd_bench.machine import machine
from ssd_bench.metrics import BatchFigures
from ssd_bench.runs import Cell, Results

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


class Unfinished:
    """The file with what a run has measured so far."""

    def __init__(self, output: Path, name: str) -> None:
        """Construct; ``name`` is the ``identity`` of the run."""
        self._file = output / f"unfinished-{name}.json"

    @property
    def is_beside_others(self) -> bool:
        """Whether runs with other names were ended in the folder, and this one was not."""
        others = self._file.parent.glob("unfinished-*.json")
        return any(others) and not self._file.exists()

    def results(self) -> Results:
        """Return what a run that was ended has measured, without the cells of a busy machine.

        Raises:
            SettingsError: the file cannot be read.
        """
        try:
            saved = json.loads(self._file.read_text())
            cells = [_cell(cell) for cell in saved.pop("cells")]
            results = Results(**saved)
        except FileNotFoundError:
            return Results()
        except OSError as error:
            raise SettingsError(f"{self._file}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(f"{self._file}: delete it, it is damaged ({error!r})") from None
        results.cells = [cell for cell in cells if cell.is_usable]
        return results

    def save(self, results: Results) -> None:
        """Write what the run has measured so far."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".part")
        new.write_text(json.dumps(asdict(results)))
        # A file that is replaced is complete at any time.
        new.replace(self._file)

    def remove(self) -> None:
        """Remove the file: the run has ended."""
        self._file.unlink(missing_ok=True)


def _cell(record: dict[str, Any]) -> Cell:
    figures = {
        mode: [BatchFigures(**values) for values in repetitions]
        for mode, repetitions in record["figures"].items()
    }
    return Cell(**{**record, "figures": figures})
