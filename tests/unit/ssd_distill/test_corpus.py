import json
from pathlib import Path

import pytest
import torch

from ssd.demo import folder
from ssd.demo.corpus import held_out_modules
from ssd.errors import SettingsError
from ssd.testing.tiny_folder import write_byte_tokenizer
from ssd.text.tokenizer import HFTokenizer, load_tokenizer
from ssd_distill import corpus
from ssd_distill.corpus import DEMO, Corpus, read_corpus


@pytest.fixture
def tokenizer(tmp_path: Path) -> HFTokenizer:
    place = tmp_path / "tokenizer"
    place.mkdir()
    write_byte_tokenizer(place)
    (place / "config.json").write_text('{"eos_token_id": 256}')
    return load_tokenizer(place)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    place = tmp_path / "text"
    place.mkdir()
    return place


def read(
    tokenizer: HFTokenizer,
    *sources: object,
    most_tokens: int = 1 << 20,
    seed: int = 1,
    num_token_ids: int | None = None,
) -> Corpus:
    return read_corpus(
        [str(source) for source in sources],
        tokenizer,
        num_token_ids=num_token_ids or tokenizer.vocab_size,
        length=4,
        most_tokens=most_tokens,
        seed=seed,
    )


def documents(tokenizer: HFTokenizer, found: Corpus) -> list[str]:
    ids = torch.cat((found.train_S, found.held_out_S)).tolist()
    texts: list[list[int]] = []
    for token in ids:
        if token == 256:
            texts.append([])
        else:
            texts[-1].append(token)
    return [tokenizer.decode(each) for each in texts]


