"""Grammars are compiled in a thread, with bounds and a deadline."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from ssd import demo
from ssd.errors import FieldError, OverloadedError
from ssd.text.grammar import Grammar, GrammarCompiler, GrammarSource
from ssd.text.tokenizer import load_tokenizer
from ssd_target.serving import grammars
from ssd_target.serving.grammars import Grammars

SOURCES = [GrammarSource("regex", text) for text in ("a", "b", "c")]


@pytest.fixture
def some() -> Grammars:
    return Grammars(load_tokenizer(demo.folder("target")))


@pytest.fixture
def may_go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compiling waits for it."""
    event, compile_now = threading.Event(), GrammarCompiler.compile

    def compile_later(compiler: GrammarCompiler, source: GrammarSource) -> Grammar:
        assert event.wait(60)
        return compile_now(compiler, source)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_later)
    yield event
    event.set()


async def test_a_grammar_is_compiled_once(some: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await some.grammar(SOURCES[0])
    monkeypatch.setattr(GrammarCompiler, "compile", None)
    second = await some.grammar(SOURCES[0])
    assert second is not first, "each text has its own position"


async def test_a_grammar_that_takes_too_long_is_refused(
    some: Grammars, may_go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.01)
    with pytest.raises(FieldError, match=r"sampling.regex: takes more than 0.01 s") as caught:
        await some.grammar(SOURCES[0])
    assert caught.value.field == "sampling.regex"
    with pytest.raises(OverloadedError, match="other grammars"):
        await some.grammar(SOURCES[1])
    may_go_on.set()
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 60.0)
    await some.grammar(SOURCES[1])
    assert some._compiler.cached(SOURCES[0]) is not None, "it was compiled nevertheless"


async def test_only_some_grammars_wait(
    some: Grammars, may_go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 1)
    running = asyncio.create_task(some.grammar(SOURCES[0]))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(some.grammar(SOURCES[1]))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="1 grammars are being compiled"):
        await some.grammar(SOURCES[2])
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    may_go_on.set()
    await running
    await some.grammar(SOURCES[2])
