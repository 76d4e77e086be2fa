"""Who trains on which samples (from the plan alone), and where a sample lies in a source of known size.

Source of the permutation: Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), the
generalized Feistel construction with cycle walking.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt

from protocol.algorithm.sampling import next_first_sample, sample_range

__all__ = ["next_first_sample", "place", "sample_range"]

_FEISTEL_ROUNDS = 4


def place(ordinal: int, size: int, seed: int) -> tuple[int, int]:
    """Epoch and window index of a sample in a source of `size` windows.

    Each epoch visits every index of ``0..size - 1`` once, in an order keyed by (seed, epoch). Nothing is
    materialized: one call costs a few hashes whatever the size.

    Raises:
        ValueError: `ordinal` is negative or `size` is not positive.
    """
    if ordinal < 0 or size < 1:
        raise ValueError(f"no place for ordinal {ordinal} among {size} windows")
    epoch, position = divmod(ordinal, size)
    key = b"%d/%d" % (seed, epoch)
    # The network permutes side * side values, at least `size`. Walking on from a value outside 0..size - 1
    # along its cycle ends at one inside, and different starts end differently.
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
