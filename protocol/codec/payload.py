"""One stage's pseudo-gradient as bytes: a payload whose length is known before the first byte arrives.

Layout: a header (magic, version, fingerprint of names, shapes and codec), then tensor after tensor in
canonical order, each as [magnitudes, float32] [indices, chunk after chunk] codes. The codec leaves out the
parts in brackets that it does not need. All sizes follow from the spec, none from the bytes, and every
content has exactly one valid form.

For 32 of 4096, indices take 36 bytes per chunk ("elias-fano") or 33.4 ("enumerative"), 2-bit codes 8.

Shapes: c chunks of equal size n, k indices of each, s values of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pkgutil import resolve_name

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import ErrorCode, HetnodeError
from protocol.math.indices import index_code
from protocol.math.payload_layout import PayloadLayout, TensorLayout
from protocol.math.quantizers.loading import payload_quantizer
from protocol.math.topk import SparseTensor
from protocol.spec.quantizers import INDEX_CODES, PAYLOAD_QUANTIZERS

# All of them now, and not when one is first used: the others of a round wait for the first step.
for _path in (*(each.path for each in PAYLOAD_QUANTIZERS.values()), *INDEX_CODES.values()):
    resolve_name(_path)


def encode(layout: PayloadLayout, sparse: Mapping[str, SparseTensor]) -> bytes:
    """The payload with `sparse`, one entry per tensor of `layout`; values are rounded to float32."""
    return join(layout, (encode_tensor(tensor, sparse[name]) for name, tensor in layout.tensors.items()))


def join(layout: PayloadLayout, parts: Iterable[bytes]) -> bytes:
    """The payload of its encoded tensors, in canonical order."""
    data = b"".join((layout.header, *parts))
    assert len(data) == layout.nbytes, "a payload's length follows from its layout"
    return data


def encode_tensor(layout: TensorLayout, sparse: SparseTensor) -> bytes:
    """One tensor's part of a payload."""
    *before, codes = payload_quantizer(layout.outer).pack(sparse.quantized, layout.sent)
    parts = [array.tobytes() for array in before]
    if sparse.indices_s is not None:
        positions_s = sparse.indices_s.numpy()
        for group, values, starts_c1 in layout.sections():
            indices_ck = positions_s[values].reshape(group.count, group.k) - starts_c1
            parts.append(index_code(layout.outer, group.size, group.k).encode(indices_ck).tobytes())
    return b"".join((*parts, codes.tobytes()))


def decode(layout: PayloadLayout, data: bytes) -> dict[str, SparseTensor]:
    """The content of a payload from any peer: finite values at positions inside the tensors of `layout`.

    Raises:
        HetnodeError: PAYLOAD_CORRUPT for any other bytes. The bytes never determine how much is allocated.
    """
    if len(data) != layout.nbytes:
        raise _corrupt(f"It has {len(data)} bytes instead of {layout.nbytes}.")
    # The header's hash covers names, shapes and codec: a payload of another layout is refused here.
    if data[: len(layout.header)] != layout.header:
        raise _corrupt(f"Its header is not that of codec {layout.codec} for this stage.")
    raw = np.frombuffer(data, np.uint8)
    sparse, start = {}, len(layout.header)
    for name, tensor_layout in layout.tensors.items():
        stop = start + layout.lengths[name]
        try:
            sparse[name] = _decode_tensor(tensor_layout, raw[start:stop])
        except ValueError as error:
            raise _corrupt(f"Tensor '{name}': {error}.") from None
        start = stop
    return sparse


def _decode_tensor(layout: TensorLayout, raw: NDArray[np.uint8]) -> SparseTensor:
    """One tensor from bytes of the right length. Raises ValueError if they are not valid."""
    quantizer, indices_s = payload_quantizer(layout.outer), None
    parts = []
    for part in quantizer.parts(layout.sent)[:-1]:
        parts.append(raw[: part.nbytes])
        raw = raw[part.nbytes :]
    if not layout.outer.dense:
        positions_s = np.empty(layout.sent, np.int64)
        for group, values, starts_c1 in layout.sections():
            code = index_code(layout.outer, group.size, group.k)
            nbytes = code.nbytes(group.count)
            positions_s[values] = (code.decode(raw[:nbytes], group.count) + starts_c1).ravel()
            raw = raw[nbytes:]
        indices_s = torch.from_numpy(positions_s)
    return SparseTensor.of(indices_s, quantizer.unpack([*parts, raw], layout.sent))


def _corrupt(cause: str) -> HetnodeError:
    remedy = "It is left out of the round. Its owner has to update its program."
    return HetnodeError(ErrorCode.PAYLOAD_CORRUPT, f"A payload cannot be used. {cause}", remedy)
