"""The size of the chunks in which a node computes the loss. The cost model plans memory with it."""

from __future__ import annotations

_CPU_BYTES = 2**26
_ACCELERATOR_BYTES = 2**29
"""Larger, because an accelerator needs larger matrices to be busy."""


def chunk_rows(vocabulary: int, width: int, on_cpu: bool) -> int:
    """Tokens of one chunk: its float32 logits fill a fixed number of bytes, or as many as the head.

    With fewer than `width` tokens, adding to the gradient of the head (of V d values) in every chunk would
    cost more than the logits save.
    """
    nbytes = _CPU_BYTES if on_cpu else _ACCELERATOR_BYTES
    return max(width, nbytes // (4 * vocabulary))
