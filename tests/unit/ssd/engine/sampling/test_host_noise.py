"""Noise by torch on the host: the bits of numpy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.engine.sampling.host_noise import gumbel_by_torch
from ssd.speculation.noise import Float32s, GumbelRows, gumbel_from_words

LAST = 2**32 - 1
WORDS = st.integers(0, LAST) | st.integers(0, 40) | st.integers(LAST - 40, LAST)


def check_bits(words_X: Float32s) -> None:
    by_numpy_X, by_torch_X = words_X.copy(), words_X.copy()
    gumbel_from_words(by_numpy_X)
    gumbel_by_torch(by_torch_X)
    np.testing.assert_array_equal(by_torch_X.view(np.int32), by_numpy_X.view(np.int32))


@given(st.lists(WORDS, min_size=1, max_size=70))
@settings(deadline=None, max_examples=200)
def test_any_words_have_the_same_bits(words: list[int]) -> None:
    check_bits(np.array(words, dtype=np.uint32).astype(np.float32))


def test_words_at_both_ends_and_between_have_the_same_bits() -> None:
    near = np.arange(200_000)
    check_bits(np.concatenate([near, LAST - near, np.arange(0, LAST, 4099)]).astype(np.float32))


@pytest.mark.slow
def test_all_words_have_the_same_bits() -> None:
    """Above 2^24, float32 has the multiples of 2, 4, ... 256 alone."""
    for first in range(0, 2**24, 2**22):
        check_bits(np.arange(first, first + 2**22).astype(np.float32))
    for step in (2**power for power in range(1, 9)):
        check_bits((step * np.arange(2**23, 2**24 + 1)).astype(np.float32))


@given(st.integers(0, 2**64 - 1), st.integers(0, LAST), st.integers(1, 300))
@settings(deadline=None, max_examples=50)
def test_rows_have_the_same_bits(seed: int, position: int, vocab_size: int) -> None:
    rows_2V = np.zeros((2, vocab_size), dtype=np.float32)
    address_14 = np.array([[seed, position, 1, 0]], dtype=np.uint64)
    GumbelRows(vocab_size).compute(rows_2V, np.array([0]), address_14)
    GumbelRows(vocab_size, gumbel_by_torch).compute(rows_2V, np.array([1]), address_14)
    np.testing.assert_array_equal(rows_2V[0].view(np.int32), rows_2V[1].view(np.int32))
