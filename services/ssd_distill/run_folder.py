"""The folder of a run while a process uses it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ssd.errors import SettingsError
from ssd_bench.command import only_writer

RECORD = "distill.json"
"""What the run was asked for and has found. A folder without it has no run."""
WORK = "training"
"""What is needed to go on."""


@contextmanager
def held_folder(output: Path) -> Iterator[None]:
    """Make a folder and lock it for this process. At the end, what is still empty is removed.

    Raises:
        SettingsError: the folder cannot be written, contains something else than a run, or another
            process has it.
    """
    is_new = not output.exists()
    # A killed process can leave WORK.
    is_free = is_new or (output.is_dir() and all(each.name == WORK for each in output.iterdir()))
    if not is_free and not (output / RECORD).is_file():
        raise SettingsError(f"--output {output} contains something else: use another folder")
    with only_writer(output):
        work = output / WORK
        work.mkdir(exist_ok=True)
        try:
            yield
        finally:
            with suppress(OSError):
                work.rmdir()
                if is_new:
                    output.rmdir()


def read_record(output: Path) -> dict[str, Any] | None:
    """Return the record of a folder, None if it has none.

    Raises:
        SettingsError: the record is damaged.
    """
    file = output / RECORD
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{file} is damaged ({error}): use another folder") from None
    if not isinstance(record, dict) or not isinstance(record.get("plan"), dict):
        raise SettingsError(f"{file} is no record of a run: use another folder")
    return record


def is_complete(record: dict[str, Any] | None) -> bool:
    """Return whether the run of a record is complete."""
    return record is not None and "after" in record


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file at once, indented."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    replace_file(new, file)


def replace_file(new: Path, file: Path) -> None:
    """Rename a file over another one once it is on the disk, so that no crash leaves a part."""
    with new.open("rb+") as written:
        os.fsync(written.fileno())
    new.replace(file)
