"""Invites and certificates: which newcomers a coordinator lets in, over real TLS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.membership.open_places import OpenTerms
from protocol.errors import ErrorCode
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.spec.run import RunSpec
from protocol.trust.envelope import enrollment_message, is_signed_by, spec_message
from protocol.trust.invite import Invite, open_invite
from protocol.types import PROTOCOL_VERSION
from protocol.wire.operator_calls import BanPeer
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import (
    COORDINATOR,
    Running,
    channel_to,
    enroll_request,
    failure_of,
    new_key,
    pem,
    refusal_of,
    running,
    spki,
)

A, B, C = (keyed(i) for i in range(3))


UNKNOWN_INVITE = Invite("h:1", "h:1", bytes(32), "00" * 6, bytes(16))


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    """A coordinator that waits for two full replicas of two stages."""
    async with running(spec_of(), tmp_path) as coordinator:
        yield coordinator


class TestEnrollment:
    async def test_an_invite_gives_a_certificate_that_opens_the_api(self, run: Running) -> None:
        invite = await run.invite()
        key = new_key()
        proof = A.sign(enrollment_message(invite.pin, spki(key), invite.id))
        reply = await run.enroll(A, invite, tls_public_key=spki(key), proof=proof)
        assert (reply.run, reply.api_address) == (run.run, run.address)
        assert reply.coordinator == COORDINATOR.peer
        assert reply.authority_pem == run.authority.pem
        assert (invite.api, invite.enrollment, invite.pin) == (run.address, run.enrollment, run.authority.pin)
        async with channel_to(run.address, reply.authority_pem, (pem(key), reply.certificate_pem)) as channel:
            request = pb.JoinRequest(
                peer=A.peer, protocol_version=PROTOCOL_VERSION, role="replica", endpoint="127.0.0.1:9"
            )
            joined = await pb_grpc.CoordinatorStub(channel).Join(request)
        assert joined.run == run.run
        assert is_signed_by(COORDINATOR.peer, spec_message(run.run, joined.spec_json), joined.spec_signature)
        assert RunSpec.from_json(joined.spec_json) == run.spec

    async def test_a_stranger_gets_no_certificate_and_joins_not_before_its_turn(self, tmp_path: Path) -> None:
        async with running(spec_of(1, 1), tmp_path, terms=OpenTerms(1, 8)) as run:
            everyone = open_invite(run.address, run.enrollment, run.authority.pin)
            early = await refusal_of(run.enroll(A, everyone))
            await run.enroll(B, await run.invite())
            await run.join(B)
            assert (await run.enroll(A, everyone)).certificate_pem
            late = await refusal_of(run.enroll(C, everyone))
            for refusal in early, late, await refusal_of(run.join(C)):
                assert refusal.code is ErrorCode.WAITING_LIST
                assert "place 1 of 1" in refusal.cause
            await run.join(A)

    async def test_two_peers_cannot_share_the_last_use_of_an_invite(self, run: Running) -> None:
        invite = await run.invite()
        outcomes = await asyncio.gather(
            *(run.enroll(peer, invite) for peer in (A, B, C)), return_exceptions=True
        )
        assert sum(isinstance(outcome, pb.EnrollReply) for outcome in outcomes) == 1

    async def test_a_forged_invite_is_refused_and_the_real_one_still_good(self, run: Running) -> None:
        invite = await run.invite()
        forged = replace(invite, secret=bytes(16))
        assert (await refusal_of(run.enroll(A, forged))).code is ErrorCode.INVITE_FORGED
        await run.enroll(A, invite)

    @pytest.mark.parametrize(
        "changes",
        [
            {"peer": B.peer},
            {"peer": "no-peer"},
            {"peer": ""},
            {"proof": b""},
            {"proof": bytes(64)},
            {"tls_public_key": spki(new_key())},
            {"tls_public_key": b""},
            {"tls_public_key": bytes(100)},
            {"invite_id": "\x1b[2J"},
            {"invite_id": "x" * 1000},
        ],
    )
    async def test_a_claim_without_proof_is_refused_and_takes_no_use(
        self, run: Running, changes: dict[str, Any]
    ) -> None:
        invite = await run.invite()
        assert (await refusal_of(run.enroll(A, invite, **changes))).code is ErrorCode.BAD_REQUEST
        await run.enroll(A, invite)

    async def test_the_proof_for_one_authority_is_none_for_another(self, run: Running) -> None:
        invite = await run.invite()
        elsewhere = replace(invite, pin=bytes(32))
        assert (await refusal_of(run.enroll(A, elsewhere))).code is ErrorCode.BAD_REQUEST

    async def test_another_protocol_version_is_refused_before_the_invite_is_spent(self, run: Running) -> None:
        invite = await run.invite()
        refusal = await refusal_of(run.enroll(A, invite, protocol_version=99, peer="?"))
        assert refusal.code is ErrorCode.VERSION_MISMATCH
        await run.enroll(B, invite, protocol_version=99, oldest_protocol=PROTOCOL_VERSION)

    async def test_an_enrolled_peer_needs_no_invite_for_its_next_certificate(self, run: Running) -> None:
        none = replace(UNKNOWN_INVITE, id="", pin=run.authority.pin)
        assert (await refusal_of(run.enroll(A, none))).code is ErrorCode.UNKNOWN_PEER
        await run.enroll(A, await run.invite())
        await run.enroll(A, none)
        await run.ask(BanPeer(A.peer))
        assert (await refusal_of(run.enroll(A, none))).code is ErrorCode.BANNED

    async def test_the_role_of_an_invite_is_the_only_one_its_peer_may_take(self, run: Running) -> None:
        invite = await run.invite(role="stage")
        assert (await run.enroll(A, invite)).role == "stage"
        refusal = await refusal_of(run.join(A, role="replica"))
        assert refusal.code is ErrorCode.BAD_REQUEST
        assert "stage" in refusal.cause

    async def test_too_frequent_enrollments_are_refused(self, run: Running) -> None:
        async with channel_to(run.enrollment, run.authority.pem, None) as channel:
            stub = pb_grpc.EnrollmentStub(channel)
            codes = [(await refusal_of(stub.Enroll(pb.EnrollRequest()))).code for _ in range(200)]
        assert codes[:100] == [ErrorCode.VERSION_MISMATCH] * 100
        assert ErrorCode.RATE_LIMITED in codes[100:]

    async def test_strangers_use_up_their_own_attempts_and_no_newcomers(self, run: Running) -> None:
        invite = await run.invite(uses=300)
        async with channel_to(run.enrollment, run.authority.pem, None) as channel:
            stub = pb_grpc.EnrollmentStub(channel)
            forged = enroll_request(A, replace(invite, secret=bytes(16)))
            codes = [(await refusal_of(stub.Enroll(forged))).code for _ in range(200)]
            assert codes[0] is ErrorCode.INVITE_FORGED
            assert codes[-1] is ErrorCode.RATE_LIMITED
            # All from the address of the stranger.
            for number in range(200):
                assert (await stub.Enroll(enroll_request(keyed(number), invite))).certificate_pem

    async def test_a_stranger_cannot_send_much(self, run: Running) -> None:
        call = run.enroll(A, await run.invite(), proof=bytes(1 << 20))
        assert await failure_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def test_invites_and_their_uses_outlive_a_restart(self, tmp_path: Path) -> None:
        async with running(spec_of(), tmp_path) as first:
            spent, fresh = await first.invite(), await first.invite()
            await first.enroll(A, spent)
        async with running(spec_of(), tmp_path) as second:
            assert (await refusal_of(second.enroll(B, spent))).code is ErrorCode.INVITE_USED
            await second.enroll(B, fresh)

    async def test_the_secret_of_an_invite_is_kept_nowhere(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        async with running(spec_of(), tmp_path) as run:
            invite = await run.invite()
            await run.enroll(A, invite)
            await refusal_of(run.enroll(B, invite))
            needles = (invite.secret, invite.secret.hex().encode(), invite.encode().encode())
            written = b"".join(path.read_bytes() for path in tmp_path.iterdir()) + caplog.text.encode()
            assert invite.id.encode() in written
            assert not [needle for needle in needles if needle in written]
