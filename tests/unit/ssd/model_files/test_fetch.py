"""Free space, progress and locks of a download; an integration test runs the download."""

import errno
import fcntl
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssd import fetch as module
from ssd.errors import CacheError
from ssd.fetch import _Blobs, _lock
from ssd.model_files.model_name import HubModel

MODEL = HubModel("org/tiny", "0" * 40)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def blobs(cache: Path) -> _Blobs:
    """One whole file, a half one, and one of another revision."""
    for name, size in (("aa", 60), ("bb.incomplete", 20), ("cc", 500)):
        (cache / name).write_bytes(b"0" * size)
    return _Blobs(cache, {"aa": 60, "bb": 40, "dd": 100})


def test_the_size_in_the_cache_counts_the_files_of_this_model(blobs: _Blobs) -> None:
    assert (blobs.num_bytes, blobs.num_bytes_here) == (200, 80)


@pytest.mark.parametrize(("free", "fits"), [(120, True), (119, False)])
def test_a_model_larger_than_the_free_space_is_not_downloaded(
    blobs: _Blobs, monkeypatch: pytest.MonkeyPatch, free: int, *, fits: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    if fits:
        blobs.check_room(MODEL)
        return
    with pytest.raises(CacheError, match="larger volume"):
        blobs.check_room(MODEL)


def test_progress_is_logged_until_the_end(blobs: _Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, logged = threading.Event(), list[float]()

    def keep(_stage: str, fraction: float) -> None:
        logged.append(fraction)
        is_over.set()

    monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(module, "log_progress", keep)
    blobs.report(is_over)
    assert logged == [0.4]


def test_a_cache_without_locks_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: object, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with _lock(MODEL) as lock:
        assert lock.read() == ""
        lock.write("fetched")
    with _lock(MODEL) as lock:
        assert lock.read() == "fetched"
