import json
import threading
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from ssd import demo
from ssd.errors import TokenizerError
from ssd.text.detokenizer import IncrementalDetokenizer
from ssd.text.tokenizer import CONFIGS, HFTokenizer, load_tokenizer
from ssd.text.tokenizer_config import OPTIONAL_FILES

BEGIN, END = "<|begin|>", "<|end|>"


def library(*, merges: tuple[tuple[str, str], ...] = (("d", "e"), ("de", "f"))) -> LibraryTokenizer:
    """Byte-level BPE with a begin token that its post-processor puts first, as Llama's does."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    made = LibraryTokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([BEGIN, END])
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, made.token_to_id(BEGIN))]
    )
    return made


def write(folder: Path, made: LibraryTokenizer, **configs: object) -> Path:
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


PLAIN = HFTokenizer(library(), frozenset())
IDS = st.integers(0, PLAIN.vocab_size - 1)


def in_pieces(tokenizer: HFTokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> str:
    """The text of tokens that are decoded one by one, after the tokens ``before``."""
    detokenizer = IncrementalDetokenizer(tokenizer, before)
    return "".join([*(detokenizer.push([each]) for each in ids), detokenizer.finish()])


@pytest.fixture
def tokenizer(tmp_path: Path) -> HFTokenizer:
    return load_tokenizer(write(tmp_path / "model", library()))


def test_encoding_applies_merges_and_the_models_own_prefix_once(tokenizer: HFTokenizer) -> None:
    ids = tokenizer.encode("def")
    assert len(ids) == 2
    assert tokenizer.encode("") == ids[:1]
    assert tokenizer.encode("def", has_prefix=True) == ids[1:]


def test_other_threads_run_while_a_text_is_tokenised(tokenizer: HFTokenizer) -> None:
    text = "def f(x): return x\n" * 20_000
    is_inside = threading.Event()
    spent: list[float] = []

    def encode() -> None:
        is_inside.set()
        started = time.thread_time()
        tokenizer.encode(text)
        spent.append(time.thread_time() - started)

    thread = threading.Thread(target=encode)
    thread.start()
    is_inside.wait()
    started = time.thread_time()
    while thread.is_alive():
        pass
    # Processor time, which other processes do not take: about the same where the library lets this
    # thread run, a tenth where it holds the interpreter.
    assert time.thread_time() - started > 0.3 * spent[0]


def test_texts_are_neither_truncated_nor_padded(tmp_path: Path) -> None:
    made = library()
    made.enable_truncation(4)
    made.enable_padding(length=8)
    tokenizer = load_tokenizer(write(tmp_path / "model", made))
    for text in ("f", "f" * 20):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) == 1 + len(text)


def test_decoding_omits_special_tokens(tokenizer: HFTokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("def f"), tokenizer.vocab_size - 1]) == "def f"


def test_vocab_size_counts_added_tokens(tokenizer: HFTokenizer) -> None:
    assert tokenizer.vocab_size == 256 + 2 + 2


@given(st.text(max_size=30))
def test_text_decoded_in_pieces_equals_the_text(text: str) -> None:
    # Special tokens are not decoded.
    assume(BEGIN not in text and END not in text)
    ids = PLAIN.encode(text)
    assert PLAIN.decode(ids) == text
    assert in_pieces(PLAIN, ids) == text


@given(st.lists(IDS, max_size=60))
def test_pieces_of_any_ids_equal_the_text_decoded_at_once(ids: list[int]) -> None:
    assert in_pieces(PLAIN, ids) == PLAIN.decode(ids)


@given(before=st.lists(IDS, max_size=20), ids=st.lists(IDS, max_size=20))
def test_the_text_before_does_not_change_the_text_of_bytes(
    before: list[int], ids: list[int]
) -> None:
    found = in_pieces(PLAIN, ids, before)
    if not PLAIN.decode(before).endswith("\ufffd"):
        assert found == PLAIN.decode(ids)


def sentence_piece(decoder: decoders.Decoder) -> HFTokenizer:
    vocab = {"▁The": 0, "▁cat": 1, "▁sat": 2, "<s>": 3, "<0xC3>": 4, "<0xA9>": 5, "s": 6, "▁▁": 7}
    made = LibraryTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.add_special_tokens(["<s>"])
    made.decoder = decoder
    return HFTokenizer(made, frozenset())


LLAMA_2 = decoders.Sequence(
    [
        *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
        decoders.Strip(" ", 1, 0),
    ]
)
"""Removes the space at the start of a text."""


def byte_fallback() -> HFTokenizer:
    """The tokens of Llama 2 in small: special ones, all bytes, and pieces."""
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "é"]
    vocab = {token: index for index, token in enumerate(tokens)}
    made = LibraryTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.add_special_tokens(["<s>"])
    made.decoder = LLAMA_2
    return HFTokenizer(made, frozenset())


FALLBACK = byte_fallback()
BYTES_OF = st.text("aé각😀 ", max_size=6).map(lambda text: [1 + byte for byte in text.encode()])
PARTS = st.one_of(BYTES_OF, st.lists(st.integers(0, FALLBACK.vocab_size - 1), max_size=6))
"""Ids of whole characters in bytes, and any ids."""
SIZES = st.lists(st.integers(0, 7), max_size=40)


def in_messages(tokenizer: HFTokenizer, ids: Sequence[int], sizes: Sequence[int]) -> str:
    """The text of tokens that arrive in messages of these sizes, and the rest in one."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    ends = [0, *(end for end in accumulate(sizes) if end < len(ids)), len(ids)]
    pieces = [detokenizer.push(ids[first:end]) for first, end in pairwise(ends)]
    return "".join([*pieces, detokenizer.finish()])


