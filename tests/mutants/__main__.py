"""``make mutants``: apply each mutant to a copy of the tree and run the tests that should fail.

A failing test kills a mutant. If a mutant survives, the exit code is 1. Names as arguments select
mutants; each is a part of a mutant's name.

*Decision*: mistakes that people chose, in ``mutants.yaml``. *Because*: each violates a rule of
the algorithm in a way that imports and runs, so each must fail a test. *Not chosen*: mutmut and
cosmic-ray, which change operators and numbers everywhere. Many of their mutants change nothing that
a test can see, and they cannot express these mistakes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("services", "operator", "tests", "tools")
TEST_SECONDS = 600.0
_TESTS_FAILED = 1


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake: ``before`` becomes ``after`` in a file."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def applied(self, tree: Path) -> str:
        """Return the file with its text replaced.

        Raises:
            BadMutantError: the text does not occur exactly once.
        """
        text = (tree / self.file).read_text()
        if (count := text.count(self.before)) != 1:
            raise BadMutantError(
                f"{self.file} contains the text to replace {count} times, not once: {self.before!r}"
            )
        return text.replace(self.before, self.after)


class BadMutantError(Exception):
    """A mutant that cannot be applied or run."""


def mutants() -> Iterator[Mutant]:
    """Yield all mutants."""
    for group in yaml.safe_load((Path(__file__).parent / "mutants.yaml").read_text()):
        for each in group["mutants"]:
            yield Mutant(file=group["file"], tests=tuple(group["tests"]), **each)


def main(names: Sequence[str]) -> int:
    """Run the mutants; the result is the exit code."""
    os.nice(10)
    chosen = [each for each in mutants() if not names or any(name in each.name for name in names)]
    console = Console(highlight=False, soft_wrap=True)
    num_survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        for mutant in chosen:
            mutant.applied(tree)
        run(tree, sorted({test for each in chosen for test in each.tests}), expect_success=True)
        for number, mutant in enumerate(chosen, 1):
            test = killer(tree, mutant)
            num_survivors += not test
            result = f"killed by {test}" if test else "SURVIVED"
            console.print(f"{number}/{len(chosen)} {mutant.file}: {mutant.name}: {result}")
    console.print(f"{len(chosen) - num_survivors} killed, {num_survivors} survived")
    return int(num_survivors > 0)


def copy_tree(folder: Path) -> Path:
    """Copy what the tests need, without compiled files: they could be those of a mutant."""
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def killer(tree: Path, mutant: Mutant) -> str:
    """Return the first test that fails with a mutant, empty if none does; reverts the mutant."""
    path = tree / mutant.file
    original = path.read_text()
    path.write_text(mutant.applied(tree))
    try:
        return next(filter(None, (run(tree, [test]) for test in mutant.tests)), "")
    finally:
        path.write_text(original)


def run(tree: Path, tests: Sequence[str], *, expect_success: bool = False) -> str:
    """Run tests in the copy; return the first that failed, empty if none did.

    Raises:
        BadMutantError: the tests cannot be run, or fail where no mutant is applied.
    """
    flags = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider")
    # Longer than any test takes. The fixed seed selects the same examples in each run.
    bounds = ("--timeout", "120", "--hypothesis-seed", "0")
    environment = (
        *("PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1"),
        # Processes that tests start must not find the installed tree.
        f"PYTHONPATH={tree / 'services'}:{tree / 'operator'}",
    )
    try:
        done = subprocess.run(
            ["env", *environment, sys.executable, "-m", "pytest", *flags, *bounds, *tests],
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
