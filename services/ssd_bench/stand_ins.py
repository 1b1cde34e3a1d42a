"""``ssd bench data``: files that stand in for the four data sets of the SSD paper.

Their text is that of the running Python (PSF-2.0): held-out source code, docstrings and the
language reference. The same Python writes the same files.
"""

import ast
import inspect
import json
import math
import random
import re
import statistics
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from ssd.demo.corpus import held_out_modules
from ssd_bench.command import Debug, err

COUNT = 128
"""Prompts of a file, as in the paper."""
_CHAT = (
    "What does {name} of Python's module {module} do? Explain it to a beginner.",
    "Write a short program that uses {module}.{name}, and explain each line.",
    'I read this about {module}.{name}: "{doc}" What does it mean?',
    "When would you use {module}.{name}, and what are the alternatives?",
)
_SUMMARY_CHARS = 1_200
_SENTENCE = re.compile(r"(.+?\.)(\s|$)", re.DOTALL)


def data(
    output: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("data"),
    debug: Debug = False,  # noqa: ARG001, FBT002 - read by ``run_app``
) -> None:
    """Write code.jsonl, chat.jsonl, maths.jsonl and summaries.jsonl for --data; no download."""
    output.mkdir(parents=True, exist_ok=True)
    kinds = {"code": _code(), "chat": _chat(), "maths": _maths(), "summaries": _summaries()}
    for name, texts in kinds.items():
        lines = [json.dumps({"text": text}) for text in islice(texts, COUNT)]
        (output / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    err.print(f"written to {output}: {', '.join(f'{name}.jsonl' for name in kinds)}")


def _functions() -> Iterator[tuple[str, str, ast.FunctionDef, str]]:
    """Yield functions with their docstrings, after source and name of the module."""
    for module in held_out_modules():
        name = ".".join(module.path.with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                yield module.text, name, node, doc


def _code() -> Iterator[str]:
    """Yield signatures with docstrings, to be completed, as in HumanEval."""
    for source, _, node, _ in _functions():
        lines = source.splitlines()[node.lineno - 1 : node.body[0].end_lineno]
        yield inspect.cleandoc("\n" + "\n".join(lines)) + "\n"


def _chat() -> Iterator[str]:
    public = (function for function in _functions() if not function[2].name.startswith("_"))
    for index, (_, module, node, doc) in enumerate(public):
        first = " ".join(doc.split("\n\n")[0].split())
        yield _CHAT[index % len(_CHAT)].format(name=node.name, module=module, doc=first)


def _maths() -> Iterator[str]:
    """Yield questions about functions of numbers, with numbers that a fixed seed selects."""
    rng = random.Random(0)  # noqa: S311 - no secret
    functions = [
        (module.__name__, name, " ".join(doc.split()))
        for module, name, doc in (*_documented(math), *_documented(statistics))
    ]
    for _, (module, name, doc) in product(range(COUNT), functions):
        numbers = ", ".join(str(rng.randint(2, 60)) for _ in range(4))
        yield f"{module}.{name}: {doc}\n\nApply it to {numbers}, and show each step."


def _summaries() -> Iterator[str]:
    # Half a megabyte, which only this function needs.
    from pydoc_data.topics import topics  # noqa: PLC0415

    for _, text in sorted(topics.items()):
        for start in range(0, len(text), _SUMMARY_CHARS):
            part = text[start : start + _SUMMARY_CHARS]
            if len(part) == _SUMMARY_CHARS:
                yield f"Summarise this text in two sentences.\n\n{part}\n\nSummary:"


def _documented(module: ModuleType) -> Iterator[tuple[ModuleType, str, str]]:
    """Yield the public functions of a module with the first sentence of their docstrings."""
    for name, member in sorted(vars(module).items()):
        sentence = _SENTENCE.match(member.__doc__ or "") if callable(member) else None
        if sentence is not None and not name.startswith("_") and not inspect.isclass(member):
            yield module, name, sentence[1]