@given(text=st.text("ab é각나다😀", max_size=40), sizes=SIZES)
@example("a " + "각나다라마바사아자차카타파하" * 3 + " b", [7] * 20)
def test_characters_in_bytes_survive_every_division_into_messages(
    text: str, sizes: list[int]
) -> None:
    ids = FALLBACK.encode(text)
    assert in_messages(FALLBACK, ids, sizes) == FALLBACK.decode(ids) == text.removeprefix(" ")


@given(parts=st.lists(PARTS, max_size=12), sizes=SIZES)
def test_malformed_bytes_are_the_same_text_in_every_division(
    parts: list[list[int]], sizes: list[int]
) -> None:
    ids = [each for part in parts for each in part]
    assert in_messages(FALLBACK, ids, sizes) == in_messages(FALLBACK, ids, [1] * len(ids))


def test_a_malformed_byte_does_not_change_the_characters_beside_it() -> None:
    ids = [1 + byte for byte in "각".encode() + b"\xff" + "나".encode() + b"\xea\xb0"]
    assert in_messages(FALLBACK, ids, []) == "각\ufffd나\ufffd"


@given(ids=st.lists(IDS, max_size=60), sizes=SIZES)
def test_byte_level_tokens_are_the_same_text_in_every_division(
    ids: list[int], sizes: list[int]
) -> None:
    assert in_messages(PLAIN, ids, sizes) == PLAIN.decode(ids)


def test_a_text_that_continues_another_keeps_its_first_space() -> None:
    tokenizer = sentence_piece(LLAMA_2)
    assert in_pieces(tokenizer, [1, 2], [3, 0]) == " cat sat"
    assert in_pieces(tokenizer, [1], [0, 3]) == " cat", "a special token has no text"
    assert in_pieces(tokenizer, [1, 2], [3]) == "cat sat", "nothing is before it"
    found = in_pieces(tokenizer, [5, 1], [0, 4])
    assert found == "\ufffd cat", "the character began in the text before"


@pytest.mark.parametrize(
    "decoder", [LLAMA_2, decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])]
)
def test_the_text_of_a_token_keeps_its_space(decoder: decoders.Decoder) -> None:
    tokenizer = sentence_piece(decoder)
    ids = [0, 1, 6, 7, 3, 2]
    assert tokenizer.decode(ids) == "The cats   sat"
    assert "".join(map(tokenizer.token_text, ids)) == " The cats   sat"
    assert [tokenizer.token_text(each) for each in (1, 3, 4)] == [" cat", "", "\ufffd"]


