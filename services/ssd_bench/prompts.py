"""Prompts of benchmarks: the demo's, or JSONL files in the format of the SSD paper's data sets.

Each line of a file is an object with a text. The paper's sets have the field ``text``; the others
are those of the sets from which they were made (HumanEval, GSM8K, Alpaca, UltraFeedback).
"""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from ssd.demo.corpus import held_out_prompts
from ssd.errors import SettingsError
from ssd.ports import Tokenizer
from ssd.types import TokenId

DEMO = "demo"
"""Name of the demo's prompts: held-out source code of the standard library."""
FIELDS = ("text", "prompt", "question", "instruction")
"""Fields of the text; the first one that a line has counts."""


def data_sets(sources: Sequence[str]) -> dict[str, Path | None]:
    """Return the files of ``--data`` by the names of their data sets; the demo has none.

    Raises:
        SettingsError: a file does not exist, or two have one name.
    """
    files_by_name: dict[str, Path | None] = {}
    for source in sources:
        path = Path(source)
        files: Sequence[Path | None] = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if source == DEMO:
            files = [None]
        elif not files or not all(file is not None and file.is_file() for file in files):
            raise SettingsError(
                f"--data {source}: no such file, or a folder without .jsonl files: give a file, or "
                "write some with 'ssd bench data'"
            )
        for file in files:
            name = DEMO if file is None else file.stem
            if name in files_by_name:
                raise SettingsError(f"--data {source}: two data sets have the name {name}")
            files_by_name[name] = file
    return files_by_name


def read_texts(file: Path | None, count: int, *, num_chars: int) -> list[str]:
    """Return the first prompts of a data set, fewer if it has fewer.

    Args:
        file: the JSONL file; None: the demo.
        count: most prompts.
        num_chars: least length of the demo's prompts.

    Raises:
        SettingsError: the file cannot be read, or a line has no text.
    """
    if file is None:
        return held_out_prompts(count, num_chars=num_chars)
    texts: list[str] = []
    try:
        with file.open("rb") as lines:
            numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            for number, line in islice(numbered, count):
                texts.append(row_text(line, f"{file}, line {number}", FIELDS))
                if not texts[-1].strip():
                    raise SettingsError(f"{file}, line {number}: the text is empty")
    except OSError as error:
        raise SettingsError(f"{file}: {error}: give a JSONL file") from None
    if not texts:
        raise SettingsError(f"{file}: has no lines: each must be an object with a text")
    return texts


def encoded(
    texts: Mapping[str, Sequence[str]], tokenizer: Tokenizer, most: int
) -> dict[str, list[tuple[TokenId, ...]]]:
    """Return the first ``most`` tokens of each prompt, by data set."""
    return {
        name: [tuple(tokenizer.encode(text)[:most]) for text in own] for name, own in texts.items()
    }


def row_text(line: bytes, place: str, fields: Sequence[str]) -> str:
    """Return the text of a line of JSON: the first of these fields that it has.

    Raises:
        SettingsError: the line, whose place the message names, is not JSON or has no such text.
    """
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{place}: not JSON: {error}") from None
    names = [name for name in fields if isinstance(row, dict) and name in row]
    text = row[names[0]] if names else None
    if not isinstance(text, str):
        raise SettingsError(f"{place}: needs a string in one of the fields {', '.join(fields)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"{place}: no text: {error}") from None
    return text
