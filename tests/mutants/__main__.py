"""``make mutants``: apply each mutant to a copy of the tree and run the tests that should fail.

A failing test kills a mutant. If a mutant survives, the exit code is 1.
Names as arguments select mutants; each is a part of a mutant's name.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("services", "operator", "tests", "tools")
TEST_SECONDS = 600.0
_TESTS_FAILED = 1


class Result(StrEnum):
    """The output of the tests."""

    KILLED = "killed"
    SURVIVED = "survived"


class BadMutantError(Exception):
    """A mutant that cannot be applied or run."""


def main(names: Sequence[str]) -> int:
    """Run the mutants; the result is the exit code."""
    os.nice(10)
    chosen = [each for each in MUTANTS if not names or any(name in each.name for name in names)]
    console = Console()
    table = Table("mutant", "file", "result", "by")
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        for mutant in chosen:
            mutated(tree, mutant)
        run(tree, sorted({test for each in chosen for test in each.tests}), expect_success=True)
        for index, mutant in enumerate(chosen):
            result, test = try_out(tree, mutant)
            console.print(f"{index + 1}/{len(chosen)} {result}: {mutant.name}", highlight=False)
            table.add_row(mutant.name, mutant.path, str(result), test)
    console.print(table)
    survivors = table.columns[2]
    num_survivors = sum(cell == Result.SURVIVED for cell in survivors.cells)
    console.print(f"{len(chosen) - num_survivors} killed, {num_survivors} survived")
    return int(num_survivors > 0)


def copy_tree(folder: Path) -> Path:
    """Copy what the tests need, without compiled files: they could be those of a mutant."""
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def mutated(tree: Path, mutant: Mutant) -> str:
    """Return the mutant's file with its text replaced.

    Raises:
        BadMutantError: the text does not occur exactly once.
    """
    text = (tree / "services" / mutant.path).read_text()
    count = text.count(mutant.before)
    if count != 1:
        raise BadMutantError(
            f"{mutant.path} contains the text to replace {count} times, not once: {mutant.before!r}"
        )
    return text.replace(mutant.before, mutant.after)


def try_out(tree: Path, mutant: Mutant) -> tuple[Result, str]:
    """Apply a mutant, run its tests one after the other until one fails, and revert it."""
    path = tree / "services" / mutant.path
    original = path.read_text()
    path.write_text(mutated(tree, mutant))
    try:
        for test in mutant.tests:
            if failed := run(tree, [test]):
                return Result.KILLED, failed
    finally:
        path.write_text(original)
    return Result.SURVIVED, ""


def run(tree: Path, tests: Sequence[str], *, expect_success: bool = False) -> str:
    """Run tests in the copy; return the first that failed, empty if none did.

    Raises:
        BadMutantError: the tests cannot be run, or fail where no mutant is applied.
    """
    flags = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider")
    # Longer than any test takes. The fixed seed selects the same examples in each run.
    bounds = ("--timeout", "120", "--hypothesis-seed", "0")
    environment = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        # Processes that tests start must not find the installed tree.
        "PYTHONPATH": f"{tree / 'services'}:{tree / 'operator'}",
    }
    command = ["env", *(f"{key}={value}" for key, value in environment.items()), sys.executable]
    try:
        done = subprocess.run(
            [*command, "-m", "pytest", *flags, *bounds, *tests],
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=None if expect_success else TEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{tests[0]} (it hangs)"
    # A fixture that fails is an ERROR; a file that cannot be imported has another exit code.
    lines = [line.split() for line in done.stdout.splitlines()]
    failed = [words[1] for words in lines if words[:1] in (["FAILED"], ["ERROR"])]
    is_as_expected = done.returncode in ({0} if expect_success else {0, _TESTS_FAILED})
    if not is_as_expected or bool(failed) != (done.returncode == _TESTS_FAILED):
        raise BadMutantError(f"pytest {' '.join(tests)}\n{done.stdout}{done.stderr}")
    return failed[0].rpartition("/")[2] if failed else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
