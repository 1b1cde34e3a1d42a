"""Folders of tiny models."""

from pathlib import Path
from typing import Any

import pytest

from ssd.testing.tiny_folder import write_tiny_folder


def model_folder(**options: Any) -> Any:
    """Return a fixture: one model for all tests of a file; options of ``write_tiny_folder``."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model", **options)

    return folder
