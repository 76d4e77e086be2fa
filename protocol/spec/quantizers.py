"""The quantizers that a run can name. A new one: a line here, a file in protocol.algorithm.quantizers.

The coordinator and the command line read specifications without torch, which the classes need. So each line
gives module and class as text; protocol.algorithm.quantizers.loading imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkQuantizerEntry:
    """A quantizer of activations and gradients on links.

    Attributes:
        path: module and class below protocol.algorithm.quantizers.
        token_bytes: bytes of one token, its scale included, from the number of its values.
    """

    path: str
    token_bytes: Callable[[int], int]


PAYLOAD_QUANTIZERS: Mapping[str, str] = {
    "2bit": "magnitudes.TwoBits",
    "1bit": "magnitudes.OneBit",
    "none": "floats.Float32Values",
}
"""By the name in ``outer.quantizer``: module and class below protocol.algorithm.quantizers."""

LINK_QUANTIZERS: Mapping[str, LinkQuantizerEntry] = {
    "bf16": LinkQuantizerEntry("floats.BFloat16", lambda width: 2 * width),
    "fp32": LinkQuantizerEntry("floats.Float32", lambda width: 4 * width),
    "int8": LinkQuantizerEntry("int8.Int8", lambda width: width + 4),
    "int4": LinkQuantizerEntry("int4.Int4", lambda width: -(-width // 2) + 1),
    "dither5": LinkQuantizerEntry("dithered.FiveBits", lambda width: -(-5 * width // 8) + 1),
    "dither3": LinkQuantizerEntry("dithered.ThreeBits", lambda width: -(-3 * width // 8) + 1),
}
"""By the name in ``link.dtype`` and ``link.gradient_dtype``."""
