"""Both ends of a projected link: what crosses it, and what each end must know."""

from __future__ import annotations

import torch

from protocol.math.subspace import ReceivingEnd, SendingEnd, orthonormal_basis

WIDTH, K, VOCABULARY = 16, 4, 19


def test_the_sender_projects_and_does_not_subtract_the_embedding() -> None:
    basis_dd = orthonormal_basis(WIDTH, 3)
    x_bld = torch.randn(2, VOCABULARY, WIDTH)
    assert torch.equal(SendingEnd(K, basis_dd).compress_forward(x_bld), x_bld @ basis_dd[:, :K])


def test_that_equals_the_subtraction_of_the_paper() -> None:
    """(X - T_perp[ids]) U = X U, as T_perp U = 0: in float64 up to rounding."""
    basis_dd, _ = torch.linalg.qr(orthonormal_basis(WIDTH, 3).double())
    table_vd = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    x_bld = torch.randn(2, VOCABULARY, WIDTH, dtype=torch.float64)
    ids_bl = torch.arange(VOCABULARY).expand(2, -1)
    receiver = ReceivingEnd(K, basis_dd, table_vd)
    # A token of zeros comes out as its row of T_perp.
    perpendicular_bld = receiver.expand_forward(torch.zeros(2, VOCABULARY, K).double(), ids_bl)
    torch.testing.assert_close(
        SendingEnd(K, basis_dd).compress_forward(x_bld),
        (x_bld - perpendicular_bld) @ basis_dd[:, :K],
        rtol=0,
        atol=1e-13,
    )


def test_the_receiver_adds_what_the_link_cannot_carry() -> None:
    """The embedding itself arrives whole, however narrow the link."""
    basis_dd, _ = torch.linalg.qr(orthonormal_basis(WIDTH, 3).double())
    table_vd = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    ids_bl = torch.arange(VOCABULARY).view(1, -1)
    sent_blk = SendingEnd(K, basis_dd).compress_forward(table_vd[ids_bl])
    received_bld = ReceivingEnd(K, basis_dd, table_vd).expand_forward(sent_blk, ids_bl)
    torch.testing.assert_close(received_bld, table_vd[ids_bl], rtol=0, atol=1e-13)


def test_an_uncompressed_link_changes_nothing() -> None:
    basis_dd, x_bld, ids_bl = orthonormal_basis(WIDTH, 3), torch.randn(2, 5, WIDTH), torch.zeros(2, 5).long()
    sender, receiver = SendingEnd(0, basis_dd), ReceivingEnd(0, basis_dd, torch.randn(VOCABULARY, WIDTH))
    assert sender.k == receiver.k == 0
    assert torch.equal(receiver.expand_forward(sender.compress_forward(x_bld), ids_bl), x_bld)
    assert torch.equal(sender.expand_backward(receiver.compress_backward(x_bld)), x_bld)
