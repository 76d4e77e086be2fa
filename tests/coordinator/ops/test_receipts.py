"""Receipts of a real coordinator: they agree with its log, across restarts, and with nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.ops.receipts import check_receipt
from coordinator.store.log_copy import opened_copy
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.receipt import Receipt, open_receipt
from protocol.wire.operator_calls import AskReceipt, BanPeer
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_process import COORDINATOR, Running, refusal_of, running

A, B, C = (keyed(i) for i in range(3))
SPEC = spec_of(stages=2, replicas=2, rounds=4)


async def receipt_of(run: Running, peer: Keyed) -> Receipt:
    return open_receipt((await run.ask(AskReceipt(), peer)).encode())


def recount(run: Running, receipt: Receipt) -> None:
    """As anybody does who has a copy of the log. Raises RECEIPT_MISMATCH."""
    with opened_copy(run.folder, COORDINATOR.peer) as (spec, store):
        check_receipt(receipt, spec, store.events(), store.row_hash(receipt.log_row))


async def play(run: Running, *rounds: int) -> None:
    for round_number in rounds:
        for stage in range(2):
            await run.settle(stage, round_number, A, B)


async def test_receipts_are_exact_and_only_grow_also_across_restarts(tmp_path: Path) -> None:
    async with running(SPEC, tmp_path) as run:
        await run.join(A, name="José")
        await run.join(B)
        assert (await refusal_of(run.ask(AskReceipt(), A))).code is ErrorCode.NO_CREDIT
        await play(run, 1)
        first = await receipt_of(run, A)
        recount(run, first)
    samples = SPEC.samples_per_round(SPEC.inner.microbatches) * SPEC.model.context
    assert (first.run, first.spec_hash, first.coordinator) == (run.run, SPEC.hash, COORDINATOR.peer)
    assert (first.peer, first.name) == (A.peer, "José")
    assert (first.stage_rounds, first.first_round, first.last_round) == (2, 1, 1)
    assert (first.stage_tokens, first.payload_bytes) == (2 * samples, 200)
    async with running(SPEC, tmp_path) as run:
        again = await receipt_of(run, A)
        assert (again.stage_tokens, again.stage_rounds) == (first.stage_tokens, first.stage_rounds)
        assert again.log_row > first.log_row  # the restart is an event
        await run.join(A)
        await run.join(B)
        await play(run, 2, 3)
        await run.stub(A).Leave(pb.LeaveRequest(peer=A.peer, reason="r"))
        last = await receipt_of(run, A)  # it is not live any more
        recount(run, last)
        recount(run, first)  # an old receipt stays valid
        assert (last.stage_rounds, last.first_round, last.last_round, last.name) == (6, 1, 3, "")
        assert last.stage_tokens == 6 * samples
        assert (await receipt_of(run, B)).stage_tokens == 6 * samples


async def test_a_receipt_is_for_peers_with_credit_that_are_not_banned_and_ask_seldom(tmp_path: Path) -> None:
    async with running(SPEC, tmp_path) as run:
        await run.join(A)
        await run.join(B)
        await play(run, 1)
        for caller, code in ((None, ErrorCode.CERTIFICATE_REFUSED), (C, ErrorCode.NO_CREDIT)):
            assert (await refusal_of(run.ask(AskReceipt(), caller))).code is code
        for _ in range(20):
            assert (await receipt_of(run, A)).peer == A.peer
        assert (await refusal_of(run.ask(AskReceipt(), A))).code is ErrorCode.RATE_LIMITED
        await run.ask(BanPeer(B.peer))
        assert (await refusal_of(run.ask(AskReceipt(), B))).code is ErrorCode.BANNED


async def test_what_the_log_does_not_say_is_a_mismatch(tmp_path: Path) -> None:
    async with running(SPEC, tmp_path / "one") as run, running(SPEC, tmp_path / "two") as other:
        for each in (run, other):
            await each.join(A)
            await each.join(B)
            await play(each, 1)
        receipt = await receipt_of(run, A)
        # The same specification, coordinator key and figures: but the log is another run's.
        with pytest.raises(HetnodeError) as refused:
            recount(other, receipt)
        assert refused.value.code is ErrorCode.RECEIPT_MISMATCH
        # Signed by a coordinator that lies about its own log.
        for lie in (
            *({"stage_rounds": 1}, {"payload_bytes": 0}, {"last_round": 4}),
            *({name: "0" * 64} for name in ("log_hash", "spec_hash")),
            *({"stage_tokens": receipt.stage_tokens + 1}, {"first_round": 2}, {"name": "Ada"}),
            *({"log_row": receipt.log_row - 1}, {"log_row": 10**6}, {"peer": C.peer}),
        ):
            with pytest.raises(HetnodeError) as refused:
                recount(run, replace(receipt, **lie))
            assert refused.value.code is ErrorCode.RECEIPT_MISMATCH, lie
