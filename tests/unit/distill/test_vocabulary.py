from pathlib import Path, PurePosixPath

from hypothesis import given
from hypothesis import strategies as st
from tools.distill.model import END_OF_TEXT, END_OF_TEXT_ID
from tools.distill.vocabulary import (
    encode_modules,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

from ssd.demo import folder
from ssd.demo.corpus import Module

PACKAGED = load_tokenizer(folder("target"))


@given(st.text().filter(lambda text: END_OF_TEXT not in text))
def test_any_text_survives_a_round_trip(text: str) -> None:
    ids = PACKAGED.encode(text).ids
    assert PACKAGED.decode(ids, skip_special_tokens=False) == text
    assert END_OF_TEXT_ID not in ids


def test_the_vocabulary_has_4096_entries_and_no_token_is_added() -> None:
    assert PACKAGED.get_vocab_size() == 4096
    assert PACKAGED.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID == 0
    assert PACKAGED.encode("").ids == []


def test_indentation_costs_one_token() -> None:
    assert len(PACKAGED.encode("\n            return").ids) == 2


def test_a_saved_tokenizer_reads_the_same_and_documents_are_separated(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 3, vocab_size=270)
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    modules = [Module(PurePosixPath(name), f"{name} = 1\n") for name in ("a", "b")]
    stream_S = encode_modules(again, modules)
    assert stream_S.tolist() == [
        END_OF_TEXT_ID,
        *tokenizer.encode("a = 1\n").ids,
        END_OF_TEXT_ID,
        *tokenizer.encode("b = 1\n").ids,
    ]
