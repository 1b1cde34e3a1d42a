"""How long a retry waits: 1 s after the first failure, twice as long after each further one. Pure.

*Decision*: jitter is a hash of the key and the number of tries. *Because* two hundred resources
that failed together must not come back together, and a test must see the same delays twice.
"""

import zlib

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0


def back_off_seconds(key: object, num_failures: int) -> float:
    """Seconds until the next try after this many failures, at least one; up to half is random."""
    longest = min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(num_failures - 1, 10))
    return longest * (0.5 + 0.5 * jitter(key, num_failures))


def jitter(key: object, number: int) -> float:
    """A fraction, 0..1, that differs from key to key and from number to number."""
    return zlib.crc32(f"{key}/{number}".encode()) / 0xFFFFFFFF
