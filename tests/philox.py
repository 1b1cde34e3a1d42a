"""Philox4x32-10 as its publication defines it, word by word: the reference of the noise."""

import numpy as np
from numpy.typing import NDArray

Uint32s = NDArray[np.uint32]
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 2**32 - 1


def philox4x32_10(counters_X4: Uint32s, key_2: Uint32s) -> Uint32s:
    """Return the words [X, 4] of counters of four words, with a key of two."""
    keys = [int(word) for word in key_2]
    rows = [[int(word) for word in counter] for counter in counters_X4]
    for _ in range(10):
        for row in rows:
            first, second = _MULTIPLIERS[0] * row[0], _MULTIPLIERS[1] * row[2]
            row[:] = (
                (second >> 32) ^ row[1] ^ keys[0],
                second & _LOW,
                (first >> 32) ^ row[3] ^ keys[1],
                first & _LOW,
            )
        keys = [(key + step) & _LOW for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return np.array(rows, dtype=np.uint32)
