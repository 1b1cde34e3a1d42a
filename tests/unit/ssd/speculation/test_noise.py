"""Known answers, the distribution and the bookkeeping of the shared noise."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import kolmogorov
from tests.philox import philox4x32_10

from ssd.speculation.noise import Float32s, NoiseRing, gumbel_from_words, gumbel_noise


def words(text: str) -> list[int]:
    """Words of a line of Random123's ``kat_vectors``."""
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_reference_gives_the_known_answers_of_random123(
    counter: str, key: str, expected: str
) -> None:
    counters_X4 = np.array([words(counter)] * 3, dtype=np.uint32)
    words_X4 = philox4x32_10(counters_X4, np.array(words(key), dtype=np.uint32))
    assert words_X4.tolist() == [words(expected)] * 3


def test_each_token_uses_its_word_of_its_counter() -> None:
    seed, position, choice = 0x123456789ABCDEF0, 77, 2
    noise_V = gumbel_noise(seed, [position], 11, choice)[0]
    key_2 = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32)
    for token in range(11):
        counter_14 = np.array([[token // 4, position, choice, 0]], dtype=np.uint32)
        word = philox4x32_10(counter_14, key_2)[0, token % 4]
        v = min((float(np.float32(word)) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        assert noise_V[token] == pytest.approx(-math.log(-math.log1p(-v)), abs=2e-6)


def test_noise_is_finite_and_rounded_once_at_both_ends_and_between() -> None:
    ends = np.concatenate([np.arange(20_000), 2**32 - 1 - np.arange(20_000)])
    middle = np.arange(0, 2**32, 86_243)
    words_V = np.concatenate([ends, middle]).astype(np.uint32)
    noise_V = words_V.astype(np.float32)
    gumbel_from_words(noise_V)
    v_V = (words_V.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    v_V = np.minimum(v_V, np.float32(1 - 2**-24)).astype(np.float64)
    assert np.isfinite(noise_V).all()
    np.testing.assert_array_equal(noise_V, (-np.log(-np.log1p(-v_V))).astype(np.float32))


def test_noise_has_the_same_bits_on_every_machine() -> None:
    noise_RV = gumbel_noise(2**64 - 3, [0, 4097], 50_001, choice=2)
    digest = hashlib.sha256(noise_RV.astype("<f4").tobytes()).hexdigest()
    assert digest == "a87656b5741091f7e3ec8286e2609887d4b3f16408ca5bcf5de2e0175aef94c6"


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_noise_has_the_gumbel_distribution(seed: int) -> None:
    """Kolmogorov-Smirnov: with n = 40 000 draws, p < 1e-3 means a distance over 0.0097."""
    noise_N = np.sort(gumbel_noise(seed, range(10), 4000).ravel())
    below_N = np.exp(-np.exp(-noise_N))
    share_N = np.arange(len(noise_N)) / len(noise_N)
    distance = max((below_N - share_N).max(), (share_N - below_N).max() + 1 / len(noise_N))
    assert kolmogorov(distance * np.sqrt(len(noise_N))) > 1e-3


def test_neighbouring_addresses_are_uncorrelated() -> None:
    """With 20 000 pairs a correlation has standard deviation .0071; five of them are allowed."""
    base_V = gumbel_noise(5, [9], 20_000)[0]
    others = [
        gumbel_noise(6, [9], 20_000)[0],
        gumbel_noise(5 + 2**32, [9], 20_000)[0],
        gumbel_noise(5, [10], 20_000)[0],
        gumbel_noise(5, [9], 20_000, choice=1)[0],
        np.roll(base_V, 1),
    ]
    for other_V in others:
        assert abs(np.corrcoef(base_V, other_V)[0, 1]) < 5 * 20_000**-0.5


@given(st.integers(1, 40), st.integers(0, 2**64 - 1))
@settings(max_examples=30, deadline=None)
def test_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary(
    vocab_size: int, seed: int
) -> None:
    large_RV = gumbel_noise(seed, [3, 4], 40)
    small_RV = gumbel_noise(seed, [3, 4], vocab_size)
    np.testing.assert_array_equal(small_RV, large_RV[:, :vocab_size])


def test_noise_of_a_large_vocabulary_is_the_same_across_tiles() -> None:
    whole_V = gumbel_noise(8, [5], 70_001)[0]
    np.testing.assert_array_equal(whole_V[:4096], gumbel_noise(8, [5], 4096)[0])
    counter_14 = np.array([[17_500, 5, 0, 0]], dtype=np.uint32)
    word_1 = philox4x32_10(counter_14, np.array([8, 0], dtype=np.uint32))[0, :1]
    last_1 = word_1.astype(np.float32)
    gumbel_from_words(last_1)
    assert whole_V[70_000] == last_1[0]


def rows_of(ring: NoiseRing, slots: Sequence[int], positions: Sequence[int]) -> Float32s:
    rows_RV = ring.rows(np.array(slots), np.array(positions))
    assert rows_RV is not None
    return rows_RV


class TestNoiseRing:
    def test_rows_are_the_noise_of_their_addresses(self) -> None:
        ring = NoiseRing(3, 6, 10)
        ring.assign(0, 11, 0, 1.0)
        ring.assign(2, 22, 1, 0.5)
        ring.fill(0, 4, 6)
        ring.fill(2, 100, 3)
        rows_RV = rows_of(ring, [2, 0, 0], [101, 9, 4])
        assert rows_RV.dtype == np.float32
        expected_RV = np.concatenate(
            [gumbel_noise(22, [101], 10, choice=1), gumbel_noise(11, [9, 4], 10)]
        )
        np.testing.assert_array_equal(rows_RV, expected_RV)

    def test_only_missing_positions_are_computed_where_a_row_fills_a_tile(self) -> None:
        ring = NoiseRing(1, 6, 70_000)
        ring.assign(0, 1, 0, 1.0)
        assert ring.fill(0, 10, 4) == 4
        assert ring.fill(0, 10, 4) == 0
        assert ring.fill(0, 12, 4) == 2
        assert ring.fill(0, 10, 2) == 0
        assert ring.fill(0, 16, 1) == 1
        assert ring.fill(0, 10, 1) == 1, "its row has another position"

    def test_positions_computed_ahead_replace_none_that_are_in_use(self) -> None:
        ring = NoiseRing(2, 6, 8)
        ring.assign(0, 1, 0, 1.0)
        ring.assign(1, 2, 0, 1.0)
        computed = []
        for first in range(10, 60):
            computed.append(ring.fill(0, first, 6))
            positions = range(first, first + 6)
            rows_RV = rows_of(ring, [0] * 6, positions)
            np.testing.assert_array_equal(rows_RV, gumbel_noise(1, positions, 8))
        assert computed[:17] == [21, *[0] * 15, 16]
        assert ring.fill_each([0, 1], [60, 7], [6, 1]) > 2

    def test_a_reassigned_slot_drops_its_noise(self) -> None:
        ring = NoiseRing(1, 4, 8)
        ring.assign(0, 1, 0, 1.0)
        ring.fill(0, 0, 4)
        ring.release(0)
        ring.assign(0, 2, 0, 1.0)
        with pytest.raises(AssertionError, match="not filled"):
            ring.rows(np.array([0]), np.array([2]))
        with pytest.raises(AssertionError, match="not filled"):
            ring.row(0, 2)
        ring.fill(0, 0, 4)
        np.testing.assert_array_equal(rows_of(ring, [0], [2]), gumbel_noise(2, [2], 8))

    def test_one_pass_over_several_slots_gives_the_bits_of_each_alone(self) -> None:
        # 2,051 tokens need 513 counters, so a tile has the rows of several slots.
        ring, alone = NoiseRing(6, 8, 2051), NoiseRing(6, 8, 2051)
        for each in (ring, alone):
            for slot, temperature in ((5, 1.0), (0, 0.0), (3, 0.3)):
                each.assign(slot, 2**63 + slot, slot, temperature)
        assert ring.fill_each([5, 0, 3], [7, 1000, 64], [7, 1, 4]) == 7 + 4 + 2 * 10
        for slot, first, count in ((5, 7, 7), (3, 64, 4)):
            positions = range(first, first + count)
            for position in positions:
                alone.fill(slot, position, 1)
            found_RV, expected_RV = (
                rows_of(each, [slot] * count, positions) for each in (ring, alone)
            )
            assert np.array_equal(found_RV, expected_RV)

    def test_temperature_zero_needs_no_noise(self) -> None:
        ring = NoiseRing(2, 4, 8)
        ring.assign(0, 1, 0, 0.0)
        assert ring.fill(0, 0, 4) == 0
        assert ring.rows(np.array([0, 0]), np.array([0, 1])) is None

    def test_greedy_rows_among_others_are_finite(self) -> None:
        ring = NoiseRing(2, 4, 8)
        ring.assign(0, 1, 0, 0.0)
        ring.assign(1, 1, 0, 1.0)
        ring.fill(1, 7, 1)
        assert np.isfinite(rows_of(ring, [0, 1], [3, 7])).all()

    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=12))
    @settings(max_examples=40, deadline=None)
    def test_a_filled_range_is_correct_after_any_other_fills(
        self, ranges: list[tuple[int, int]]
    ) -> None:
        ring = NoiseRing(1, 5, 6)
        ring.assign(0, 99, 0, 1.0)
        for first, extent in ranges:
            ring.fill(0, first, extent + 1)
            positions = range(first, first + extent + 1)
            rows_RV = rows_of(ring, [0] * len(positions), positions)
            np.testing.assert_array_equal(rows_RV, gumbel_noise(99, positions, 6))
