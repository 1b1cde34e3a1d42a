from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tools.distill.vocabulary import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    save_tokenizer,
    train_tokenizer,
)

from ssd.demo import folder
from ssd.text.tokenizer import load_tokenizer

PACKAGED = Tokenizer.from_file(str(folder("target") / "tokenizer.json"))


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


def test_a_saved_tokenizer_reads_the_same_and_knows_the_end_of_text(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 3, vocab_size=270)
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.eos_token_ids == {END_OF_TEXT_ID}
    assert again.encode("a = 1\n") == tokenizer.encode("a = 1\n").ids
