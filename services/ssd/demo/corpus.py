"""The text on which the embedded pair is trained: the standard library of the running Python.

Every machine that runs this package has it. Its licence (PSF-2.0) allows the training, and a small
model can complete it. About 5 % of the bytes are in held-out modules. These are not used for
training and supply the prompts of benchmarks.
"""

import functools
import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
"""Folders that are not used: third-party code, tests, generated tables."""

HELD_OUT_PER_MILLE = 50
"""Share of held-out modules, in thousandths."""


@dataclass(frozen=True, slots=True)
class Module:
    """One source file of the standard library.

    Attributes:
        path: Path relative to the standard library's root, with forward slashes.
        text: The file's text.
    """

    path: PurePosixPath
    text: str


def standard_library() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out(path: PurePosixPath) -> bool:
    """Return whether a module is held out; depends only on its relative path."""
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def read_modules(
    root: Path | None = None, is_wanted: Callable[[PurePosixPath], bool] = lambda _path: True
) -> list[Module]:
    """Read modules of the corpus, by default all of them, sorted by path.

    Args:
        root: Another folder to read instead of the standard library.
        is_wanted: Which modules, by their relative path; the others are not read.

    Returns:
        Modules that are valid UTF-8 and not empty.
    """
    folder = standard_library() if root is None else root
    modules: list[Module] = []
    for file in sorted(folder.rglob("*.py")):
        path = PurePosixPath(file.relative_to(folder).as_posix())
        if SKIPPED_FOLDERS.intersection(path.parts[:-1]) or not is_wanted(path):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        text = text.replace("\r\n", "\n")
        if text.strip():
            modules.append(Module(path, text))
    return modules


def training_modules(root: Path | None = None) -> list[Module]:
    """Return the modules for training."""
    return read_modules(root, lambda path: not held_out(path))


@functools.cache
def held_out_modules(root: Path | None = None) -> tuple[Module, ...]:
    """Return the held-out modules; the first call reads them."""
    return tuple(read_modules(root, held_out))


def held_out_prompts(count: int, *, num_chars: int = 1200, root: Path | None = None) -> list[str]:
    """Return prompts from held-out modules; the same list on every call.

    Prompts start and end at the start of a line. They are taken from the modules in turn, so that a
    few prompts are already from different modules.

    Args:
        count: Number of prompts, at least 0.
        num_chars: Least length of a prompt in characters; a prompt ends with its line.
        root: Another folder to read instead of the standard library.

    Returns:
        ``count`` prompts, or fewer if the held-out text is too short.
    """
    columns = [_cut(module.text, num_chars) for module in held_out_modules(root)]
    prompts: list[str] = []
    depth = 0
    while len(prompts) < count and any(len(column) > depth for column in columns):
        prompts.extend(column[depth] for column in columns if len(column) > depth)
        depth += 1
    return prompts[:count]


def _cut(text: str, num_chars: int) -> list[str]:
    """Cut a text into consecutive pieces of whole lines, each of at least ``num_chars``."""
    pieces: list[str] = []
    lines: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        length += len(line)
        if length >= num_chars:
            pieces.append("".join(lines))
            lines, length = [], 0
    return pieces
