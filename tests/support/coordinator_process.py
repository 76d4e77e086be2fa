"""A real coordinator in the test's own process, with mutual TLS, and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from coordinator import app
from coordinator.authority import CERTIFICATE_SECONDS, Authority, open_authority
from protocol.errors import HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.spec.run import RunSpec
from protocol.trust.envelope import enrollment_message
from protocol.trust.invite import Invite, decode
from protocol.trust.tls import COORDINATOR_NAME
from protocol.types import PROTOCOL_VERSION, Capacity, PeerId
from protocol.wire.convert.measurements import capacity_to_pb
from protocol.wire.convert.payloads import descriptor_to_pb
from protocol.wire.rpc_errors import error_from_rpc
from tests.builders import Keyed, anchor_of, keyed

BOOTSTRAP = "/ip4/127.0.0.1/tcp/1/p2p/bootstrap"
OWNER = keyed(1000)
"""Whose key is the coordinator's."""
Pair = tuple[bytes, bytes]
"""Private key and certificate, PEM."""


class NoDht:
    """Stands where the DHT's bootstrap peer does, which is another room's."""

    def __init__(self) -> None:
        self.addresses = [BOOTSTRAP]
        self.banned: Collection[str] = ()
        self.closed = False

    async def admit(self, peers: Collection[PeerId], banned: Collection[PeerId]) -> None:
        self.banned = banned

    async def close(self) -> None:
        self.closed = True


class Running:
    """A coordinator in this process, with a separate client for each caller."""

    def __init__(
        self, spec: RunSpec, folder: Path, address: str, enrollment: str, task: asyncio.Task[None], dht: NoDht
    ) -> None:
        self.spec, self.folder, self.task, self.dht = spec, folder, task, dht
        self.address, self.enrollment = address, enrollment
        self.authority = open_authority(folder, spec.run_id)
        self._channels: dict[Keyed | None, grpc.aio.Channel] = {}

    def channel(self, who: Keyed | None) -> grpc.aio.Channel:
        """With the certificate of `who`, None being the operator."""
        if who not in self._channels:
            certificate = certificate_of(self.authority, who) if who else operator_of(self.folder)
            self._channels[who] = channel_to(self.address, self.authority.pem, certificate)
        return self._channels[who]

    def stub(self, who: Keyed | None) -> Any:
        return pb_grpc.CoordinatorStub(self.channel(who))

    @property
    def admin(self) -> Any:
        return pb_grpc.AdminStub(self.channel(None))

    async def join(self, who: Keyed, /, **changes: Any) -> pb.JoinReply:
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "peer": who.peer,
            "role": "replica",
            "capacity": capacity_to_pb(Capacity("cpu", 2**30, 2)),
            "endpoint": "127.0.0.1:9",
        }
        reply: pb.JoinReply = await self.stub(who).Join(pb.JoinRequest(**(fields | changes)))
        return reply

    def match(self, peer: Keyed, stage: int, round_number: int) -> asyncio.Task[pb.MatchReply]:
        descriptor = descriptor_to_pb(peer.payload(self.spec, stage, round_number))
        request = pb.MatchRequest(peer=peer.peer, descriptor=descriptor)
        return asyncio.ensure_future(self.stub(peer).Match(request))

    def report(
        self, peer: Keyed, stage: int, round_number: int, *owners: Keyed
    ) -> asyncio.Task[pb.DecisionReply]:
        held = [descriptor_to_pb(owner.payload(self.spec, stage, round_number)) for owner in owners]
        request = pb.ReportRequest(peer=peer.peer, stage=stage, round=round_number, held=held)
        return asyncio.ensure_future(self.stub(peer).Report(request))

    async def attest(
        self, peer: Keyed, stage: int, round_number: int, digest: str | None = None
    ) -> pb.AttestReply:
        request = pb.AttestRequest(
            peer=peer.peer,
            stage=stage,
            round=round_number,
            part="stage",
            digest=digest or anchor_of(stage, round_number),
        )
        reply: pb.AttestReply = await self.stub(peer).Attest(request)
        return reply

    async def invite(self, uses: int = 1, seconds: float = 3600.0, role: str = "") -> Invite:
        reply = await self.admin.CreateInvite(
            pb.CreateInviteRequest(uses=uses, valid_seconds=seconds, role=role)
        )
        return decode(reply.invite)

    async def enroll(self, who: Keyed, invite: Invite, /, **changes: Any) -> pb.EnrollReply:
        async with channel_to(self.enrollment, self.authority.pem, None) as channel:
            stub = pb_grpc.EnrollmentStub(channel)
            reply: pb.EnrollReply = await stub.Enroll(enroll_request(who, invite, **changes))
            return reply

    async def status(self) -> pb.StatusReply:
        reply: pb.StatusReply = await self.stub(None).Status(pb.StatusRequest())
        return reply

    async def settle(self, stage: int, round_number: int, *peers: Keyed) -> list[pb.DecisionReply]:
        await asyncio.gather(*(self.match(peer, stage, round_number) for peer in peers))
        decisions = await asyncio.gather(*(self.report(peer, stage, round_number, *peers) for peer in peers))
        for peer in peers:
            assert (await self.attest(peer, stage, round_number)).agrees
        return decisions

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        for channel in self._channels.values():
            await channel.close()


@asynccontextmanager
async def running(
    spec: RunSpec,
    folder: Path,
    listen: str = "127.0.0.1:0",
    certificate_seconds: float = CERTIFICATE_SECONDS,
) -> AsyncIterator[Running]:
    dht = NoDht()

    async def start_bootstrap() -> NoDht:
        return dht

    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        app.run_coordinator(
            spec,
            folder,
            app.ListenAddresses(listen, enrollment="127.0.0.1:0"),
            OWNER,
            start_bootstrap,
            lambda *addresses: ready.set_result(addresses),
            certificate_seconds,
        )
    )
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    coordinator = Running(spec, folder, *ready.result(), task, dht)
    try:
        yield coordinator
    finally:
        await coordinator.stop()
        assert dht.closed


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_of(authority: Authority, who: Keyed) -> Pair:
    """As the coordinator would issue it to an enrolled peer."""
    key = new_key()
    return pem(key), authority.for_peer(who.peer, key.public_key())


def operator_of(folder: Path) -> Pair:
    return (folder / "operator.key").read_bytes(), (folder / "operator.pem").read_bytes()


def channel_to(address: str, authority: bytes, pair: Pair | None) -> grpc.aio.Channel:
    """To the coordinator; without a certificate of one's own if `pair` is None."""
    tls = grpc.ssl_channel_credentials(authority, *(pair or (None, None)))
    name = ("grpc.ssl_target_name_override", COORDINATOR_NAME)
    return grpc.aio.secure_channel(address, tls, options=[name])


def enroll_request(who: Keyed, invite: Invite, /, **changes: Any) -> pb.EnrollRequest:
    """As an honest newcomer makes it, but for `changes`."""
    key = spki(new_key())
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "invite_id": invite.id,
        "secret": invite.secret,
        "peer": who.peer,
        "tls_public_key": key,
        "proof": who.sign(enrollment_message(invite.pin, key, invite.id)),
    }
    return pb.EnrollRequest(**(fields | changes))


async def refusal_of(call: Any) -> HetnodeError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    refusal = error_from_rpc(error.value)
    assert refusal is not None, error.value
    return refusal
