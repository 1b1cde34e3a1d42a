import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.__main__ import mutants

import ssd

MAX_LINES = 500
LONGER_FILES: dict[str, str] = {}
"""Path to the reason; a file that has become short again leaves the list."""


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_fit_on_a_few_screens(root: Path, handwritten: list[Path]) -> None:
    long = {path.as_posix() for path in handwritten if num_lines(root / path) > MAX_LINES}
    assert long == set(LONGER_FILES)


def test_every_package_is_in_the_wheel_and_in_the_contracts(
    project: dict[str, Any], packages: set[str]
) -> None:
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(wheel) == packages
    names = {path.rpartition("/")[2] for path in packages}
    contracts = project["tool"]["importlinter"]
    assert set(contracts["root_packages"]) == names
    (processes,) = [
        contract for contract in contracts["contracts"] if contract["name"].startswith("processes")
    ]
    assert set(re.findall(r"\w+", " ".join(processes["layers"]))) == names


@pytest.mark.parametrize("name", ["observability", "pool", "text", "transport"])
def test_other_packages_import_the_modules_that_a_package_names(
    root: Path, handwritten: list[Path], name: str
) -> None:
    folder = Path("services", "ssd", name)
    used: set[str] = set()
    for path in handwritten:
        if path.parts[0] in ("services", "operator") and not path.is_relative_to(folder):
            text = (root / path).read_text()
            used |= set(re.findall(rf"from ssd\.{name}\.(\w+)|from ssd\.{name} import (\w+)", text))
    names = importlib.import_module(f"ssd.{name}").__all__
    assert {"".join(each) for each in used} == set(names)


def test_operator_is_an_import_root_and_hides_no_module(root: Path) -> None:
    """The standard library has a module ``operator``; a package of that name would replace it."""
    assert not (root / "operator" / "__init__.py").exists()
    assert [path for path in (root / "tests").rglob("operator") if path.is_dir()] == []
    assert list((root / "tests").rglob("__init__.py")) == []


def test_every_mutant_changes_a_text_that_its_file_has_once(root: Path) -> None:
    for mutant in mutants():
        assert mutant.applied(root)
        for test in mutant.tests:
            assert (root / test.partition("::")[0]).exists(), test


def test_unit_tests_mirror_the_packages(root: Path) -> None:
    unit = root / "tests" / "unit"
    for folder in unit.glob("*"):
        if folder.name != "__pycache__":
            bases = ("services", "operator", "tools")
            assert any((root / base / folder.name).is_dir() for base in bases), folder
    for folder in (unit / "ssd").glob("*"):
        place = root / "services" / "ssd" / folder.name
        if folder.is_dir() and folder.name != "__pycache__":
            assert place.is_dir() or place.with_suffix(".py").is_file(), folder


def test_every_path_that_a_readme_names_exists(root: Path) -> None:
    for readme in (root / "README.md", root / "services" / "README.md"):
        rows = [line for line in readme.read_text().splitlines() if line.startswith("|")]
        named = re.findall(r"`((?:[\w.-]+/)[\w./-]*|[\w-]+\.(?:md|toml|txt))`", "\n".join(rows))
        assert [path for path in named if not (root / path).exists()] == []


def pages(root: Path) -> list[Path]:
    """All Markdown files for readers."""
    folders = ("charts", "docs", "examples", "services", "operator", "tests")
    found = (path for folder in folders for path in (root / folder).rglob("*.md"))
    return [*root.glob("*.md"), *(path for path in found if "node_modules" not in path.parts)]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_every_relative_link_of_a_page_leads_somewhere(root: Path) -> None:
    wrong = []
    for page in pages(root):
        for link in re.findall(r"\]\((?!https?://|mailto:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            place = page.parent / name if name else page
            if not place.exists() or (anchor and anchor not in anchors(place)):
                wrong.append(f"{page.relative_to(root)}: {link}")
    assert wrong == []


def test_ci_begins_with_the_quick_start_of_the_readme(root: Path) -> None:
    quick_start = (root / "README.md").read_text().partition("\n## Quick start\n")[2]
    block = quick_start.partition("```sh\n")[2].partition("```")[0]
    commands = [line.partition(" #")[0].rstrip() for line in block.splitlines()]
    assert commands[0] == "make run"
    script = (root / ".ci" / "run").read_text().splitlines()
    first = script.index(commands[0])
    wanted = [*commands, "make check test"]
    assert script[first : first + len(wanted)] == wanted


def test_every_process_and_tool_has_its_row(root: Path, packages: set[str]) -> None:
    rows = re.findall(r"^\|.*\| `(ssd_\w+)` \|", (root / "services/README.md").read_text(), re.M)
    named = {path.rpartition("/")[2] for path in packages if path.startswith("services/")}
    assert set(rows) == named - {"ssd"}


def test_the_changelogs_newest_version_is_the_products(root: Path) -> None:
    titles = re.findall(r"^## \[(.+?)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert titles[0] == "Unreleased"
    assert titles[1] == ssd.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", ssd.__version__)


def test_the_protos_explain_every_field(root: Path) -> None:
    for path in root.glob("protos/ssd/v1/*.proto"):
        lines = path.read_text().splitlines()
        for index, line in enumerate(lines):
            if re.match(r"\s+(optional |repeated )?[\w.]+(<.*>)? \w+ = \d+;", line):
                before = lines[index - 1].strip()
                assert "//" in line or before.startswith("//"), f"{path.name}:{index + 1}"


def test_tests_never_sleep_in_real_time_to_wait(root: Path, handwritten: list[Path]) -> None:
    for path in handwritten:
        if path.parts[:2] == ("tests", "unit"):
            slept = re.findall(r"\b(?:asyncio|time)\.sleep\((?!0\))", (root / path).read_text())
            assert slept == [], f"{path}: wait for an event, or move a FakeClock"
