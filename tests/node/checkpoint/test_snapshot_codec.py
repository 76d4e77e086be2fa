"""The bytes of a snapshot of the embedding, and their digest."""

from __future__ import annotations

import pytest
import torch

from node.checkpoint.snapshot_codec import decode, encode, nbytes_of, snapshot, snapshot_digest
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import CHUNK_BYTES
from protocol.math.subspace import ReceivingEnd, orthonormal_basis


def test_a_snapshot_survives_its_bytes_in_every_bit() -> None:
    table_vd = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    table_vd[0, 0] = -0.0
    taken_vd = snapshot(table_vd)
    data = encode(taken_vd)
    assert len(data) == nbytes_of(7, 5)
    assert torch.equal(decode(data, 7, 5).view(torch.int16), taken_vd.view(torch.int16))


@pytest.mark.parametrize("k", [0, 2])
def test_links_derive_the_same_from_fetched_bytes_as_from_the_table_of_a_host(k: int) -> None:
    table_vd = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    basis_dd = orthonormal_basis(4, seed=2)
    fetched_vd = decode(encode(snapshot(table_vd)), 7, 4)
    ids_bl, x_blk = torch.tensor([[0, 6, 3]]), torch.ones(1, 3, k or 4)
    here, there = (ReceivingEnd(k, basis_dd, each) for each in (snapshot(table_vd), fetched_vd))
    assert torch.equal(here.expand_forward(x_blk, ids_bl), there.expand_forward(x_blk, ids_bl))


def test_the_bytes_are_little_endian_and_row_major_whatever_the_layout_in_memory() -> None:
    taken_vd = torch.tensor([[1.0, 2.0], [-1.0, 0.0]], dtype=torch.bfloat16)
    assert encode(taken_vd).hex() == "803f004080bf0000"
    assert encode(taken_vd.T.contiguous().T) == encode(taken_vd)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "0 bytes instead of 8"),
        (bytes(7), "7 bytes"),
        (bytes(10), "10 bytes"),
        (bytes(6) + b"\x80\x7f", "not finite"),
        (bytes(6) + b"\xc0\xff", "not finite"),
    ],
)
def test_other_bytes_are_refused(data: bytes, cause: str) -> None:
    with pytest.raises(HetnodeError, match=cause) as refused:
        decode(data, 2, 2)
    assert refused.value.code is ErrorCode.PAYLOAD_CORRUPT


def test_the_digest_depends_on_every_byte_and_on_the_shape() -> None:
    width = CHUNK_BYTES // 4
    data = bytes(nbytes_of(3, width))
    changed = data[:-1] + b"\x01"
    digests = {snapshot_digest(*each) for each in ((data, 3, width), (changed, 3, width), (data, width, 3))}
    assert len(digests) == 3
    assert snapshot_digest(bytes(data), 3, width) in digests


def test_a_snapshot_is_the_nearest_bfloat16() -> None:
    table_vd = torch.tensor([[1.0, 1.0 + 2**-9], [-3.0e38, 0.1]])
    taken_vd = snapshot(table_vd)
    assert taken_vd.dtype == torch.bfloat16
    assert taken_vd.float().tolist()[0] == [1.0, 1.0]
    torch.testing.assert_close(taken_vd.float(), table_vd, rtol=2**-8, atol=0)


def test_the_largest_floats_stay_finite_so_that_peers_take_the_snapshot() -> None:
    largest = torch.finfo(torch.float32).max
    taken_vd = snapshot(torch.tensor([[largest, -largest]]))
    assert decode(encode(taken_vd), 1, 2).tolist() == [
        [each * torch.finfo(torch.bfloat16).max for each in (1, -1)]
    ]
