"""Shared Gumbel noise: the same value for (seed, choice, stream, position, token) on both sides.

    word = Philox4x32-10(key = seed, counter = (token // 4, position, choice, stream))[token % 4]
    v = min((float32(word) + 0.5) * 2^-32, 1 - 2^-24)     g = float32(-log(-log(1 - v)))

v is float32, the logarithms are float64. Words have the same bits in every implementation. g is
finite, between -2.82 and 22.88, and has the same bits on every CPU, with numpy and with torch:
compared for all words, with the instructions of SSE, AVX2 and AVX-512. Devices compute the
logarithms in float32 (``engine/sampling/keyed.py``), where g agrees to 2e-6. Coupled sampling uses
stream 0. Streams 1 to 3 are reserved for rejection sampling, because a shared stream would bias the
output.

Letters: X counters, Y rows of the ring or of a tile, Z slots, T counters of a row of a tile, I
rounds of Philox. Q counters of one position: V / 4, rounded up.

*Decision*: Philox by numpy in tiles of many rows; logarithms in float64, by numpy or, in processes
that have it, by torch. *Because*: a target without torch has the same bits. A position of 128,256
tokens takes 1.1 ms with AVX-512, and 1.7 by numpy and 1.1 by torch with AVX2 (one core). *Not
chosen*: logarithms in float32, whose bits differ between libraries and between CPUs (.15 ms less);
torch alone (Philox takes .1 ms longer) and numexpr (1.4 ms longer). *Revisit when* torch's
stateless Philox runs on CPUs, or a compiler is available: a fused kernel takes a tenth of the time.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), for Philox;
arXiv 2408.07978 for sharing the noise.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Uint32s = NDArray[np.uint32]
Uint64s = NDArray[np.uint64]
Float32s = NDArray[np.float32]
Int64s = NDArray[np.int64]
GumbelFromWords = Callable[[Float32s], None]
"""``gumbel_from_words``, or another implementation of it."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_WORDS = 4
_LARGEST_V = 1 - 2**-24
_TILE = 16384
"""Counters computed together. A tile costs about 60 calls of numpy, and its three buffers (768 KiB)
fit into the second cache of a core. On an idle core, a quarter and twice the tile are 1.5 times
slower; on a busy one, half of it is 1.3 times slower."""
_MOST_AHEAD = 15
"""Largest number of positions that are computed before they are needed, in what is left of a tile.
Between forward passes, a tile of one row of 4,096 tokens takes .9 ms, and one of 16 rows 2.2 ms."""
_NOT_NEEDED = 2**62
"""Last filled position of a slot of temperature 0."""


class _Philox:
    """Philox4x32-10 of a tile of counters, on preallocated buffers. One thread.

    The even words of the state are 64-bit numbers with zero high halves. The odd words are the low
    halves of the last products. A round is therefore five calls over contiguous memory.
    """

    def __init__(self, capacity: int) -> None:
        self._buffers: list[Uint64s] = [np.empty(2 * capacity, np.uint64) for _ in range(3)]
        self._multipliers_211 = np.array(_MULTIPLIERS, dtype=np.uint64)[:, None, None]
        self._steps_I21 = np.array(
            [[step * index for step in _KEY_STEPS] for index in range(_NUM_ROUNDS)], np.uint64
        )[:, :, None]
        # Arrays, since numpy converts a Python number in each call.
        self._mask, self._shift = np.array(_MASK, np.uint64), np.array(32, np.uint64)

    def run(
        self, counters: Sequence[Uint64s | Uint32s], keys_2Y: Uint64s, shape: tuple[int, int]
    ) -> tuple[Uint64s, Uint64s]:
        """Encrypt counters.

        Args:
            counters: four words, each of a shape that broadcasts to ``shape``.
            keys_2Y: both words of the key of each row.
            shape: [Y, T] rows and counters of a row.

        Returns:
            The even and the odd words, each uint64 [2, Y, T] and valid until the next call. The
            high halves of the odd words are not zero.
        """
        size = 2 * shape[0] * shape[1]
        even_2YT, odd_2YT, product_2YT = (flat[:size].reshape(2, *shape) for flat in self._buffers)
        even_2YT[0], even_2YT[1] = counters[0], counters[2]
        odd_2YT[0], odd_2YT[1] = counters[1], counters[3]
        keys_I2Y1 = ((keys_2Y + self._steps_I21) & self._mask)[..., None]
        for key_2Y1 in keys_I2Y1:
            # The product of each lane is the input of the other lane.
            np.multiply(even_2YT, self._multipliers_211, out=product_2YT[::-1])
            np.right_shift(product_2YT, self._shift, out=even_2YT)
            np.bitwise_xor(even_2YT, odd_2YT, out=even_2YT)
            np.bitwise_xor(even_2YT, key_2Y1, out=even_2YT)
            np.bitwise_and(even_2YT, self._mask, out=even_2YT)
            odd_2YT, product_2YT = product_2YT, odd_2YT
        return even_2YT, odd_2YT


