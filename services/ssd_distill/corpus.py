"""Text to train on, as token ids: files, folders, or the source of Python's standard library."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ssd.demo.corpus import held_out_modules, training_modules
from ssd.errors import SettingsError
from ssd.ports import Tokenizer
from ssd_bench.prompts import row_text

DEMO = "demo://corpus"
"""Name of the standard library's source. Its held-out modules are those of the embedded pair."""
HELD_OUT_PART = 20
"""One token in so many is held out: those at the end of the shuffled documents."""
PIECE_CHARS = 1 << 20
"""A longer text is read in pieces that end with a line: a part of a large file can be enough."""
FIELDS = ("text", "prompt")
"""Fields of a JSON line that contain its text; the first one that exists is used."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids, int64 each."""

    train_S: Tensor
    held_out_S: Tensor


def read_corpus(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    *,
    num_token_ids: int,
    length: int,
    most_tokens: int,
    seed: int,
) -> Corpus:
    """Read and tokenize text; documents are in an order of the seed, with an end of text between.

    Args:
        sources: files, folders, or ``DEMO`` alone.
        tokenizer: of both models.
        num_token_ids: ids from this one on have no embedding.
        length: tokens of a sequence in training; both parts are longer than that.
        most_tokens: enough for the training; further documents are not read.
        seed: of the order.

    Raises:
        SettingsError: there is no such file, a file has no text, all text is too short, or it has
            a token without an embedding.
    """
    if DEMO in sources:
        if len(sources) > 1:
            raise SettingsError(f"--data {DEMO} cannot be combined with other text")
        parts = [
            _encoded((module.text for module in modules), tokenizer, num_token_ids)
            for modules in (training_modules(), held_out_modules())
        ]
        return Corpus(*parts)
    order = random.Random(seed)  # noqa: S311 - an order, not a secret
    found = {
        file.resolve(): (file, is_named) for each in sources for file, is_named in _files(each)
    }
    files = list(found.values())
    order.shuffle(files)
    texts = (text for file, is_named in files for text in _texts(file, order, is_named=is_named))
    # The held-out part must be longer than one sequence, also for a training of few tokens.
    most_tokens = max(most_tokens, HELD_OUT_PART * (length + 1))
    stream_S = _encoded(texts, tokenizer, num_token_ids, most_tokens)
    num_held_out = len(stream_S) // HELD_OUT_PART
    if num_held_out <= length:
        raise SettingsError(
            f"--data has {len(stream_S):,} tokens, and --length {length} needs at least "
            f"{HELD_OUT_PART * (length + 1):,}: add text, or lower --length"
        )
    return Corpus(stream_S[:-num_held_out], stream_S[-num_held_out:])


def _encoded(
    texts: Iterable[str], tokenizer: Tokenizer, num_token_ids: int, most_tokens: int | None = None
) -> Tensor:
    # A configuration can name ids that are no tokens, such as -1.
    end = sorted(tokenizer.eos_token_ids.intersection(range(num_token_ids)))[:1]
    ids: list[int] = []
    for text in texts:
        new = [*end, *tokenizer.encode(text)]
        if (largest := max(new, default=0)) >= num_token_ids:
            raise SettingsError(
                f"--data: a text has token {largest}, and the models have embeddings of "
                f"{num_token_ids} tokens; remove the text, or resize the embeddings"
            )
        ids += new
        if most_tokens is not None and len(ids) >= most_tokens:
            break
    return torch.tensor(ids, dtype=torch.int64)


def _files(source: str) -> Iterator[tuple[Path, bool]]:
    """Yield files, and whether the user named them."""
    path = Path(source)
    if path.is_file():
        yield path, True
        return
    if not path.is_dir():
        raise SettingsError(
            f"--data {source}: there is no such file or folder; use text, JSON lines or {DEMO}"
        )
    for file in sorted(path.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not is_hidden:
            yield file, False


def _texts(file: Path, order: random.Random, *, is_named: bool) -> Iterator[str]:
    """Yield the texts of a file; other files than text are left out unless the user named them.

    A file that begins with text is text.
    """
    if file.suffix == ".jsonl":
        for number, line in _rows(file, order):
            yield row_text(line, f"--data {file}:{number}", FIELDS)
        return
    piece = ""
    try:
        with file.open(encoding="utf-8") as lines:
            while piece := lines.read(PIECE_CHARS):
                yield piece + lines.readline()
    except UnicodeDecodeError:
        if is_named or piece:
            raise SettingsError(f"--data {file}: not UTF-8 text; convert it") from None


def _rows(file: Path, order: random.Random) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, without blank ones, in a random order."""
    places: list[tuple[int, int]] = []
    with file.open("rb") as lines:
        place = 0
        for number, line in enumerate(lines, 1):
            if line.strip():
                places.append((number, place))
            place += len(line)
        order.shuffle(places)
        for number, place in places:
            lines.seek(place)
            yield number, lines.readline()
