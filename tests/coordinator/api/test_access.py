"""The API of a coordinator: certificates, bans, calls of the operator alone, and limits of calls."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.api import enrollment
from coordinator.api.public_server import public_server
from coordinator.authority import ServerCertificate, open_authority
from protocol.errors import ErrorCode
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.pb import operator_pb2, operator_pb2_grpc
from protocol.server.gateway import Gateway, listen_on
from protocol.server.limits import source_of
from protocol.status import CauseCode
from protocol.trust.envelope import enrollment_message, renewal_message
from protocol.trust.names import peer_uri
from protocol.types import PROTOCOL_VERSION, PeerId, Role
from protocol.wire.operator_calls import (
    MOST_BYTES,
    BanPeer,
    GoOn,
    HoldRun,
    InviteStatus,
    IssueInvite,
    ListInvites,
    ListPeers,
    ListRollbacks,
    RestoreRound,
    TakeName,
    UnbanPeer,
    WithdrawInvite,
)
from protocol.wire.typed_calls import Request, name_of
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_process import (
    Running,
    certificate_of,
    channel_to,
    enroll_request,
    failure_of,
    new_key,
    pem,
    refusal_of,
    running,
    spki,
    update_where,
)
from tests.support.hostile import half_open

A, B, C = (keyed(i) for i in range(3))


REFUSED = {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE}
"""By the admission, or by gRPC itself: it refuses what exceeds the open calls of one connection."""

# One request to every call of the API that speaks in a peer's name.
CALLS = {
    "Join": pb.JoinRequest(peer=A.peer, protocol_version=PROTOCOL_VERSION, role="replica"),
    "Renew": pb.RenewRequest(peer=A.peer),
    "Heartbeat": pb.HeartbeatRequest(peer=A.peer),
    "Leave": pb.LeaveRequest(peer=A.peer),
    "Match": pb.MatchRequest(peer=A.peer),
    "Report": pb.ReportRequest(peer=A.peer),
    "AwaitDecision": pb.AwaitDecisionRequest(peer=A.peer),
    "Attest": pb.AttestRequest(peer=A.peer),
    "Measure": pb.Measurement(peer=A.peer),
}


ADMIN_CALLS = (
    IssueInvite(1, 60),
    ListInvites(),
    WithdrawInvite("x"),
    ListPeers(),
    BanPeer(B.peer),
    UnbanPeer(B.peer),
    TakeName(B.peer),
    HoldRun(),
    GoOn(),
    RestoreRound(0),
    ListRollbacks(),
)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    """A coordinator that waits for two full replicas of two stages."""
    async with running(spec_of(), tmp_path) as coordinator:
        yield coordinator


class TestTls:
    async def test_only_enrollment_answers_without_a_certificate(self, run: Running) -> None:
        async with channel_to(run.address, run.authority.pem, None) as channel:
            call = pb_grpc.CoordinatorStub(channel).Status(pb.StatusRequest())
            assert await failure_of(call) is grpc.StatusCode.UNAVAILABLE
        async with channel_to(run.enrollment, run.authority.pem, None) as channel:
            call = pb_grpc.CoordinatorStub(channel).Status(pb.StatusRequest())
            assert await failure_of(call) is grpc.StatusCode.UNIMPLEMENTED

    async def test_plain_connections_are_not_answered(self, run: Running) -> None:
        async with grpc.aio.insecure_channel(run.address) as channel:
            call = pb_grpc.CoordinatorStub(channel).Status(pb.StatusRequest())
            assert await failure_of(call) is grpc.StatusCode.UNAVAILABLE

    async def test_a_certificate_of_another_authority_is_refused(self, run: Running, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        other = open_authority(tmp_path / "other", run.spec.name)
        async with channel_to(run.address, run.authority.pem, certificate_of(other, A)) as channel:
            call = pb_grpc.CoordinatorStub(channel).Status(pb.StatusRequest())
            assert await failure_of(call) is grpc.StatusCode.UNAVAILABLE

    async def test_a_newcomer_sends_nothing_to_another_authority(self, run: Running, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        other = open_authority(tmp_path / "other", run.spec.name)
        invite = await run.invite()
        async with channel_to(run.enrollment, other.pem, None) as channel:
            call = pb_grpc.EnrollmentStub(channel).Enroll(enroll_request(A, invite))
            assert await failure_of(call) is grpc.StatusCode.UNAVAILABLE
        await run.enroll(A, invite)

    async def test_an_expired_certificate_is_refused(self, run: Running) -> None:
        late = replace(run.authority, clock=lambda: time.time() - 2 * run.authority.seconds)
        async with channel_to(run.address, run.authority.pem, certificate_of(late, A)) as channel:
            call = pb_grpc.CoordinatorStub(channel).Status(pb.StatusRequest())
            assert await failure_of(call) is grpc.StatusCode.UNAVAILABLE


class TestCertificates:
    @pytest.mark.parametrize("name", CALLS)
    async def test_no_call_works_with_the_certificate_of_another(self, run: Running, name: str) -> None:
        await run.join(A)
        for other in (B, None):
            refusal = await refusal_of(getattr(run.stub(other), name)(CALLS[name]))
            assert refusal.code is ErrorCode.CERTIFICATE_REFUSED
            assert A.peer in refusal.cause

    async def test_a_peer_cannot_watch_in_the_name_of_another(self, run: Running) -> None:
        await run.join(A)
        watch = run.stub(B).Watch(pb.WatchRequest(peer=A.peer))
        assert (await refusal_of(watch.read())).code is ErrorCode.CERTIFICATE_REFUSED

    async def test_a_certificate_without_a_peer_name_is_refused(self, run: Running) -> None:
        """The coordinator's certificate is not for clients, and an empty name matches no peer."""
        key = new_key()
        pair = (pem(key), run.authority.for_coordinator(key.public_key()))
        async with channel_to(run.address, run.authority.pem, pair) as channel:
            call = pb_grpc.CoordinatorStub(channel).Status(pb.StatusRequest())
            assert await failure_of(call) is grpc.StatusCode.UNAVAILABLE
        refusal = await refusal_of(run.stub(A).Heartbeat(pb.HeartbeatRequest()))
        assert refusal.code is ErrorCode.CERTIFICATE_REFUSED

    async def test_every_member_and_the_operator_see_the_status(self, run: Running) -> None:
        for peer in (A, None):
            assert (await run.stub(peer).Status(pb.StatusRequest())).record

    async def test_a_dead_node_does_not_live_by_the_tools_that_use_its_certificate(
        self, tmp_path: Path
    ) -> None:
        spec = spec_of(timing__heartbeat=0.1, timing__lost_after=0.4)
        async with running(spec, tmp_path) as run, asyncio.timeout(20):
            await run.join(A)
            while lifecycle_of(A, await run.stub(A).Status(pb.StatusRequest())) != "gone":
                pass

    async def test_a_renewed_certificate_opens_the_api_while_a_stream_goes_on(self, run: Running) -> None:
        await run.join(A)
        watch = run.stub(A).Watch(pb.WatchRequest(peer=A.peer))
        assert (await watch.read()).waiting
        key = new_key()
        reply = await run.stub(A).Renew(renewal(A, run, spki(key)))
        async with channel_to(run.address, run.authority.pem, (pem(key), reply.certificate_pem)) as channel:
            await pb_grpc.CoordinatorStub(channel).Heartbeat(pb.HeartbeatRequest(peer=A.peer))
        await run.join(B)
        await update_where(watch, lambda update: bool(update.signed_plan))

    async def test_a_renewal_needs_the_identity_and_not_the_tls_key_alone(self, run: Running) -> None:
        key = spki(new_key())
        thief = pb.RenewRequest(
            peer=A.peer, tls_public_key=key, proof=B.sign(renewal_message(run.authority.pin, key))
        )
        enrollment = pb.RenewRequest(
            peer=A.peer, tls_public_key=key, proof=A.sign(enrollment_message(run.authority.pin, key, ""))
        )
        for request in (thief, enrollment):
            assert (await refusal_of(run.stub(A).Renew(request))).code is ErrorCode.BAD_REQUEST

    async def test_newcomers_never_see_an_old_certificate_of_the_server(self, tmp_path: Path) -> None:
        now = time.time() - 10_000.0
        authority = open_authority(tmp_path, "run-1", 3600.0, lambda: now)
        listener = listen_on("127.0.0.1", 0)
        server = public_server(
            Gateway(listener),
            partial(enrollment.new_server, enrollment.admission(source_of, lambda _: None)),
            ServerCertificate(authority),
            authority,
            clients=False,
            refused=Counter(),
        )
        await server.start()
        port = server.gateway.port
        now = time.time()
        async with channel_to(f"127.0.0.1:{port}", authority.pem, None) as channel:
            call = pb_grpc.EnrollmentStub(channel).Enroll(pb.EnrollRequest())
            assert await failure_of(call) is grpc.StatusCode.UNIMPLEMENTED  # and so the handshake succeeded
        await server.stop(0)


