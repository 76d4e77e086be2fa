"""The bytes of a snapshot of the embedding, and the digest under which peers fetch it.

The bytes are those of TE [V, d] in row-major order, bfloat16 little-endian. The digest covers them as that of
an anchor covers an anchor (:mod:`protocol.math.digest`), so that each chunk can be verified alone.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import chunk_count, chunk_range, digest_of, header_of
from protocol.math.embedding_snapshot import BYTES_PER_VALUE

_NAME = "snapshot"
_LARGEST = torch.finfo(torch.bfloat16).max


def nbytes_of(vocabulary: int, width: int) -> int:
    return BYTES_PER_VALUE * vocabulary * width


def snapshot(table_vd: Tensor) -> Tensor:
    """TE as a snapshot carries it, bfloat16 [V, d]: the same bits from the same committed TE everywhere.

    Values beyond those of bfloat16 become its largest ones, because peers refuse what is not finite.
    """
    return table_vd.detach().clamp(-_LARGEST, _LARGEST).to(torch.bfloat16)


def encode(snapshot_vd: Tensor) -> bytes:
    """The bytes of a bfloat16 tensor [V, d] on the CPU."""
    return snapshot_vd.contiguous().view(torch.int16).numpy().astype("<i2", copy=False).tobytes()


def decode(data: bytes, vocabulary: int, width: int) -> Tensor:
    """The snapshot [V, d], bfloat16, of what :func:`encode` returned.

    Raises:
        HetnodeError: PAYLOAD_CORRUPT where `data` has another length or a value that is not finite.
    """
    expected = nbytes_of(vocabulary, width)
    if len(data) != expected:
        raise _corrupt(f"has {len(data)} bytes instead of {expected}")
    codes = np.frombuffer(data, "<i2").astype(np.int16).reshape(vocabulary, width)
    snapshot_vd = torch.from_numpy(codes).view(torch.bfloat16)
    if not bool(torch.isfinite(snapshot_vd).all()):
        raise _corrupt("has values that are not finite")
    return snapshot_vd


def snapshot_header(vocabulary: int, width: int) -> str:
    """Shape and dtype in one canonical text: see protocol.math.digest."""
    return header_of({_NAME: (vocabulary, width)}, dtype="bf16")


def snapshot_digest(data: bytes, vocabulary: int, width: int) -> str:
    """sha-256 (hex) over the header and the hash of every chunk of `data`."""
    view = memoryview(data)
    ranges = (chunk_range(len(data), index) for index in range(chunk_count(len(data))))
    hashes = [hashlib.sha256(view[each.start : each.stop]).digest() for each in ranges]
    return digest_of(snapshot_header(vocabulary, width), hashes)


def _corrupt(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.PAYLOAD_CORRUPT, f"a snapshot of the embedding {cause}", "fetch it from another peer"
    )
