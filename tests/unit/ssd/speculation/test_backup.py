"""N-gram guesses from the sequence's own text."""

from hypothesis import given
from hypothesis import strategies as st

from ssd.speculation.backup import MAX_SUFFIX_TOKENS, WINDOW_TOKENS, propose_ngram


def test_what_followed_last_time_is_proposed() -> None:
    assert propose_ngram([1, 2, 3, 4, 5, 9, 1, 2], 3) == (3, 4, 5)


def test_the_longest_agreement_wins_over_a_newer_one() -> None:
    assert propose_ngram([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2], 1) == (30,)


def test_among_equally_long_agreements_the_newest_wins() -> None:
    assert propose_ngram([1, 2, 30, 5, 1, 2, 40, 6, 1, 2], 1) == (40,)


def test_a_periodic_text_is_continued_periodically() -> None:
    assert propose_ngram([1, 2, 3, 1, 2, 3, 1], 6) == (2, 3, 1, 2, 3, 1)
    assert propose_ngram([4, 4, 4], 5) == (4,) * 5


def test_one_agreeing_token_is_no_match_unless_asked_for() -> None:
    assert propose_ngram([1, 2, 3, 1], 2) == ()
    assert propose_ngram([1, 2, 3, 1], 2, min_suffix=1) == (2, 3)


def test_text_without_repetition_or_room_gives_nothing() -> None:
    assert propose_ngram([1, 2, 3, 4], 3) == ()
    assert propose_ngram([], 3) == ()
    assert propose_ngram([1], 3) == ()
    assert propose_ngram([1, 1, 1, 1], 0) == ()


def test_text_before_the_window_is_not_searched() -> None:
    filler = list(range(100, 100 + WINDOW_TOKENS))
    assert propose_ngram([1, 2, 3, *filler, 1, 2], 1) == ()


def reference(tokens: list[int], max_tokens: int, min_suffix: int) -> tuple[int, ...]:
    """Try every earlier end, one token at a time."""
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


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_the_proposal_is_that_of_a_plain_search(
    tokens: list[int], max_tokens: int, min_suffix: int
) -> None:
    expected = reference(tokens, max_tokens, min_suffix)
    assert propose_ngram(tokens, max_tokens, min_suffix=min_suffix) == expected
