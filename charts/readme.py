"""Write the table of values into ``charts/ssd/README.md``: a row for each value and its comment.

``python charts/readme.py`` writes, ``--check`` only compares and exits 1 on a difference. In
``values.yaml`` each value stands on one line, with its comment right above.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

CHART = Path(__file__).parent / "ssd"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: (?P<value>.+))?$")


def rows(values: str) -> Iterator[tuple[str, str, str]]:
    """(path, default, meaning) of each value.

    Raises:
        ValueError: a line is neither a key, a comment nor empty, or a value has no comment.
    """
    path: list[str] = []
    comment: list[str] = []
    for number, line in enumerate(values.splitlines(), start=1):
        if not line:
            comment = []
        elif line.lstrip().startswith("#"):
            comment.append(line.lstrip("# ").rstrip())
        elif (entry := _KEY.match(line)) is None:
            raise ValueError(f"values.yaml:{number}: one value a line is wanted, found {line!r}")
        else:
            path = [*path[: len(entry["indent"]) // 2], entry["key"]]
            if entry["value"] is not None:
                if not comment:
                    raise ValueError(f"values.yaml:{number}: {'.'.join(path)} has no comment")
                yield ".".join(path), entry["value"], " ".join(comment)
            comment = []


def table(values: str) -> str:
    """The table in Markdown."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    lines += [f"| `{path}` | `{default}` | {meaning} |" for path, default, meaning in rows(values)]
    return "\n".join(lines)


def with_table(readme: str, values: str) -> str:
    """The README with the table between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(values)}\n{END}{after}"


def main() -> None:
    """Write or check the chart's README."""
    path = CHART / "README.md"
    readme = path.read_text()
    wanted = with_table(readme, (CHART / "values.yaml").read_text())
    if sys.argv[1:] != ["--check"]:
        path.write_text(wanted)
    elif readme != wanted:
        raise SystemExit("charts/ssd/README.md is stale: run 'python charts/readme.py'")


if __name__ == "__main__":
    main()
