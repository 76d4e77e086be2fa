"""The quantizers and index codes that a run can name. A new one: a line here, and a file.

The coordinator and the command line read specifications without torch, which the classes need. So each line
gives module and class as text. Those of protocol.formats are a leaf: nothing but their lines names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkQuantizerEntry:
    """A quantizer of activations and gradients on links.

    Attributes:
        path: module and class.
        token_bytes: bytes of one token, its scale included, from the number of its values.
    """

    path: str
    token_bytes: Callable[[int], int]


_MATH, _LEAF = (__name__.replace("spec.quantizers", each) for each in ("math", "formats"))

PAYLOAD_QUANTIZERS: Mapping[str, str] = {
    "2bit": f"{_MATH}.quantizers.magnitudes.TwoBits",
    "1bit": f"{_MATH}.quantizers.magnitudes.OneBit",
    "none": f"{_MATH}.quantizers.magnitudes.Float32Values",
}
"""By the name in ``outer.quantizer``: module and class."""

LINK_QUANTIZERS: dict[str, LinkQuantizerEntry] = {
    "bf16": LinkQuantizerEntry(f"{_MATH}.quantizers.floats.BFloat16", lambda width: 2 * width),
    "int4": LinkQuantizerEntry(f"{_LEAF}.int4.Int4", lambda width: -(-width // 2) + 1),
    "dither5": LinkQuantizerEntry(f"{_LEAF}.dithered.FiveBits", lambda width: -(-5 * width // 8) + 1),
    "dither3": LinkQuantizerEntry(f"{_LEAF}.dithered.ThreeBits", lambda width: -(-3 * width // 8) + 1),
}
"""By the name in ``link.dtype`` and ``link.gradient_dtype``."""

INDEX_CODES: Mapping[str, str] = {
    "elias-fano": f"{_MATH}.indices.EliasFano",
    "enumerative": f"{_LEAF}.enumerative.Enumerative",
}
"""By the name in ``outer.indices``: module and class."""
