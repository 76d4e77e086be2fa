"""How large the payloads of a run are, before any is made."""

from __future__ import annotations

from math import log2

from protocol.spec.outer import OuterSpec

_BITS = {"2bit": 2, "1bit": 1, "none": 32}
"""Of a value, by quantizer."""


def bits_per_parameter(outer: OuterSpec) -> float:
    """About the bits of a payload for each parameter, positions included."""
    if outer.dense:
        return _BITS["none"]
    share = outer.top_k / outer.chunk
    return share * (_BITS[outer.quantizer] + 2 - log2(share))