def _copy_words(words_YT4: Uint32s, even_2YT: Uint64s, odd_2YT: Uint64s) -> None:
    """Interleave the low halves of the words of each counter."""
    for lane in range(2):
        words_YT4[..., 2 * lane] = even_2YT[lane].view(np.uint32)[:, ::2]
        words_YT4[..., 2 * lane + 1] = odd_2YT[lane].view(np.uint32)[:, ::2]


def gumbel_from_words(noise: Float32s) -> None:
    """Convert words, given as contiguous float32, to Gumbel noise in place."""
    noise += np.float32(0.5)
    noise *= np.float32(2.0**-32)
    np.minimum(noise, np.float32(_LARGEST_V), out=noise)
    # Exact, since v is a multiple of 2^-33.
    exact = np.subtract(1.0, noise, dtype=np.float64)
    np.log(exact, out=exact)
    np.negative(exact, out=exact)
    np.log(exact, out=exact)
    np.negative(exact, out=noise, casting="same_kind")


class GumbelRows:
    """Computes rows of noise with preallocated buffers. One thread."""

    def __init__(self, vocab_size: int, from_words: GumbelFromWords = gumbel_from_words) -> None:
        self._vocab_size = vocab_size
        self._from_words = from_words
        self._num_counters = -(-vocab_size // _WORDS)
        self._tile = min(_TILE, self._num_counters)
        self.tile_rows = _TILE // self._tile
        """Rows that are computed together."""
        self._blocks_Q = np.arange(self._num_counters, dtype=np.uint64)
        capacity = self._tile * self.tile_rows
        self._philox = _Philox(capacity)
        self._words = np.empty(capacity * _WORDS, dtype=np.uint32)
        self._noise = np.empty(capacity * _WORDS, dtype=np.float32)

    def compute(self, out_XV: Float32s, rows_R: Int64s, addresses_R4: Uint64s) -> None:
        """Write the noise of all tokens into some rows.

        Args:
            out_XV: float32, of which the rows ``rows_R`` are written.
            rows_R: the row of each address.
            addresses_R4: seed, position, choice, and stream, which is 0 in coupled sampling.
        """
        for first_row in range(0, len(rows_R), self.tile_rows):
            some_Y = slice(first_row, first_row + self.tile_rows)
            seeds_Y, *words = addresses_R4[some_Y].T
            keys_2Y = np.stack((seeds_Y & _MASK, seeds_Y >> 32))
            address_Y1 = [word[:, None] for word in words]
            for first in range(0, self._num_counters, self._tile):
                blocks_T = self._blocks_Q[first : first + self._tile]
                shape = (len(seeds_Y), len(blocks_T))
                words_YT4 = self._words[: shape[0] * shape[1] * _WORDS].reshape(*shape, _WORDS)
                _copy_words(words_YT4, *self._philox.run((blocks_T, *address_Y1), keys_2Y, shape))
                noise = self._noise[: words_YT4.size]
                np.copyto(noise, words_YT4.reshape(-1), casting="same_kind")
                self._from_words(noise)
                tile_V = slice(first * _WORDS, min(self._vocab_size, (first + shape[1]) * _WORDS))
                width = tile_V.stop - tile_V.start
                out_XV[rows_R[some_Y], tile_V] = noise.reshape(shape[0], -1)[:, :width]


def gumbel_noise(seed: int, positions: Sequence[int], vocab_size: int, choice: int = 0) -> Float32s:
    """Return the noise of all tokens at some positions.

    Args:
        seed: unsigned 64 bits.
        positions: absolute index of the selected token, unsigned 32 bits.
        vocab_size: tokens.
        choice: index of the continuation of the request.

    Returns:
        float32 [len(positions), vocab_size], finite.
    """
    num = len(positions)
    noise_RV = np.empty((num, vocab_size), dtype=np.float32)
    addresses_R4 = np.empty((num, 4), dtype=np.uint64)
    addresses_R4[:] = [(seed, position, choice, 0) for position in positions]
    GumbelRows(vocab_size).compute(noise_RV, np.arange(num), addresses_R4)
    return noise_RV


class NoiseRing:
    """Noise by (slot, position), computed once and kept until a later position uses its row.

    Step thread. Position p of a slot is in row p modulo the number of rows: ``num_rows``, the
    largest span of positions in use, and rows for positions that are computed ahead. Memory: slots
    x rows x vocabulary x 4 bytes.
    """

    def __init__(
        self,
        num_slots: int,
        num_rows: int,
        vocab_size: int,
        from_words: GumbelFromWords = gumbel_from_words,
    ) -> None:
        self._gumbel = GumbelRows(vocab_size, from_words)
        self._most_ahead = min(_MOST_AHEAD, self._gumbel.tile_rows - 1)
        self._most_asked = num_rows
        self._num_rows = num_rows + self._most_ahead
        shape = (num_slots * self._num_rows, vocab_size)
        self.noise_YV: Float32s = np.zeros(shape, dtype=np.float32)
        """The rows of all slots."""
        self.last_Z: Int64s = np.full(num_slots, _NOT_NEEDED, dtype=np.int64)
        """Last filled position of each slot; -1 before the first one, and a position beyond all
        texts for a slot of temperature 0."""
        self._first_Z: Int64s = np.zeros(num_slots, dtype=np.int64)
        """First position of the filled ones, which are consecutive."""
        self._seeds_and_choices = [(0, 0)] * num_slots

    def assign(self, slot: int, seed: int, choice: int, temperature: float) -> None:
        """Assign a slot to a sequence; its previous noise is dropped."""
        self._first_Z[slot] = 0
        self.last_Z[slot] = -1 if temperature > 0 else _NOT_NEEDED
        self._seeds_and_choices[slot] = seed, choice

    def release(self, slot: int) -> None:
        """Release a slot; it has no noise until it is assigned again."""
        self.assign(slot, 0, 0, 0.0)

    def fill(self, slot: int, first: int, count: int) -> int:
        """Compute the missing noise of ``count`` positions; see ``fill_each``."""
        return self.fill_each([slot], [first], [count])

    def fill_each(self, slots: Sequence[int], firsts: Sequence[int], counts: Sequence[int]) -> int:
        """Compute the missing noise of consecutive positions of each slot.

        A slot that misses some also gets the positions after them that the tile has room for.

        Args:
            slots: different slots.
            firsts: first position of each.
            counts: number of positions of each, at most ``num_rows``.

        Returns:
            The number of computed positions; slots of temperature 0 have none.
        """
        # Few calls of numpy: between forward passes, each takes 10 to 50 us.
        missing: list[tuple[int, int, int, int]] = []
        for slot, first, count in zip(slots, firsts, counts, strict=True):
            assert count <= self._most_asked, "more positions than rows"
            filled_from, last = int(self._first_Z[slot]), int(self.last_Z[slot])
            is_next = filled_from <= first <= last + 1
            begin, end = (last + 1 if is_next else first), first + count
            if begin < end:
                missing.append((slot, filled_from if is_next else first, begin, end))
        if not missing:
            return 0
        num_free = self._gumbel.tile_rows - sum(end - begin for *_, begin, end in missing)
        num_ahead = max(0, min(self._most_ahead, num_free // len(missing)))
        rows: list[int] = []
        addresses: list[tuple[int, int, int, int]] = []
        for slot, _, begin, end in missing:
            seed, choice = self._seeds_and_choices[slot]
            for position in range(begin, end + num_ahead):
                rows.append(slot * self._num_rows + position % self._num_rows)
                addresses.append((seed, position, choice, 0))
        self._gumbel.compute(self.noise_YV, np.array(rows), np.array(addresses, dtype=np.uint64))
        for slot, filled_from, _, end in missing:
            last = end + num_ahead - 1
            self.last_Z[slot] = last
            self._first_Z[slot] = max(filled_from, last + 1 - self._num_rows)
        return len(rows)

    def row(self, slot: int, position: int) -> Float32s | None:
        """Return the noise of a filled position; None if the slot has temperature 0.

        Returns:
            float32 [V], a view.
        """
        last = self.last_Z[slot]
        assert self._first_Z[slot] <= position <= last, "a position was not filled"
        if last == _NOT_NEEDED:
            return None
        noise_V: Float32s = self.noise_YV[slot * self._num_rows + position % self._num_rows]
        return noise_V

    def rows(self, slots_R: Int64s, positions_R: Int64s) -> Float32s | None:
        """Return the noise of some positions, which were filled before.

        Returns:
            float32 [R, V]; None if every slot has temperature 0. Otherwise rows of slots with
            temperature 0 have finite, meaningless values.
        """
        if (self.last_Z[slots_R] == _NOT_NEEDED).all():
            return None
        rows_R = self.locate(slots_R, positions_R)
        first = int(rows_R[0])
        if np.array_equal(rows_R, np.arange(first, first + len(rows_R))):
            # A view: a copy of seven rows takes a tenth of a millisecond.
            return self.noise_YV[first : first + len(rows_R)]
        return self.noise_YV[rows_R]

    def locate(self, slots_R: Int64s, positions_R: Int64s) -> Int64s:
        """Return the rows of ``noise_YV`` that contain the noise of some filled positions."""
        is_filled_R = (self._first_Z[slots_R] <= positions_R) & (
            positions_R <= self.last_Z[slots_R]
        )
        assert is_filled_R.all(), "a position was not filled"
        located_R: Int64s = slots_R * self._num_rows + positions_R % self._num_rows
        return located_R
