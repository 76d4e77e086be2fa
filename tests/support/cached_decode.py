"""The decoder of payloads with a cache: all replicas of a swarm are in one process."""

from __future__ import annotations

from collections.abc import Callable

from protocol.codec.payload import decode
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import SparseTensor


def cached_decode() -> Callable[[PayloadLayout, bytes], dict[str, SparseTensor]]:
    """`decode` that decodes equal payloads once. No caller changes its result.

    Each replica decodes each payload once. With all replicas in one process this would take up to a third of
    the time of a test.
    """
    cache: dict[tuple[bytes, bytes], dict[str, SparseTensor]] = {}

    def decode_once(layout: PayloadLayout, data: bytes) -> dict[str, SparseTensor]:
        key = layout.header, data
        if key not in cache:
            cache[key] = decode(layout, data)
        return cache[key]

    return decode_once
