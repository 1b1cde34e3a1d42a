"""``python -m ssd.fetch``: put a model of the hub into the cache, for an engine that may not ask.

In a pod this runs first and alone has the token and the network. Pods that share a cache fetch a
model once: who comes second waits, and finds it there.
"""

from ssd.sigterm import end_at_sigterm

if __name__ == "__main__":
    # Here, because what is imported below takes seconds. Not with 0: the model is not there.
    end_at_sigterm(143)

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
from ssd.hub import HUB_ERRORS, WANTED, HubModel, as_setup_error, may_pass
from ssd.process import run_process
from ssd.settings import TERMINATION_LOG
from ssd.telemetry import get_logger, log_progress

PROGRESS_SECONDS = 10.0
"""Between two lines on how far a download is."""
FETCHED = "fetched"
"""What a lock file says once the model is whole."""
_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
_COMMIT = re.compile("[0-9a-f]{40}")
_GIGABYTE = 1e9

_log = get_logger("ssd")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """What ``python -m ssd.fetch`` can be told. Cache, token and address of the hub: ``HF_*``."""

    model: str = ""
    """``hf://org/name@commit``: what else has a name may change, and is not fetched once."""
    termination_log: str = TERMINATION_LOG
    """File for the one line on why the model could not be fetched; empty for none."""
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
    """The folder of ``hf://org/name@commit``, whole.

    Raises:
        SetupError: why it cannot be had.
    """
    wanted = HubModel.parse(model)
    assert wanted is not None
    try:
        with _lock(wanted) as lock:
            if lock.read() == FETCHED and (folder := _here(wanted)) is not None:
                _log.info("fetched", model=model, was_here=True)
                return folder
            folder = _download(wanted)
            lock.seek(0)
            lock.write(FETCHED)
        _log.info("fetched", model=model, was_here=False)
        return folder
    except (*HUB_ERRORS, ValueError) as error:
        raise as_setup_error(model, error) from error


@contextlib.contextmanager
def _lock(model: HubModel) -> Iterator[IO[str]]:
    """Hold the model's lock file, which all pods of a cache see; it opens at its beginning."""
    path = Path(HF_HUB_CACHE) / ".ssd" / f"{model.name.replace('/', '--')}@{model.revision}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waits", model=model.name, reason="somebody else fetches it into this cache")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            # The hub's library makes each file whole before it shows it: only time is lost.
            _log.warning("cache_without_locks", reason=str(error))
        lock.seek(0)
        yield lock


def _here(model: HubModel) -> Path | None:
    """The folder in the cache, asking no hub; None if somebody has cleared it away."""
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
    teller = threading.Thread(target=blobs.tell, args=(is_over,), daemon=True)
    teller.start()
    try:
        return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=WANTED))
    finally:
        is_over.set()
        teller.join()


@dataclass(frozen=True, slots=True)
class _Blobs:
    """The files of a model in the cache, where each bears the name of its content."""

    folder: Path
    sizes: Mapping[str, int]
    """In bytes, by name; empty if the hub does not tell them."""

    @classmethod
    def of(cls, model: HubModel) -> "_Blobs":
        folder = Path(HF_HUB_CACHE) / f"models--{model.name.replace('/', '--')}" / "blobs"
        try:
            entries = HfApi().list_repo_tree(model.name, recursive=True, revision=model.revision)
            files = {each.path: each for each in entries if isinstance(each, RepoFile)}
        except HUB_ERRORS as error:
            if not may_pass(error):
                raise
            # Whether it can do without the hub is for the download to find out.
            files = {}
        wanted = (
            file
            for path, file in files.items()
            if any(fnmatch(path, pattern) for pattern in WANTED)
        )
        sizes = {each.lfs.sha256 if each.lfs else each.blob_id: each.size for each in wanted}
        return cls(folder, sizes)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes.values())

    @property
    def num_bytes_here(self) -> int:
        """Of these, how many have come, half files included."""
        there = [path for name in self.sizes for path in self.folder.glob(f"{name}*")]
        return sum(path.stat().st_size for path in there if path.exists())

    def check_room(self, model: HubModel) -> None:
        """Find out before hours have passed.

        Raises:
            CacheError: the rest of the model is larger than what is free.
        """
        missing, free = self.num_bytes - self.num_bytes_here, shutil.disk_usage(HF_HUB_CACHE).free
        _log.info("fetching", model=model.name, bytes=self.num_bytes, missing_bytes=missing)
        if missing > free:
            raise CacheError(
                f"{model.name} needs {missing / _GIGABYTE:.1f} GB more in {HF_HUB_CACHE}, "
                f"{free / _GIGABYTE:.1f} GB are free; give modelCache a larger volume"
            )

    def tell(self, is_over: threading.Event) -> None:
        """Say how far the download is until it is over. A thread of its own."""
        while self.sizes and not is_over.wait(PROGRESS_SECONDS):
            log_progress("fetch", min(1.0, self.num_bytes_here / max(1, self.num_bytes)))


if __name__ == "__main__":
    sys.exit(main())
