"""The repository as these tests see it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORT_ROOTS = ("services", "operator")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return ROOT


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    """``pyproject.toml``."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def packages() -> set[str]:
    """Folders of the packages that exist, such as ``services/ssd``."""
    inits = (path for root in IMPORT_ROOTS for path in (ROOT / root).glob("*/__init__.py"))
    return {path.parent.relative_to(ROOT).as_posix() for path in inits}


@pytest.fixture(scope="session")
def handwritten() -> list[Path]:
    """All Python files but the generated ones, relative to the root."""
    found = [
        path.relative_to(ROOT)
        for folder in (*IMPORT_ROOTS, "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    return [path for path in found if not path.is_relative_to("services/ssd/v1")]
