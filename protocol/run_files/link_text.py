"""The links of a specification, for people."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.spec.link import UNCOMPRESSED, LinkSpec


def dtype_text(link: LinkSpec) -> str:
    """The number formats of `link`, such as "bf16" or "dither5, gradients dither3"."""
    same = link.dtype_of_gradients == link.dtype
    return link.dtype if same else f"{link.dtype}, gradients {link.dtype_of_gradients}"


def k_text(k: int) -> str:
    """`k` of a link for people."""
    return "uncompressed" if k == UNCOMPRESSED else str(k)


def width_text(ks: Sequence[int], width: int) -> str:
    """Links of any of `ks` in a model of `width`, such as "k = 8 of d = 128" or "uncompressed"."""
    compressed = [str(k) for k in ks if k != UNCOMPRESSED]
    parts = [f"k = {', '.join(compressed)} of d = {width}"] if compressed else []
    return " or ".join([*parts, k_text(UNCOMPRESSED)] if UNCOMPRESSED in ks else parts)
