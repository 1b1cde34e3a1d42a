from pathlib import Path

from tools.distill.vocabulary import (
    END_OF_TEXT_ID,
    save_tokenizer,
    train_tokenizer,
)

from ssd.text.tokenizer import load_tokenizer


def test_a_saved_tokenizer_reads_the_same_and_knows_the_end_of_text(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 3, vocab_size=270)
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.eos_token_ids == {END_OF_TEXT_ID}
    assert again.encode("a = 1\n") == tokenizer.encode("a = 1\n").ids
