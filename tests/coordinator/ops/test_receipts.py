"""Receipts of a real coordinator: they grow with its rounds, across restarts."""

from __future__ import annotations

from pathlib import Path

from protocol.errors import ErrorCode
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.owner import OwnerKey
from protocol.trust.receipt import Receipt, open_receipt
from protocol.wire.operator_calls import AskRank, AskReceipt, BanPeer, NameOwner, Rank
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_process import COORDINATOR, Running, refusal_of, running

A, B, C = (keyed(i) for i in range(3))
SPEC = spec_of(stages=2, replicas=2, rounds=4)


async def receipt_of(run: Running, peer: Keyed) -> Receipt:
    return open_receipt((await run.ask(AskReceipt(), peer)).encode())


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
        assert (last.stage_rounds, last.first_round, last.last_round, last.name) == (6, 1, 3, "")
        assert last.stage_tokens == 6 * samples
        assert (await receipt_of(run, B)).stage_tokens == 6 * samples


async def test_a_rank_is_by_stage_tokens_among_those_that_have_any(tmp_path: Path) -> None:
    async with running(SPEC, tmp_path) as run:
        for peer in (A, B, C):
            await run.join(peer)
        await play(run, 1)
        assert [await run.ask(AskRank(), each) for each in (A, B)] == [Rank(1, 2)] * 2
        for caller, code in ((None, ErrorCode.CERTIFICATE_REFUSED), (C, ErrorCode.NO_CREDIT)):
            assert (await refusal_of(run.ask(AskRank(), caller))).code is code


async def test_a_receipt_and_a_rank_sum_by_owner_across_a_restart(tmp_path: Path) -> None:
    key = OwnerKey(b"a" * 16)
    async with running(SPEC, tmp_path) as run:
        for peer in (A, B, C):
            await run.join(peer)
        own = key.bind(run.run, A.peer, A.sign)
        for caller in (B, None):  # only the node itself may say whose it is
            code = (await refusal_of(run.ask(NameOwner(own), caller))).code
            assert code is ErrorCode.CERTIFICATE_REFUSED
        foreign = await refusal_of(run.ask(NameOwner(key.bind("another", A.peer, A.sign)), A))
        assert foreign.code is ErrorCode.BAD_REQUEST
        await run.ask(NameOwner(own), A)
        await run.ask(NameOwner(key.bind(run.run, B.peer, B.sign)), B)
        await play(run, 1)
        before = await receipt_of(run, A)
    async with running(SPEC, tmp_path) as run:
        found = await receipt_of(run, A)
        assert (found.owner, found.owner_nodes, found.owner_stage_tokens) == (
            key.owner,
            2,
            2 * before.stage_tokens,
        )
        assert await run.ask(AskRank(), A) == Rank(1, 1)


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
