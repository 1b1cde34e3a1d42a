"""A run of ``ssd bench`` that was ended, and goes on with the same command."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ssd
from ssd.errors import SettingsError
from ssd_bench.machine import machine
from ssd_bench.metrics import BatchFigures
from ssd_bench.runs import Cell


class Unfinished:
    """The file with the cells that a run has measured so far."""

    def __init__(self, output: Path, settings: Mapping[str, str]) -> None:
        """Construct; ``settings`` are those of the run, without its folder ``output``."""
        self._file = output / "unfinished.json"
        self._run = {
            "settings": dict(settings),
            "machine": machine(),
            "version": ssd.__version__,
        }

    def cells(self) -> list[Cell]:
        """Return the cells of a run that was ended: usable ones, the others are measured again.

        Raises:
            SettingsError: the run has other settings, or the file is damaged.
        """
        try:
            found = json.loads(self._file.read_text())
            cells = [_cell(each) for each in found.pop("cells")]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(f"{self._file}: delete it, it cannot be read ({error!r})") from None
        if found != self._run:
            raise SettingsError(
                f"{self._file} is of a run with other settings, of another machine or another "
                "version: choose another --output, or delete it"
            )
        return [cell for cell in cells if cell.is_usable]

    def save(self, cells: Sequence[Cell]) -> None:
        """Write the cells measured so far."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".part")
        new.write_text(json.dumps({**self._run, "cells": [asdict(cell) for cell in cells]}))
        # A file that is replaced is complete at any time.
        new.replace(self._file)

    def remove(self) -> None:
        """Remove the file: the run has ended."""
        with suppress(FileNotFoundError):
            self._file.unlink()


def _cell(found: dict[str, Any]) -> Cell:
    figures = {
        mode: [BatchFigures(**each) for each in repetitions]
        for mode, repetitions in found["figures"].items()
    }
    return Cell(**{**found, "figures": figures})