class TestBans:
    async def test_a_ban_ends_the_peers_streams_and_calls_and_tells_the_others(self, run: Running) -> None:
        await run.join(A)
        await run.join(B)
        watches = {peer: run.stub(peer).Watch(pb.WatchRequest(peer=peer.peer)) for peer in (A, B)}
        for watch in watches.values():
            assert (await watch.read()).signed_plan
        waiting = run.match(A, 0, 1)
        while (await run.status()).cause.code is not CauseCode.OFFERS_LACKING:
            assert not waiting.done()
        await run.ask(BanPeer(A.peer, "sends noise"))
        for call in (waiting, watches[A].read(), run.match(A, 0, 1), run.join(A)):
            refusal = await refusal_of(call)
            assert refusal.code is ErrorCode.BANNED
            assert "sends noise" in refusal.cause
        update = await watches[B].read()
        assert list(update.banned) == [A.peer]
        assert {peer.peer: peer.lifecycle for peer in (await run.status()).peers}[A.peer] == "gone"

    @pytest.mark.parametrize("name", CALLS)
    async def test_no_call_works_for_a_banned_peer(self, run: Running, name: str) -> None:
        await run.ask(BanPeer(A.peer))
        assert (await refusal_of(getattr(run.stub(A), name)(CALLS[name]))).code is ErrorCode.BANNED
        assert (await refusal_of(run.stub(A).Status(pb.StatusRequest()))).code is ErrorCode.BANNED

    async def test_a_ban_outlives_a_restart_until_it_is_lifted(self, tmp_path: Path) -> None:
        async with running(spec_of(), tmp_path) as first:
            for _ in range(2):
                await first.ask(BanPeer(A.peer))
        async with running(spec_of(), tmp_path) as second:
            assert (await refusal_of(second.join(A))).code is ErrorCode.BANNED
            for _ in range(2):
                await second.ask(UnbanPeer(A.peer))
            await second.join(A)


