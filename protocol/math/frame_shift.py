"""The shift of a frame: by how much a link format that dithers moves its offsets, the same at both ends."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Number = TypeVar("Number", int, Tensor)


def shift_of(
    round_number: int, step: int, microbatch: int, boundary: int, direction: int, replica: int
) -> int:
    """By how many of 2^16 parts of a step the offsets of a frame are moved; at its end they begin again.

    Args:
        boundary: the stage behind the link.
        direction: 0 to later stages, 1 back; 2 for a validation, whose round and step count as 0.
    """
    x = 0x9E3779B9
    for number in (round_number, step, microbatch, boundary, direction, replica):
        x = hashed(x ^ number & 0xFFFFFFFF)
    return x >> 16


def hashed(x: Number) -> Number:
    """A permutation of the 32-bit numbers that looks random (lowbias32 of Wellons, 2018), int64."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16
