"""Shared Gumbel noise: the same value for (seed, choice, stream, position, token) on both sides.

    word = Philox4x32-10(key = seed, counter = (token // 4, position, choice, stream))[token % 4]
    v = min((float32(word) + 0.5) * 2^-32, 1 - 2^-24)     E = -log1p(-v)     g = -log(E)

All in float32. Words have the same bits in every implementation. g is finite, between -2.82 and
22.88, and agrees to 2e-6 between implementations. Coupled sampling uses stream 0. Streams 1 to 3
are reserved for rejection sampling, because a shared stream would bias the output.

Letters: X counters, Y rows of the ring, Z slots, Q counters of one position (V / 4, rounded up),
T counters of a tile, I rounds of Philox.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), for Philox;
arXiv 2408.07978 for sharing the noise.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Uint32s = NDArray[np.uint32]
Float32s = NDArray[np.float32]
Int64s = NDArray[np.int64]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_WORDS = 4
_LARGEST_V = np.float32(1 - 2**-24)
_TILE = 4096
"""Counters computed together: their state and products (128 KiB) fit into the cache of a core."""


class _Philox:
    """Philox4x32-10 on preallocated buffers. One thread.

    The two even words of the state are the low halves of ``even_2T``, whose high halves stay zero.
    One 64-bit product of each lane therefore contains Philox's high and low word.
    """

    def __init__(self, capacity: int) -> None:
        self._even_2T = np.zeros((2, capacity), dtype=np.uint64)
        self._odd_2T = np.empty((2, capacity), dtype=np.uint32)
        self._product_2T = np.empty((2, capacity), dtype=np.uint64)
        self._multipliers_21 = np.array(_MULTIPLIERS, dtype=np.uint64)[:, None]

    def run(self, counters_4T: Sequence[Uint32s | int], key: tuple[int, int], num: int) -> None:
        """Encrypt ``num`` counters of four words, each an array [num] or one value."""
        even_2T = self._even_2T[:, :num].view(np.uint32)[:, 0::2]
        even_2T[0], even_2T[1] = counters_4T[0], counters_4T[2]
        odd_2T = self._odd_2T[:, :num]
        odd_2T[0], odd_2T[1] = counters_4T[1], counters_4T[3]
        keys_I2 = [
            [(word + step * index) & _MASK for word, step in zip(key, _KEY_STEPS, strict=True)]
            for index in range(_NUM_ROUNDS)
        ]
        keys_I21 = np.array(keys_I2, dtype=np.uint32)[:, :, None]
        wide_2T, product_2T = self._even_2T[:, :num], self._product_2T[:, :num]
        # The product of each lane is the input of the other lane.
        halves_2T = product_2T.view(np.uint32)[::-1]
        low_2T, high_2T = halves_2T[:, 0::2], halves_2T[:, 1::2]
        for key_21 in keys_I21:
            np.multiply(wide_2T, self._multipliers_21, out=product_2T)
            np.bitwise_xor(odd_2T, key_21, out=odd_2T)
            np.bitwise_xor(odd_2T, high_2T, out=even_2T)
            np.copyto(odd_2T, low_2T)

    def copy_words(self, words_T4: Uint32s) -> None:
        """Copy the four words of each counter of the last run."""
        num = len(words_T4)
        words_T4[:, 0::2] = self._even_2T[:, :num].view(np.uint32)[:, 0::2].T
        words_T4[:, 1::2] = self._odd_2T[:, :num].T


def philox4x32_10(counters_X4: Uint32s, key_2: Uint32s) -> Uint32s:
    """Encrypt counters.

    Args:
        counters_X4: uint32, counters of four words.
        key_2: uint32, the two words of the key.

    Returns:
        uint32 [X, 4], the same bits as ``philox4x32`` of Random123 with 10 rounds.
    """
    num = len(counters_X4)
    philox = _Philox(num)
    philox.run(list(counters_X4.T), (int(key_2[0]), int(key_2[1])), num)
    words_X4 = np.empty((num, _WORDS), dtype=np.uint32)
    philox.copy_words(words_X4)
    return words_X4


class _Gumbel:
    """Computes rows of noise with preallocated buffers. One thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_counters = -(-vocab_size // _WORDS)
        self._tile = min(_TILE, self._num_counters)
        self._blocks_Q = np.arange(self._num_counters, dtype=np.uint32)
        self._philox = _Philox(self._tile)
        self._words_T4 = np.empty((self._tile, _WORDS), dtype=np.uint32)

    def compute(self, out_V: Float32s, seed: int, address: tuple[int, int, int]) -> None:
        """Write the noise of all tokens for one address (position, choice, stream)."""
        key = (seed & _MASK, seed >> 32 & _MASK)
        for first in range(0, self._num_counters, self._tile):
            blocks_T = self._blocks_Q[first : first + self._tile]
            words_T4 = self._words_T4[: len(blocks_T)]
            self._philox.run((blocks_T, *address), key, len(blocks_T))
            self._philox.copy_words(words_T4)
            tile_V = out_V[first * _WORDS : (first + len(blocks_T)) * _WORDS]
            np.copyto(tile_V, words_T4.reshape(-1)[: len(tile_V)], casting="same_kind")
        gumbel_from_words(out_V)


def gumbel_from_words(out_V: Float32s) -> None:
    """Convert words, given as float32, to Gumbel noise in place."""
    np.add(out_V, np.float32(0.5), out=out_V)
    np.multiply(out_V, np.float32(2.0**-32), out=out_V)
    np.minimum(out_V, _LARGEST_V, out=out_V)
    np.negative(out_V, out=out_V)
    np.log1p(out_V, out=out_V)
    np.negative(out_V, out=out_V)
    np.log(out_V, out=out_V)
    np.negative(out_V, out=out_V)


def gumbel_noise(
    seed: int, positions: Sequence[int], vocab_size: int, choice: int = 0, stream: int = 0
) -> Float32s:
    """Return the noise of all tokens at some positions.

    Args:
        seed: unsigned 64 bits.
        positions: absolute index of the selected token, unsigned 32 bits.
        vocab_size: tokens.
        choice: index of the continuation of the request.
        stream: 0 for coupled sampling.

    Returns:
        float32 [len(positions), vocab_size], finite.
    """
    gumbel = _Gumbel(vocab_size)
    noise_RV = np.empty((len(positions), vocab_size), dtype=np.float32)
    for out_V, position in zip(noise_RV, positions, strict=True):
        gumbel.compute(out_V, seed, (position, choice, stream))
    return noise_RV


class NoiseRing:
    """Noise by (slot, position), computed once and kept until a later position uses its row.

    Step thread. Position p of a slot is in row p modulo ``num_rows``, so the positions in use span
    at most ``num_rows``. Memory: slots x rows x vocabulary x 4 bytes.
    """

    def __init__(self, num_slots: int, num_rows: int, vocab_size: int) -> None:
        self._num_rows = num_rows
        self._noise_RV = torch.zeros((num_slots * num_rows, vocab_size))
        self._noise_ZYV = self._noise_RV.numpy().reshape(num_slots, num_rows, vocab_size)
        self._positions_ZY: Int64s = np.full((num_slots, num_rows), -1, dtype=np.int64)
        self._temperatures_Z = np.zeros(num_slots)
        self._addresses: list[tuple[int, int]] = [(0, 0)] * num_slots
        self._gumbel = _Gumbel(vocab_size)

    def assign(self, slot: int, seed: int, choice: int, temperature: float) -> None:
        """Assign a slot to a sequence; its previous noise is dropped."""
        self._positions_ZY[slot] = -1
        self._temperatures_Z[slot] = temperature
        self._addresses[slot] = (seed, choice)

    def release(self, slot: int) -> None:
        """Release a slot; it has no noise until it is assigned again."""
        self.assign(slot, 0, 0, 0.0)

    def fill(self, slot: int, first_position: int, last_position: int) -> int:
        """Compute the missing noise of positions first..last, inclusive.

        Returns:
            The number of computed positions; 0 at temperature 0 or if none is missing.
        """
        if self._temperatures_Z[slot] == 0.0:
            return 0
        assert last_position - first_position < self._num_rows, "more positions than rows"
        seed, choice = self._addresses[slot]
        kept_Y = self._positions_ZY[slot]
        num_computed = 0
        for position in range(first_position, last_position + 1):
            row = position % self._num_rows
            if kept_Y[row] != position:
                self._gumbel.compute(self._noise_ZYV[slot, row], seed, (position, choice, 0))
                kept_Y[row] = position
                num_computed += 1
        return num_computed

    def rows(self, slots_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor | None:
        """Return the noise of some positions, which were filled before.

        Args:
            slots_R: int64 on the CPU.
            positions_R: int64 on the CPU.

        Returns:
            float32 [R, V]; None if every slot has temperature 0. Otherwise rows of slots with
            temperature 0 have finite, meaningless values.
        """
        slots, positions = slots_R.numpy(), positions_R.numpy()
        is_random_R = self._temperatures_Z[slots] > 0.0
        if not is_random_R.any():
            return None
        rows = positions % self._num_rows
        kept_R = self._positions_ZY[slots, rows]
        assert ((kept_R == positions) | ~is_random_R).all(), "a position was not filled"
        return self._noise_RV.index_select(0, torch.from_numpy(slots * self._num_rows + rows))