class TestOperator:
    @pytest.mark.parametrize("call", ADMIN_CALLS, ids=lambda call: name_of(type(call)))
    async def test_admin_calls_are_the_operators_alone(self, run: Running, call: Request[object]) -> None:
        refusal = await refusal_of(run.ask(call, A))
        assert refusal.code is ErrorCode.CERTIFICATE_REFUSED
        assert peer_uri(A.peer) in refusal.cause
        assert not await run.ask(ListInvites())
        assert not await run.ask(ListPeers())

    async def test_invites_are_listed_with_their_use_and_without_their_secret(self, run: Running) -> None:
        invite = await run.invite(uses=3, role="stage")
        await run.enroll(A, invite)
        await run.ask(WithdrawInvite(invite.id))
        (listed,) = await run.ask(ListInvites())
        assert 3500 < listed.expires_in_seconds <= 3600
        left = listed.expires_in_seconds
        assert listed == InviteStatus(invite.id, 3, (A.peer,), left, Role.STAGE, True)

    async def test_peers_are_listed_however_they_came_to_be_known(self, run: Running) -> None:
        invite = await run.invite()
        await run.enroll(A, invite)
        await run.join(B)
        await run.ask(BanPeer(C.peer, "known elsewhere"))
        listed = {peer.peer: peer for peer in await run.ask(ListPeers())}
        assert set(listed) == {A.peer, B.peer, C.peer}
        assert (listed[A.peer].invite, listed[A.peer].lifecycle) == (invite.id, None)
        assert (listed[B.peer].lifecycle, listed[B.peer].role) == ("ready", "replica")
        assert (listed[C.peer].banned, listed[C.peer].reason) == (True, "known elsewhere")

    @pytest.mark.parametrize(
        ("call", "code"),
        [
            (IssueInvite(0, 60), ErrorCode.BAD_REQUEST),
            (IssueInvite(100_000, 60), ErrorCode.BAD_REQUEST),
            (IssueInvite(1, 0), ErrorCode.BAD_REQUEST),
            (IssueInvite(1, float("nan")), ErrorCode.BAD_REQUEST),
            (IssueInvite(1, float("inf")), ErrorCode.BAD_REQUEST),
            (WithdrawInvite("000000000000"), ErrorCode.INVITE_UNKNOWN),
            (BanPeer("unknown"), ErrorCode.BAD_REQUEST),
            (BanPeer(A.peer, "\x1b[2J"), ErrorCode.BAD_REQUEST),
        ],
    )
    async def test_invalid_requests_of_the_operator_are_refused(
        self, run: Running, call: Request[object], code: ErrorCode
    ) -> None:
        assert (await refusal_of(run.ask(call))).code is code

    @pytest.mark.parametrize(
        ("method", "body"),
        [
            ("IssueInvite", b'{"uses":1,"valid_seconds":60,"role":"king"}'),
            ("IssueInvite", b'{"uses":1,"valid_seconds":60,"more":1}'),
            ("IssueInvite", b'{"uses":1'),
            ("AskWhy", b'{"question":"%s"}' % (b"x" * MOST_BYTES)),
            ("Nothing", b"{}"),
        ],
    )
    async def test_what_is_no_call_is_refused(self, run: Running, method: str, body: bytes) -> None:
        stub = operator_pb2_grpc.OperatorStub(run.channel(None))
        refusal = await refusal_of(stub.Ask(operator_pb2.OperatorCall(method=method, body=body)))
        assert refusal.code is ErrorCode.BAD_REQUEST


