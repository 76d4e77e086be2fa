"""Receipts of a real coordinator: they agree with its log, across restarts, and with nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.store.history import SqliteHistory
from coordinator.store.history_file import HISTORY_FILE
from coordinator.store.log_copy import opened_copy
from coordinator.store.receipts import check_receipt
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.spec.run import RunSpec
from protocol.trust.receipt import Receipt, encode_receipt, open_receipt
from protocol.wire.operator_calls import AskReceipt, BanPeer
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_process import COORDINATOR, Running, refusal_of, running

A, B, C = (keyed(i) for i in range(3))
SPEC = spec_of(stages=2, replicas=2, rounds=4)


async def receipt_of(run: Running, peer: Keyed) -> Receipt:
    return open_receipt((await run.ask(AskReceipt(peer.peer), peer)).encode())


def row_hash_of(store: SqliteStore, receipt: Receipt) -> bytes:
    row_hash = store.row_hash(receipt.log_row)
    assert row_hash is not None
    return row_hash


def recount(run: Running, receipt: Receipt) -> None:
    """As anybody does who has a copy of the log."""
    with opened_copy(run.folder, COORDINATOR.peer) as (spec, store):
        check_receipt(receipt, RunSpec.from_json(spec), store.events(), row_hash_of(store, receipt))


async def play(run: Running, *rounds: int) -> None:
    for round_number in rounds:
        for stage in range(2):
            await run.settle(stage, round_number, A, B)


async def test_receipts_are_exact_and_only_grow_also_across_restarts(tmp_path: Path) -> None:
    async with running(SPEC, tmp_path) as run:
        await run.join(A, name="José")
        await run.join(B)
        assert (await refusal_of(run.ask(AskReceipt(A.peer), A))).code is (ErrorCode.NO_CREDIT)
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


async def test_receipts_agree_with_the_history_at_their_row(tmp_path: Path) -> None:
    for rounds in ((1, 2), (3,)):
        async with running(SPEC, tmp_path) as run:
            await run.join(A)
            await run.join(B)
            await play(run, *rounds)
            receipt = await receipt_of(run, A)
        # The coordinator has ended: its history is complete. No later event changes the credit.
        credits = SqliteHistory(tmp_path / HISTORY_FILE).credits().credits
        (credit,) = (each for each in credits if each.peer == A.peer)
        assert credit.sequence <= receipt.log_row
        for name in ("stage_tokens", "stage_rounds", "payload_bytes", "first_round", "last_round"):
            assert getattr(credit, name) == getattr(receipt, name), name


async def test_a_receipt_is_for_the_certificates_own_peer_alone(tmp_path: Path) -> None:
    async with running(SPEC, tmp_path) as run:
        await run.join(A)
        await run.join(B)
        await play(run, 1)
        for other in (B, C, None):
            refusal = await refusal_of(run.ask(AskReceipt(A.peer), other))
            assert refusal.code is ErrorCode.CERTIFICATE_REFUSED
        refusal = await refusal_of(run.ask(AskReceipt(C.peer), C))
        assert refusal.code is ErrorCode.NO_CREDIT
        codes = set()
        for _ in range(25):
            try:
                await receipt_of(run, A)
            except Exception as error:
                codes.add(dict(error.trailing_metadata())["hetnode-code"])  # type: ignore[attr-defined]
        assert codes == {"rate-limited"}
        await run.ask(BanPeer(B.peer))
        refusal = await refusal_of(run.ask(AskReceipt(B.peer), B))
        assert refusal.code is ErrorCode.BANNED


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
        with opened_copy(run.folder, COORDINATOR.peer) as (spec, store):
            events, row_hash = tuple(store.events()), row_hash_of(store, receipt)
            row_hash_before = row_hash_of(store, replace(receipt, log_row=receipt.log_row - 1))
        assert row_hash_before != row_hash
        for name, value in {
            "stage_tokens": receipt.stage_tokens + 1,
            "stage_rounds": 1,
            "payload_bytes": 0,
            "first_round": 2,
            "last_round": 4,
            "name": "Ada",
            "log_row": receipt.log_row - 1,
            "log_hash": "0" * 64,
            "spec_hash": "0" * 64,
            "peer": C.peer,
        }.items():
            # Signed by a coordinator that lies about its own log.
            lie = Receipt(**(vars(receipt) | {name: value}))
            row_hash_of_lie = row_hash_before if name == "log_row" else row_hash
            with pytest.raises(HetnodeError) as refused:
                check_receipt(lie, RunSpec.from_json(spec), events, row_hash_of_lie)
            assert refused.value.code is ErrorCode.RECEIPT_MISMATCH, name
        assert json.loads(encode_receipt(receipt))["hetnode_receipt"] == 1