def test_a_folder_has_the_texts_of_files_and_of_json_lines(
    tokenizer: HFTokenizer, text: Path
) -> None:
    (text / "one.txt").write_text("a" * 60)
    (text / "below").mkdir()
    rows: list[dict[str, object]] = [{"text": "b" * 60, "prompt": 1}, {"prompt": "c" * 60}]
    (text / "below" / "two.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (text / "image.png").write_bytes(b"\x89PNG\xff")
    (text / ".hidden").write_text("d" * 60)
    found = read(tokenizer, text)
    assert sorted(documents(tokenizer, found)) == ["a" * 60, "b" * 60, "c" * 60]
    assert len(found.held_out_S) == 3 * 61 // 20


def test_the_same_seed_has_the_same_order_and_no_more_than_needed_is_read(
    tokenizer: HFTokenizer, text: Path
) -> None:
    for number in range(10, 40):
        (text / f"{number}.txt").write_text(f"{number}" * 10)
    whole = documents(tokenizer, read(tokenizer, text))
    assert documents(tokenizer, read(tokenizer, text)) == whole
    assert whole != sorted(whole)
    assert documents(tokenizer, read(tokenizer, text, most_tokens=150)) == whole[:8]


def test_rows_of_json_lines_are_in_an_order_of_the_seed(tokenizer: HFTokenizer, text: Path) -> None:
    texts = [f"{number}" * 10 for number in range(10, 50)]
    rows = (json.dumps({"text": each}) for each in texts)
    (text / "rows.jsonl").write_text("\n\n".join(rows))
    orders = [documents(tokenizer, read(tokenizer, text, seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert texts not in orders
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == texts


def test_a_file_that_is_named_twice_is_read_once(tokenizer: HFTokenizer, text: Path) -> None:
    (text / "one.txt").write_text("a" * 200)
    (text / "two.txt").write_text("b" * 200)
    found = documents(tokenizer, read(tokenizer, text, text / "one.txt", text / ".." / "text"))
    assert sorted(found) == ["a" * 200, "b" * 200]


def test_no_more_of_a_large_file_than_needed_is_read(
    tokenizer: HFTokenizer, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE_CHARS", 64)
    lines = [f"line {number:04}\n" for number in range(400)]
    (text / "large.txt").write_text("".join(lines))
    pieces = documents(tokenizer, read(tokenizer, text, most_tokens=200))
    assert 200 <= len("".join(pieces)) < 400
    assert all(piece.endswith("\n") for piece in pieces)
    assert "".join(documents(tokenizer, read(tokenizer, text))) == "".join(lines)


def test_a_token_without_an_embedding_is_refused(tokenizer: HFTokenizer, text: Path) -> None:
    (text / "one.txt").write_text("a" * 200)
    with pytest.raises(SettingsError, match="has token 64, and the models have embeddings of 60"):
        read(tokenizer, text, num_token_ids=60)


@pytest.mark.parametrize("ends", [-1, 300, [-1, 256]])
def test_an_end_of_text_that_is_no_token_is_not_in_the_text(
    text: Path, tokenizer: HFTokenizer, tmp_path: Path, ends: object
) -> None:
    place = tmp_path / "tokenizer"
    (place / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    for name in "abc":
        (text / f"{name}.txt").write_text(name * 60)
    found = read(load_tokenizer(place), text)
    ids = set(torch.cat((found.train_S, found.held_out_S)).tolist())
    assert ids - set(tokenizer.encode("abc")) == ({256} if ends == [-1, 256] else set())


def test_a_training_of_few_tokens_has_enough_text_to_hold_out(
    tokenizer: HFTokenizer, text: Path
) -> None:
    for number in range(10, 40):
        (text / f"{number}.txt").write_text(f"{number}" * 10)
    assert len(read(tokenizer, text, most_tokens=1).held_out_S) > 4


def test_the_corpus_of_the_embedded_pair_holds_its_own_modules_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, *_ = held_out_modules()
    monkeypatch.setattr(corpus, "training_modules", lambda: [first])
    monkeypatch.setattr(corpus, "held_out_modules", lambda: [second])
    tokenizer = load_tokenizer(folder("target"))
    found = read(tokenizer, DEMO)
    for stream_S, module in ((found.train_S, first), (found.held_out_S, second)):
        assert stream_S.tolist() == [0, *tokenizer.encode(module.text)]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("none", None, "there is no such file or folder"),
        ("short.txt", b"ab", r"has 3 tokens, and --length 4 needs at least 100: add text"),
        ("binary.txt", b"\xff\xfe", "not UTF-8 text; convert it"),
        ("rows.jsonl", b'{"text": "a"}\n{"body": "b"}', r"rows\.jsonl:2: needs a string in one of"),
        ("rows.jsonl", b"{", r"rows\.jsonl:1: not JSON"),
        ("rows.jsonl", b'{"text": "a"}\n"caf\xe9"', r"rows\.jsonl:2: not JSON: 'utf-8' codec"),
        pytest.param("rows.jsonl", b"[" * 100_000, "not JSON: maximum recursion", id="deep"),
        ("rows.jsonl", b'{"text": "\\ud800"}', r"rows\.jsonl:1: no text: .* surrogates not"),
        ("rows.jsonl", b"3", r"rows\.jsonl:1: needs a string in one of"),
    ],
)
def test_what_is_not_text_is_refused_with_its_place(
    tokenizer: HFTokenizer, text: Path, name: str, content: bytes | None, problem: str
) -> None:
    if content is not None:
        (text / name).write_bytes(content)
    with pytest.raises(SettingsError, match=problem):
        read(tokenizer, text / name)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.jsonl", b'{"text": "a"}\n' * 40 + b"\xff\n", r"rows\.jsonl:41: not JSON"),
        ("large.txt", b"a\n" * 10_000 + b"\xff", r"large\.txt: not UTF-8 text; convert it"),
    ],
)
def test_a_file_of_a_folder_is_not_read_in_part(
    tokenizer: HFTokenizer,
    text: Path,
    name: str,
    content: bytes,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpus, "PIECE_CHARS", 64)
    (text / name).write_bytes(content)
    with pytest.raises(SettingsError, match=problem):
        read(tokenizer, text)


def test_the_embedded_corpus_stands_alone(tokenizer: HFTokenizer, text: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be combined"):
        read(tokenizer, DEMO, text)
