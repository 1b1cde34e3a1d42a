"""Tables and the plot of ``ssd bench peers``."""

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from ssd_bench.peers.contenders import Contender
from ssd_bench.peers.measure import Case, Row

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
    "memory",
)
METHODS = {"none": "plain", "draft": "draft model", "ngram": "n-grams", "ssd": "SSD"}


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON values."""
    return [{**asdict(row), "is_usable": row.is_usable} for row in rows]


def rows_of(values: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of ``records``."""
    kept = {each.name for each in fields(Row)}
    return [
        Row(
            **{name: value for name, value in each.items() if name in kept}
            | {"contender": Contender(**each["contender"]), "case": Case(**each["case"])}
        )
        for each in values
    ]


def markdown(rows: Sequence[Row], conditions: str) -> str:
    """Return the table with its conditions."""
    lines = [conditions, "", "| " + " | ".join(TITLES) + " |", "|" + "---|" * len(TITLES)]
    lines += ["| " + " | ".join(_cells(row, plain_of(row, rows))) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def plain_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return plain decoding of the same engine and case with the same dtype and CPUs."""
    plain = replace(row.contender, drafting="none", lookahead=0)
    found = (each for each in rows if each.contender == plain and each.case == row.case)
    return next(found, None)


def _cells(row: Row, plain: Row | None) -> tuple[str, ...]:
    own, spread, ratio, different = row.contender, row.spread, "", ""
    if plain is not None and plain is not row:
        if spread and plain.spread:
            ratio = f"{spread.median / plain.spread.median:.2f}"
        pairs = [
            pair
            for ours, theirs in zip(row.texts, plain.texts, strict=False)
            for pair in zip(ours, theirs, strict=True)
        ]
        different = f"{sum(a != b for a, b in pairs)}/{len(pairs)}"
    return (
        row.case.data,
        f"{row.case.batch}",
        f"{row.case.temperature:g}",
        own.peer,
        METHODS[own.drafting],
        f"{own.lookahead or ''}",
        own.dtype,
        f"{own.threads} + 1" if own.drafting == "ssd" else f"{own.threads}",
        _speed(row),
        ratio,
        different,
        f"{row.memory_bytes / 2**20:.0f} MiB" if row.memory_bytes else "",
    )


def _speed(row: Row) -> str:
    if row.failure:
        return f"failed: {row.failure}"
    if row.spread is None:
        return ""
    return f"{row.spread}" if row.is_usable else f"{row.spread}, busy"
