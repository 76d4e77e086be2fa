"""The digest of an anchor, under which each chunk of its bytes can be verified alone.

An anchor's bytes are those of its tensors, float32 little-endian and row-major, in ascending order of their
names: the data section of a safetensors file. They are cut into chunks; the digest covers names, shapes and
the hash of every chunk. Replicas compare it after a round, and new peers verify checkpoints with it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

CHUNK_BYTES = 4 << 20
HASH_BYTES = 32


def header_of(shapes: Mapping[str, Sequence[int]], dtype: str = "f32") -> str:
    """Names and shapes in one canonical text, whatever the order of `shapes`; `dtype` is that of all."""
    ordered = [[name, list(shapes[name])] for name in sorted(shapes)]
    return json.dumps({"dtype": dtype, "tensors": ordered}, separators=(",", ":"))


def size_of(shapes: Mapping[str, Sequence[int]]) -> int:
    """Bytes of all tensors."""
    return 4 * sum(math.prod(shape) for shape in shapes.values())


def chunk_count(nbytes: int) -> int:
    return -(-nbytes // CHUNK_BYTES)


def chunk_range(nbytes: int, index: int) -> range:
    """The bytes of chunk `index` (from 0); the last one may be shorter. IndexError beyond it."""
    if not 0 <= index < chunk_count(nbytes):
        raise IndexError(f"{nbytes} bytes have no chunk {index}")
    return range(index * CHUNK_BYTES, min(nbytes, (index + 1) * CHUNK_BYTES))


def digest_of(header: str, chunk_hashes: Sequence[bytes]) -> str:
    """sha-256 (hex) over the header and the sha-256 of every chunk, in order."""
    root = hashlib.sha256(header.encode() + b"\n")
    for chunk_hash in chunk_hashes:
        root.update(chunk_hash)
    return root.hexdigest()
