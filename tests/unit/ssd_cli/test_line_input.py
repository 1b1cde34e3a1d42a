"""Lines of a conversation: from a pipe, or typed at a terminal."""

import asyncio
import os
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from ssd.errors import RequestError
from ssd_cli import line_input
from ssd_cli.line_input import HISTORY, PipedLines, TerminalLines, open_lines

MAX_SECONDS = 60.0


async def lines_of(*blocks: bytes) -> list[str]:
    reading, writing = os.pipe()
    for block in blocks:
        os.write(writing, block)
    os.close(writing)
    lines = open_lines(reading)
    assert isinstance(lines, PipedLines)
    found = []
    try:
        while (line := await lines.read()) is not None:
            found.append(line)
    finally:
        os.close(reading)
    return found


async def test_piped_lines_end_with_the_input() -> None:
    assert await lines_of(b"a\nGr\xc3\xbc", b"\xc3\x9fe\r\n\nlast") == ["a", "Grüße", "", "last"]
    assert await lines_of() == []


async def test_piped_input_that_is_no_text_or_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RequestError, match="not UTF-8"):
        await lines_of(b"\xff\n")
    monkeypatch.setattr(line_input, "MAX_LINE_BYTES", 10)
    with pytest.raises(RequestError, match="more than 10 bytes"):
        await lines_of(b"x" * 11)


async def typed(home: Path | None, *keys: str) -> list[str]:
    """Lines of a person who types these keys, up to the end of the input."""

    def make(source: PipeInput) -> TerminalLines:
        source.send_text("".join(keys))
        return TerminalLines(home)

    with create_pipe_input() as source, create_app_session(source, DummyOutput()):
        lines, found = make(source), []
        async with asyncio.timeout(MAX_SECONDS):
            while (line := await lines.read()) is not None:
                found.append(line)
        return found


async def test_a_line_is_edited_and_ctrl_c_clears_it_and_ctrl_d_ends(tmp_path: Path) -> None:
    assert await typed(tmp_path, "helpo\x7f\x1b[D\x01>\r", "wrong\x03", "next\r", "\x04") == [
        ">help",
        "next",
    ]


async def test_history_is_kept_for_the_next_program_and_only_for_its_owner(tmp_path: Path) -> None:
    await typed(tmp_path, "first\r", "\x04")
    assert (tmp_path / HISTORY).stat().st_mode & 0o777 == 0o600
    assert await typed(tmp_path, "\x1b[A\r", "\x04") == ["first"]


async def test_a_user_without_a_home_types_lines() -> None:
    assert await typed(None, "a\r", "b\r", "\x04") == ["a", "b"]


def test_a_terminal_of_a_user_without_a_home_has_no_history_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    reading, writing = os.openpty()
    with create_pipe_input() as source, create_app_session(source, DummyOutput()):
        assert open_lines(writing).is_terminal
    os.close(reading)
    os.close(writing)


async def test_a_home_that_cannot_be_written_costs_only_the_history(tmp_path: Path) -> None:
    (tmp_path / ".local").write_text("a file, not a folder")
    assert await typed(tmp_path, "first\r", "second\r", "\x04") == ["first", "second"]
