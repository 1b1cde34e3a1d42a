"""Environments of peers: when they are built, and when they are used as they are."""

import fcntl
from pathlib import Path

import pytest

from ssd.errors import SetupError
from ssd_bench.peers import environments
from ssd_bench.peers.environments import interpreter


class Commands:
    """In place of venv and pip: records the commands, and fails at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.lines: list[str] = []
        self.failing = "nothing"
        self.were_alone: list[bool] = []
        self._folder = folder
        monkeypatch.setattr(environments, "_run", self._run)

    def _run(self, *command: str) -> None:
        self.lines.append(" ".join(command))
        for file in self._folder.glob("*.lock"):
            with file.open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.were_alone.append(True)
                else:
                    self.were_alone.append(False)
        if self.failing in self.lines[-1]:
            raise SetupError(self.failing)

    def taken(self) -> list[str]:
        """Return the commands since the last call."""
        lines, self.lines = self.lines, []
        return lines


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of this product's code."""
    file = tmp_path / "ssd_vllm" / "proposer.py"
    file.parent.mkdir()
    file.write_text("K = 6")
    monkeypatch.setattr(environments, "PACKAGES", (file.parent,))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of the environments, which does not exist yet."""
    return tmp_path / "cache" / "peers"


@pytest.fixture
def commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(monkeypatch, folder)


def build(peer: str, folder: Path) -> None:
    """Build an environment, whose folder pip and venv would make."""
    (folder / peer).mkdir(parents=True, exist_ok=True)
    assert interpreter(peer, folder) == folder / peer / "bin" / "python"


def test_an_environment_is_built_once(folder: Path, code: Path, commands: Commands) -> None:
    build("vllm", folder)
    assert commands.taken()[0].endswith(f"-m venv --clear {folder / 'vllm'}")
    code.touch()
    build("vllm", folder)
    assert commands.taken() == []


def test_changed_code_of_the_plugin_is_installed_again(
    folder: Path, code: Path, commands: Commands
) -> None:
    build("vllm", folder)
    build("guidellm", folder)
    commands.taken()
    code.write_text("K = 7")
    build("guidellm", folder)
    assert commands.taken() == [], "the plugin is in the environment of vLLM alone"
    build("vllm", folder)
    (line,) = commands.taken()
    assert line.endswith(f"install -q {environments.plugin()}")
    build("vllm", folder)
    assert commands.taken() == []


def test_changed_requirements_are_installed_again(
    folder: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("guidellm", folder)
    commands.taken()
    monkeypatch.setitem(environments.REQUIREMENTS, "guidellm", ("guidellm==0.9",))
    build("guidellm", folder)
    first, last = commands.taken()
    assert "-m venv --clear" in first
    assert last.endswith("install -q guidellm==0.9")


def test_an_environment_of_an_earlier_version_is_installed_again(
    folder: Path, commands: Commands
) -> None:
    (folder / "guidellm").mkdir(parents=True)
    (folder / "guidellm" / "installed").touch()
    build("guidellm", folder)
    assert commands.taken()


def test_an_installation_that_fails_is_not_complete(
    folder: Path, code: Path, commands: Commands
) -> None:
    build("vllm", folder)
    code.write_text("K = 7")
    commands.failing = "install -q"
    with pytest.raises(SetupError):
        build("vllm", folder)
    code.write_text("K = 6")
    commands.failing = "nothing"
    commands.taken()
    build("vllm", folder)
    assert commands.taken()


def test_two_processes_do_not_build_one_environment_at_once(
    folder: Path, commands: Commands
) -> None:
    build("guidellm", folder)
    assert commands.were_alone
    assert all(commands.were_alone)


def test_a_peer_without_requirements_has_the_interpreter_of_the_command(folder: Path) -> None:
    assert interpreter("transformers", folder).exists()
    assert not folder.exists()
