"""The file with what a run of ``ssd bench peers`` has measured; the same run goes on with it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssd.errors import SettingsError
from ssd_bench.peers.measure import Row
from ssd_bench.peers.report import records, rows_of


class ResultsFile:
    """``peers.json``."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        """Construct; ``run`` describes the run, with its ``identity``."""
        self.path = path
        self._run = dict(run)

    def continued(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows with the measurements of the same run, if the file has some.

        From the first one on a busy machine on, a row is measured again.

        Raises:
            SettingsError: the file is of a run with another identity, or damaged.
        """
        measured = {(row.contender, row.case): row for row in self._earlier()}
        for row in measured.values():
            row.failure = ""
            row.forget_busy()
        return [measured.get((row.contender, row.case), row) for row in rows]

    def save(self, rows: Sequence[Row]) -> None:
        """Write what the run has measured so far."""
        new = self.path.with_suffix(".part")
        new.write_text(json.dumps({**self._run, "rows": records(rows)}))
        # A file that is replaced is complete at any time.
        new.replace(self.path)

    def _earlier(self) -> list[Row]:
        if not self.path.exists():
            return []
        try:
            results = json.loads(self.path.read_text())
            if results.get("identity") == self._run["identity"]:
                return rows_of(results["rows"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(
                f"{self.path} is damaged ({error!r}): choose another --output"
            ) from None
        raise SettingsError(
            f"{self.path} has a run with other settings, code, engines, models, data or CPUs: "
            "choose another --output"
        )
