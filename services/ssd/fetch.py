"""``python -m ssd.fetch``: download a model of the hub into the cache.

In a pod, this runs before the engine, which has neither a token nor access to the hub. Pods that
share a cache download a model once: the others wait for the first one.
"""

from ssd.runtime.sigterm import end_at_sigterm

if __name__ == "__main__":
    # Before the imports below, which take seconds. Not 0: the model is not downloaded.
    end_at_sigterm(143, also_at_sigint=True)

import contextlib
import errno
import fcntl
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Literal

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import disable_progress_bars

from ssd.errors import CacheError, SettingsError
from ssd.model_files.model_name import HubModel
from ssd.model_files.model_source import HUB_ERRORS, WANTED, as_setup_error, is_transient
from ssd.observability.log import get_logger, log_progress
from ssd.runtime.process import run_process
from ssd.settings import TERMINATION_LOG

PROGRESS_SECONDS = 10.0
"""Interval of progress events."""
FETCHED = "fetched"
"""Content of a lock file once the model is complete."""
_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
_COMMIT = re.compile("[0-9a-f]{40}")
_GIGABYTE = 1e9

_log = get_logger("ssd")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """Settings of the process. ``HF_*`` sets cache, token and address of the hub."""

    model: str = ""
    """``hf://org/name@commit``. Branches and tags can change, so they are not accepted."""
    termination_log: str = TERMINATION_LOG
    """File that receives the cause of a failure in one line; empty for none."""
    log_format: Literal["json", "text"] = "json"
    """Form of log lines on standard error."""

    def __post_init__(self) -> None:
        wanted = HubModel.parse(self.model)
        if wanted is None or not _COMMIT.fullmatch(wanted.revision or ""):
            raise SettingsError(f"model is {self.model!r}, which is not hf://org/name@commit")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; the result is its exit code."""
    return run_process("fetch", FetchSettings, _serve, lambda _settings: None, argv)


async def _serve(settings: FetchSettings) -> int:
    fetch(settings.model)
    return 0


def fetch(model: str) -> Path:
    """Return the complete folder of ``hf://org/name@commit``.

    Raises:
        SetupError: it cannot be downloaded.
    """
    wanted = HubModel.parse(model)
    assert wanted is not None
    try:
        with _lock(wanted) as lock:
            if lock.read() == FETCHED and (folder := _cached(wanted)) is not None:
                _log.info("fetched", model=model, was_here=True)
                return folder
            # Before the download: the file must not call an interrupted one complete.
            lock.truncate(0)
            folder = _download(wanted)
            lock.write(FETCHED)
        _log.info("fetched", model=model, was_here=False)
        return folder
    except (*HUB_ERRORS, ValueError) as error:
        raise as_setup_error(model, error) from error


@contextlib.contextmanager
def _lock(model: HubModel) -> Iterator[IO[str]]:
    """Lock the model's lock file, which all pods of a cache share; open it at its beginning."""
    path = Path(HF_HUB_CACHE) / ".ssd" / f"{model.name.replace('/', '--')}@{model.revision}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info(
                "waits", model=model.name, reason="another process downloads it into this cache"
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            # The hub's library renames complete files, so two downloads only cost time.
            _log.warning("cache_without_locks", reason=str(error))
        lock.seek(0)
        yield lock


def _cached(model: HubModel) -> Path | None:
    """Return the folder in the cache without access to the hub; None if it was deleted."""
    try:
        return Path(
            snapshot_download(
                model.name, revision=model.revision, allow_patterns=WANTED, local_files_only=True
            )
        )
    except FileNotFoundError:
        return None


def _download(model: HubModel) -> Path:
    disable_progress_bars()
    blobs = _Blobs.of(model)
    blobs.check_room(model)
    is_over = threading.Event()
    reporter = threading.Thread(target=blobs.report, args=(is_over,), daemon=True)
    reporter.start()
    try:
        return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=WANTED))
    finally:
        is_over.set()
        reporter.join()


@dataclass(frozen=True, slots=True)
class _Blobs:
    """The files of a model in the cache, named by the hash of their content."""

    folder: Path
    sizes: Mapping[str, int]
    """Bytes by name; empty if the hub does not report them."""

    @classmethod
    def of(cls, model: HubModel) -> "_Blobs":
        folder = Path(HF_HUB_CACHE) / f"models--{model.name.replace('/', '--')}" / "blobs"
        try:
            entries = HfApi().list_repo_tree(model.name, recursive=True, revision=model.revision)
            files = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
        except HUB_ERRORS as error:
            if not is_transient(error):
                raise
            # The download may still succeed from the cache.
            files = {}
        wanted = (
            file
            for path, file in files.items()
            if any(fnmatch(path, pattern) for pattern in WANTED)
        )
        sizes = {file.lfs.sha256 if file.lfs else file.blob_id: file.size for file in wanted}
        return cls(folder, sizes)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(self.sizes.values())

    @property
    def num_bytes_here(self) -> int:
        """Number of these bytes in the cache, including incomplete files."""
        there = [path for name in self.sizes for path in self.folder.glob(f"{name}*")]
        return sum(path.stat().st_size for path in there if path.exists())

    def check_room(self, model: HubModel) -> None:
        """Check the free space before the download.

        Raises:
            CacheError: the rest of the model is larger than the free space.
        """
        missing, free = self.num_bytes - self.num_bytes_here, shutil.disk_usage(HF_HUB_CACHE).free
        _log.info("fetching", model=model.name, bytes=self.num_bytes, missing_bytes=missing)
        if missing > free:
            raise CacheError(
                f"{model.name} needs {missing / _GIGABYTE:.1f} GB more in {HF_HUB_CACHE}, "
                f"{free / _GIGABYTE:.1f} GB are free; use a larger volume for modelCache"
            )

    def report(self, is_over: threading.Event) -> None:
        """Log the progress until the download ends. Its own thread."""
        while self.sizes and not is_over.wait(PROGRESS_SECONDS):
            log_progress("fetch", min(1.0, self.num_bytes_here / max(1, self.num_bytes)))


if __name__ == "__main__":
    sys.exit(main())
