"""The quantizers and index codes that a run can name. A new one: a line here, and a file.

The coordinator and the command line read specifications without torch, which the classes need. So each line
gives module and class as text. Those of protocol.formats are a leaf: nothing but their lines names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizerEntry:
    """A quantizer of the values of payloads, or of activations and gradients on links.

    Attributes:
        path: module and class.
        bits: of one value.
        scale_bytes: on a link, beside the values of each token.
    """

    path: str
    bits: int
    scale_bytes: int = 0

    def token_bytes(self, width: int) -> int:
        """Bytes of one token with `width` values on a link."""
        return -(-self.bits * width // 8) + self.scale_bytes


_MATH, _LEAF = (__name__.replace("spec.quantizers", each) for each in ("math", "formats"))

PAYLOAD_QUANTIZERS: Mapping[str, QuantizerEntry] = {
    "2bit": QuantizerEntry(f"{_MATH}.quantizers.magnitudes.TwoBits", 2),
    "1bit": QuantizerEntry(f"{_MATH}.quantizers.magnitudes.OneBit", 1),
    "none": QuantizerEntry(f"{_MATH}.quantizers.magnitudes.Float32Values", 32),
}
"""By the name in ``outer.quantizer``."""

LINK_QUANTIZERS: dict[str, QuantizerEntry] = {
    "bf16": QuantizerEntry(f"{_MATH}.quantizers.floats.BFloat16", 16),
    "dither5": QuantizerEntry(f"{_LEAF}.dithered.FiveBits", 5, 1),
    "dither3": QuantizerEntry(f"{_LEAF}.dithered.ThreeBits", 3, 1),
}
"""By the name in ``link.dtype`` and ``link.gradient_dtype``."""

INDEX_CODES: Mapping[str, str] = {
    "elias-fano": f"{_MATH}.indices.EliasFano",
    "enumerative": f"{_LEAF}.enumerative.Enumerative",
}
"""By the name in ``outer.indices``: module and class."""