def test_texts_of_byte_level_tokens_are_their_own() -> None:
    ids = PLAIN.encode("def é")
    assert list(map(PLAIN.token_text, ids)) == ["", "def", " ", "\ufffd", "\ufffd"]


@given(text=st.text(max_size=20))
@example("é日😀")
def test_the_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    ids = PLAIN.encode(text)[1:]
    assert b"".join(map(PLAIN.token_bytes, ids)) == text.encode()


def test_only_special_tokens_have_names() -> None:
    ids = [*PLAIN.encode("d"), *range(PLAIN.vocab_size - 1, PLAIN.vocab_size + 1)]
    assert list(map(PLAIN.special_name, ids)) == [BEGIN, "", END, ""]


def test_a_token_of_byte_fallback_is_its_byte() -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"日": 256}
    made = LibraryTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.decoder = decoders.ByteFallback()
    tokenizer = HFTokenizer(made, frozenset())
    ids = tokenizer.encode("é日😀")
    assert len(ids) == 7
    assert b"".join(map(tokenizer.token_bytes, ids)) == "é日😀".encode()


def test_the_generation_config_and_the_tokenizer_name_the_ids_that_end_a_text(
    tmp_path: Path,
) -> None:
    folder = write(
        tmp_path / "model",
        library(),
        config={"eos_token_id": 6},
        generation_config={"eos_token_id": [7, 8]},
        tokenizer_config={"eos_token": {"content": END}},
    )
    end = library().token_to_id(END)
    assert load_tokenizer(folder).eos_token_ids == {7, 8, end}


@pytest.mark.parametrize("ids", [None, []])
def test_without_ids_in_the_generation_config_those_of_the_config_end_a_text(
    tmp_path: Path, ids: object
) -> None:
    configs = {"config": {"eos_token_id": 6}, "generation_config": {"eos_token_id": ids}}
    assert load_tokenizer(write(tmp_path / "model", library(), **configs)).eos_token_ids == {6}


NEW = "<|new|>"
NEW_ID = PLAIN.vocab_size
ADDED: dict[str, dict[str, dict[str, Any]]] = {
    "decoder": {"tokenizer_config": {"added_tokens_decoder": {str(NEW_ID): {"content": NEW}}}},
    "file": {"added_tokens": {NEW: NEW_ID}},
}
"""Both forms of a token that is not in ``tokenizer.json``."""


@pytest.mark.parametrize("form", ADDED)
def test_a_token_that_only_the_configuration_adds_is_one_token(tmp_path: Path, form: str) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "model", library(), **ADDED[form]))
    ids = tokenizer.encode(f"def{NEW}f", has_prefix=True)
    assert ids == [*PLAIN.encode("def", has_prefix=True), NEW_ID, *PLAIN.encode("f")[1:]]
    assert tokenizer.decode(ids) == f"def{NEW}f"
    assert tokenizer.special_name(NEW_ID) == ""
    assert tokenizer.vocab_size == PLAIN.vocab_size + 1
    assert tokenizer.fingerprint != PLAIN.fingerprint
    assert NEW in tokenizer.definition, "for grammars"


@pytest.mark.parametrize("form", ADDED)
def test_an_added_token_with_a_role_is_special(tmp_path: Path, form: str) -> None:
    folder = write(tmp_path / "model", library(), **ADDED[form])
    config = dict(ADDED[form].get("tokenizer_config", {}))
    write(folder, library(), tokenizer_config=config | {"eos_token": NEW})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_ids == {NEW_ID}
    assert tokenizer.special_name(NEW_ID) == NEW
    assert tokenizer.decode([NEW_ID]) == ""


def test_a_token_of_the_vocabulary_can_become_an_added_one(tmp_path: Path) -> None:
    made = library(merges=(("d", "e"), ("de", "f"), ("<", "x"), ("<x", ">")))
    number = made.token_to_id("<x>")
    assert number is not None
    decoder = {str(number): {"content": "<x>", "special": True}}
    folder = write(tmp_path / "model", made, tokenizer_config={"added_tokens_decoder": decoder})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_name(number) == "<x>"
    assert tokenizer.vocab_size == HFTokenizer(made, frozenset()).vocab_size


