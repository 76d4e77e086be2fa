"""How large the payloads of a run are, before any is made."""

from __future__ import annotations

from math import log2

from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import PAYLOAD_QUANTIZERS


def bits_per_parameter(outer: OuterSpec) -> float:
    """About the bits of a payload for each parameter, positions included."""
    bits = PAYLOAD_QUANTIZERS[outer.value_quantizer].bits
    if outer.dense:
        return bits
    share = outer.top_k / outer.chunk
    return share * (bits + 2 - log2(share))