class TestLimits:
    async def test_too_frequent_joins_of_one_peer_are_refused_and_others_are_not(self, run: Running) -> None:
        codes = [(await refusal_of(run.join(A, role="conductor"))).code for _ in range(25)]
        assert codes[0] is ErrorCode.BAD_REQUEST
        assert codes[-1] is ErrorCode.RATE_LIMITED
        await run.join(B)

    async def test_one_peer_cannot_keep_many_calls_open(self, run: Running) -> None:
        await run.join(A)
        watches = [run.stub(A).Watch(pb.WatchRequest(peer=A.peer)) for _ in range(41)]
        outcomes = [await first_of(watch) for watch in watches]
        assert outcomes.count(ErrorCode.RATE_LIMITED) == 1
        await run.join(B)
        for watch in watches:
            watch.cancel()
        # Its places are free again as soon as the calls have ended.
        while await first_of(run.stub(A).Watch(pb.WatchRequest(peer=A.peer))) is not None:
            pass

    @pytest.mark.parametrize("is_banned", [False, True])
    async def test_calls_without_a_request_keep_no_other_peer_out(
        self, run: Running, is_banned: bool
    ) -> None:
        if is_banned:
            await run.ask(BanPeer(A.peer))
        calls = half_open(run.channel(A), "/hetnode.v1.Coordinator/Heartbeat", 200)
        await asyncio.gather(*(run.join(peer) for peer in (B, C)))
        # Of a member a few calls may wait for their request, of a banned peer none.
        refused = asyncio.as_completed([asyncio.create_task(call.code()) for call in calls])
        for _ in range(200 if is_banned else 160):
            assert await next(refused) in REFUSED
        for call in calls:
            call.cancel()

    async def test_a_connection_of_refused_calls_alone_is_closed(self, run: Running) -> None:
        await run.ask(BanPeer(A.peer))
        calls = half_open(run.channel(A), "/hetnode.v1.Coordinator/Heartbeat", 1000)
        codes = {await call.code() for call in calls}
        assert codes == REFUSED

    async def test_calls_of_strangers_without_a_request_keep_no_newcomer_out(self, run: Running) -> None:
        invite = await run.invite(uses=2)
        async with AsyncExitStack() as stack:
            for _ in range(20):
                channel = await stack.enter_async_context(channel_to(run.enrollment, run.authority.pem, None))
                half_open(channel, "/hetnode.v1.Enrollment/Enroll", 4)
            for peer in (A, B):
                await run.enroll(peer, invite)

    async def test_bad_calls_write_a_few_lines(self, run: Running, caplog: pytest.LogCaptureFixture) -> None:
        bad = run.channel(A).unary_unary("/hetnode.v1.Coordinator/Heartbeat")
        for _ in range(100):
            assert await bad(b"\xff").code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caplog.text.count("refused hetnode:peer:") == 10


def lifecycle_of(peer: Keyed, status: pb.StatusReply) -> str:
    return next(each.lifecycle for each in status.peers if each.peer == peer.peer)


async def first_of(watch: Any) -> ErrorCode | None:
    """The code with which a stream is refused; None where it begins."""
    try:
        await watch.read()
    except grpc.aio.AioRpcError as error:
        label = dict(error.trailing_metadata() or ())["hetnode-code"]
        return ErrorCode.from_label(str(label))
    return None


def renewal(peer: Keyed, run: Running, key: bytes) -> pb.RenewRequest:
    proof = peer.sign(renewal_message(run.authority.pin, key))
    return pb.RenewRequest(peer=PeerId(peer.peer), tls_public_key=key, proof=proof)