def test_older_files_do_not_count_beside_the_decoder_of_added_tokens(tmp_path: Path) -> None:
    decoder = ADDED["decoder"]["tokenizer_config"]
    folder = write(
        tmp_path / "model",
        library(),
        tokenizer_config=decoder,
        special_tokens_map={"eos_token": END},
        added_tokens={"<|older|>": NEW_ID + 1},
    )
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (NEW_ID + 1, frozenset())


@pytest.mark.parametrize("number", [NEW_ID + 1, 3])
def test_an_added_token_that_cannot_have_its_id_is_refused(tmp_path: Path, number: int) -> None:
    folder = write(tmp_path / "model", library(), added_tokens={NEW: number})
    with pytest.raises(TokenizerError, match=rf"added token '<\|new\|>' has id {number} in"):
        load_tokenizer(folder)


@pytest.mark.parametrize("form", ADDED)
def test_a_token_without_an_embedding_is_not_added(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As ``<pad>``, id 32000, of copies of Llama 2, whose draft has no such file."""
    target = write(tmp_path / "target", library(), config={"vocab_size": NEW_ID}, **ADDED[form])
    draft = write(tmp_path / "draft", library(), config={"vocab_size": NEW_ID})
    assert load_tokenizer(target).fingerprint == load_tokenizer(draft).fingerprint
    assert "added_token_without_embedding" in caplog.text
    write(target, library(), config={"vocab_size": NEW_ID + 1})
    assert load_tokenizer(target).vocab_size == NEW_ID + 1


@pytest.mark.parametrize("form", ADDED)
def test_an_added_token_keeps_its_id_of_the_tokenizer(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = library()
    made.add_tokens([NEW])
    number = NEW_ID + 5
    contents: dict[str, dict[str, Any]] = {
        "decoder": {"tokenizer_config": {"added_tokens_decoder": {str(number): {"content": NEW}}}},
        "file": {"added_tokens": {NEW: number}},
    }
    folder = write(tmp_path / "model", made, config={"vocab_size": number}, **contents[form])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(NEW, has_prefix=True) == [NEW_ID]
    assert tokenizer.vocab_size == NEW_ID + 1
    assert "added_token_has_other_id" in caplog.text


@pytest.mark.parametrize("special", ["tokenizer", "decoder"])
def test_an_added_token_that_is_special_in_one_file_is_special(
    tmp_path: Path, special: str
) -> None:
    made = library()
    made.add_tokens([AddedToken(NEW, special=special == "tokenizer")])
    decoder = {str(NEW_ID): {"content": NEW, "special": special == "decoder", "lstrip": True}}
    folder = write(tmp_path / "model", made, tokenizer_config={"added_tokens_decoder": decoder})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([NEW_ID]) == ""
    assert tokenizer.special_name(NEW_ID) == NEW
    assert tokenizer.encode(f" {NEW}", has_prefix=True) == [NEW_ID], "its blank is in it"


def test_the_older_file_of_added_tokens_changes_no_flags(tmp_path: Path) -> None:
    made = library()
    made.add_tokens([AddedToken(NEW, special=True, lstrip=True)])
    tokenizer = load_tokenizer(write(tmp_path / "model", made, added_tokens={NEW: NEW_ID}))
    assert tokenizer.encode(f"d {NEW}", has_prefix=True)[1:] == [NEW_ID], "its blank is in it"
    assert tokenizer.special_name(NEW_ID) == NEW


@pytest.mark.parametrize("content", [{"eos_token": "<x>"}, {"additional_special_tokens": ["<x>"]}])
def test_a_plain_token_of_the_vocabulary_with_a_role_is_special(
    tmp_path: Path, content: dict[str, object]
) -> None:
    made = library(merges=(("d", "e"), ("de", "f"), ("<", "x"), ("<x", ">")))
    number = made.token_to_id("<x>")
    assert number is not None
    folder = write(tmp_path / "model", made, tokenizer_config=content)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_name(number) == "<x>"
    assert tokenizer.decode([number]) == ""
    assert tokenizer.vocab_size == HFTokenizer(made, frozenset()).vocab_size


def test_a_role_without_an_id_adds_no_token(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", library(), tokenizer_config={"pad_token": "[PAD]"})
    assert load_tokenizer(folder).fingerprint == PLAIN.fingerprint


def test_malformed_special_tokens_are_an_error_that_names_the_folder(tmp_path: Path) -> None:
    content = {"additional_special_tokens": 3}
    folder = write(tmp_path / "model", library(), tokenizer_config=content)
    with pytest.raises(TokenizerError, match=r"/model: additional_special_tokens must be a list"):
        load_tokenizer(folder)


MALFORMED: tuple[object, ...] = (
    *(3, {"1": 2}, {"1": {}}, {"1": {"content": 3}}, {"x": {"content": "a"}}),
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("tokenizer_config", {"added_tokens_decoder": decoder}) for decoder in MALFORMED),
        *(("added_tokens", {"a": number}) for number in ("1", None, 1.5)),
    ],
)
def test_malformed_added_tokens_are_an_error_that_names_the_file(
    tmp_path: Path, name: str, content: object
) -> None:
    folder = write(tmp_path / "model", library(), **{name: content})
    with pytest.raises(TokenizerError, match=rf"/{name}\.json: malformed added tokens"):
        load_tokenizer(folder)


def test_the_end_of_a_text_can_be_in_the_older_map_of_special_tokens(tmp_path: Path) -> None:
    older = {"eos_token": {"content": END}}
    folder = write(tmp_path / "model", library(), special_tokens_map=older)
    assert load_tokenizer(folder).eos_token_ids == {library().token_to_id(END)}
    for token in (BEGIN, None):
        write(folder, library(), tokenizer_config={"eos_token": token})
        assert load_tokenizer(folder).eos_token_ids == {library().token_to_id(END)}
    write(folder, library(), tokenizer_config={"eos_token": BEGIN, "added_tokens_decoder": {}})
    assert load_tokenizer(folder).eos_token_ids == {library().token_to_id(BEGIN)}


def test_without_such_files_no_id_ends_a_text(tokenizer: HFTokenizer) -> None:
    assert tokenizer.eos_token_ids == frozenset()


def test_the_fingerprint_depends_only_on_tokens_and_special_ids(tmp_path: Path) -> None:
    other_merges = library(merges=(("d", "e"), ("de", "g")))
    more_special = library()
    more_special.add_special_tokens([AddedToken("def", special=True)])
    same = load_tokenizer(write(tmp_path / "b", library(), config={"eos_token_id": 3}))
    prints = [
        load_tokenizer(write(tmp_path / name, made)).fingerprint
        for name, made in [("a", library()), ("c", other_merges), ("d", more_special)]
    ]
    assert len(set(prints)) == 3
    assert same.fingerprint == prints[0]
    assert len(prints[0]) == 64


def test_the_tokenizer_of_the_embedded_pair_preserves_every_text() -> None:
    target, draft = (load_tokenizer(demo.folder(name)) for name in ("target", "draft"))
    assert target.fingerprint == draft.fingerprint
    assert target.eos_token_ids
    text = "def fib(n):\n\treturn 'Grüße 😀 日本語'\n"
    assert target.decode(target.encode(text)) == text


def test_a_missing_tokenizer_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=f"{tmp_path}.*tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"version": "1.0"}'])
def test_a_corrupt_tokenizer_is_an_error_that_names_the_file(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", [*CONFIGS, *OPTIONAL_FILES])
def test_a_corrupt_config_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    write(tmp_path, library())
    (tmp_path / name).write_bytes(b'{"eos_token_id": \xff')
    with pytest.raises(TokenizerError, match=rf"/{name}: not JSON"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("ids", ["2", [2, None], {"a": 1}, 2.5, [True], [[2]]])
def test_malformed_ids_of_the_end_are_an_error_that_names_the_file(
    tmp_path: Path, ids: object
) -> None:
    write(tmp_path, library())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(TokenizerError, match=r"/generation_config\.json: eos_token_id must be"):
        load_tokenizer(tmp_path)
