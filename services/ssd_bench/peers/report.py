"""The file and the table of ``ssd bench peers``."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ssd.errors import SettingsError
from ssd_bench.peers.contenders import OWN, Contender
from ssd_bench.peers.measure import Case, Row
from ssd_bench.report import markdown_table

TITLES = (
    "data",
    "batch",
    "T",
    "engine",
    "decoding",
    "K",
    "dtype",
    "CPUs",
    "tokens/s",
    "/ plain",
    "different",
    "hit rate",
    "memory",
)
METHODS = {"none": "plain", "draft": "draft model", "ngram": "n-grams", "ssd": "SSD"}
SERVER = "a server"
Text = list[int] | str
Decode = Callable[[Sequence[int]], str]


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON values."""
    return [{**asdict(row), "is_usable": row.is_usable, "hit_rate": row.hit_rate} for row in rows]


def rows_of(values: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of ``records``."""
    field_names = {field.name for field in fields(Row)}
    return [
        Row(
            **{name: value for name, value in record.items() if name in field_names}
            | {"contender": Contender(**record["contender"]), "case": Case(**record["case"])}
        )
        for record in values
    ]


class ResultsFile:
    """``peers.json``: what a run has measured. The same run goes on with it."""

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


def markdown(rows: Sequence[Row], conditions: str, decode: Decode) -> str:
    """Return the table with its conditions; ``decode`` is that of the target's tokenizer."""
    table = markdown_table(TITLES, (_cells(row, rows, decode) for row in rows))
    return "\n".join([conditions, "", *table]) + "\n"


def plain_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return plain decoding of the same engine and case with the same dtype and CPUs."""
    plain = replace(row.contender, drafting="none", lookahead=0)
    matches = (other for other in rows if other.contender == plain and other.case == row.case)
    return next(matches, None)


def _cells(row: Row, rows: Sequence[Row], decode: Decode) -> tuple[str, ...]:
    own, spread, ratio, different = row.contender, row.spread, "", ""
    plain = plain_of(row, rows)
    is_server = own.drafting == "server"
    if plain is not None and plain is not row and spread and plain.spread:
        ratio = f"{spread.median / plain.spread.median:.2f}"
    reference = _plain_of_product(row, rows) if is_server else plain
    if reference is not None and reference is not row:
        pairs = [
            pair
            for ours, theirs in zip(row.texts, reference.texts, strict=False)
            for pair in zip(ours, theirs, strict=True)
        ]
        different = f"{sum(not _same(*pair, decode) for pair in pairs)}/{len(pairs)}"
    return (
        row.case.data,
        f"{row.case.batch}",
        f"{row.case.temperature:g}",
        own.peer,
        METHODS.get(own.drafting, SERVER),
        f"{own.lookahead or ''}",
        own.dtype,
        own.devices,
        _speed(row),
        ratio,
        different,
        "" if row.hit_rate is None else f"{row.hit_rate:.3f}",
        "" if is_server or not row.memory_bytes else f"{row.memory_bytes / 2**20:.0f} MiB",
    )


def _plain_of_product(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return plain decoding of this product, with which the texts of a server are compared."""
    own = [other for other in rows if other.contender.peer in OWN and other.case == row.case]
    return next((ours for ours in own if ours.contender.drafting == "none" and ours.texts), None)


def _same(ours: Text, theirs: Text, decode: Decode) -> bool:
    if isinstance(ours, str) or isinstance(theirs, str):
        ours, theirs = (text if isinstance(text, str) else decode(text) for text in (ours, theirs))
    return ours == theirs


def _speed(row: Row) -> str:
    if row.failure:
        return f"failed: {row.failure}"
    if row.spread is None:
        return ""
    return f"{row.spread}" if row.is_usable else f"{row.spread}, busy"
