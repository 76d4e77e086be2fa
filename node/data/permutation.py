"""The order of samples: the window of a source of known size that a sample uses.

Source of the permutation: Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), the
generalized Feistel construction with cycle walking.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt

_FEISTEL_ROUNDS = 4


def window_of(ordinal: int, size: int, seed: int) -> tuple[int, int]:
    """Epoch and window index of sample `ordinal` in a source of `size` windows.

    Each epoch visits every index of ``0..size - 1`` once, in an order keyed by (seed, epoch). A call costs a
    few hashes and no memory for any size.

    Raises:
        ValueError: `ordinal` is negative or `size` is not positive.
    """
    if ordinal < 0 or size < 1:
        raise ValueError(f"there is no sample with ordinal {ordinal} in a source of {size} windows")
    epoch, position = divmod(ordinal, size)
    key = b"%d/%d" % (seed, epoch)
    # The network permutes side * side values, at least `size`. Repeat it until the value is below `size`: as
    # it is a bijection, the walk comes back there, and different positions end at different indices.
    side = isqrt(size - 1) + 1
    index = _permute(position, side, key)
    while index >= size:
        index = _permute(index, side, key)
    return epoch, index


def _permute(value: int, side: int, key: bytes) -> int:
    """A keyed bijection of ``0..side**2 - 1``: a Feistel network whose halves are digits to base `side`."""
    left, right = divmod(value, side)
    for turn in range(_FEISTEL_ROUNDS):
        digest = blake2b(b"%d/%d" % (turn, right), key=key, digest_size=8).digest()
        left, right = right, (left + int.from_bytes(digest, "little")) % side
    return left * side + right
