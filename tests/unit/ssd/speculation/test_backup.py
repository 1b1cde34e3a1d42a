from hypothesis import given
from hypothesis import strategies as st

from ssd.speculation.backup import (
    LONG_MATCH_TOKENS,
    MAX_SUFFIX_TOKENS,
    WINDOW_TOKENS,
    BackupProposal,
    propose_ngram,
)


def test_by_default_two_tokens_must_match() -> None:
    assert propose_ngram([1, 2, 3, 1], 2) == BackupProposal()
    assert propose_ngram([1, 2, 3, 4, 5, 9, 1, 2], 3).tokens == (3, 4, 5)


def test_tokens_before_the_window_are_not_searched() -> None:
    filler = list(range(100, 100 + WINDOW_TOKENS))
    assert propose_ngram([1, 2, 3, *filler, 1, 2], 1) == BackupProposal()


def test_a_text_repeats_itself_if_many_tokens_match() -> None:
    for num_same in range(2, 20):
        same = list(range(num_same))
        found = propose_ngram([*same, 97, 98, *same], 1)
        assert found == BackupProposal((97,), num_same >= LONG_MATCH_TOKENS)


def reference(tokens: list[int], max_tokens: int, min_suffix: int) -> tuple[int, ...]:
    """Return the proposal of a search that compares one token at a time."""
    best, length_of_best = None, min_suffix - 1
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and length < MAX_SUFFIX_TOKENS:
            if tokens[end - length] != tokens[-1 - length]:
                break
            length += 1
        if length >= min_suffix and length >= length_of_best:
            best, length_of_best = end, length
    if best is None:
        return ()
    text = list(tokens)
    for _ in range(max_tokens):
        text.append(text[best + 1 + len(text) - len(tokens)])
    return tuple(text[len(tokens) :])


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 6), st.integers(1, 3))
def test_the_proposal_equals_that_of_a_linear_search(
    tokens: list[int], max_tokens: int, min_suffix: int
) -> None:
    expected = reference(tokens, max_tokens, min_suffix)
    assert propose_ngram(tokens, max_tokens, min_suffix=min_suffix).tokens == expected
