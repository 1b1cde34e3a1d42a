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


def data_sets(given: Sequence[str]) -> dict[str, Path | None]:
    """Return the files of ``--data`` by the names of their data sets; the demo has none.

    Raises:
        SettingsError: a file does not exist, or two have one name.
    """
    found: dict[str, Path | None] = {}
    for each in given:
        path = Path(each)
        files: Sequence[Path | None] = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if each == DEMO:
            files = [None]
        elif not files or not all(file is not None and file.is_file() for file in files):
            raise SettingsError(
                f"--data {each}: no such file, or a folder without .jsonl files: give a file, or "
                "write some with 'ssd bench data'"
            )
        for file in files:
            name = DEMO if file is None else file.stem
            if name in found:
                raise SettingsError(f"--data {each}: two data sets have the name {name}")
            found[name] = file
    return found


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
    try:
        with file.open(encoding="utf-8") as lines:
            numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            found = [
                _text(line, f"{file}, line {number}") for number, line in islice(numbered, count)
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: {error}: give a JSONL file in UTF-8") from None
    if not found:
        raise SettingsError(f"{file}: has no lines: each must be an object with a text")
    return found


def encoded(
    texts: Mapping[str, Sequence[str]], tokenizer: Tokenizer, most: int
) -> dict[str, list[tuple[TokenId, ...]]]:
    """Return the first ``most`` tokens of each prompt, by data set."""
    return {
        name: [tuple(tokenizer.encode(text)[:most]) for text in own] for name, own in texts.items()
    }


def _text(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{place}: not JSON ({error}): each line must be one object") from None
    if not isinstance(value, dict):
        raise SettingsError(f'{place}: not an object: write {{"text": ...}}')
    name = next((each for each in FIELDS if each in value), None)
    if name is None:
        raise SettingsError(f"{place}: has no field {' or '.join(FIELDS)}")
    text = value[name]
    if not isinstance(text, str) or not text.strip():
        raise SettingsError(f"{place}: {name!r} must be a text that is not empty")
    return text
