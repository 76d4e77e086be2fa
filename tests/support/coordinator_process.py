"""A real coordinator in the test's own process, with mutual TLS, and its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from coordinator import app
from coordinator.api.dial_back import DialBack
from coordinator.api.public_ports import ListenAddresses, RelayOptions
from coordinator.api.succession import Partner
from coordinator.authority import CERTIFICATE_SECONDS, Authority, open_authority
from coordinator.membership.open_places import CLOSED, OpenTerms
from node.net.coordinator_channel import ask
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import PeerRecord
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.spec.run import RunSpec
from protocol.status import RunStatus
from protocol.trust.envelope import enrollment_message
from protocol.trust.invite import Invite, decode
from protocol.trust.names import COORDINATOR_NAME
from protocol.types import PROTOCOL_VERSION, Capacity, PeerId, Role
from protocol.wire.convert.payloads import descriptor_to_pb
from protocol.wire.convert.plans import capacity_to_pb
from protocol.wire.operator_calls import IssueInvite
from protocol.wire.rpc_errors import error_from_rpc
from protocol.wire.status import status_from_pb
from protocol.wire.typed_calls import Request
from tests.builders import Keyed, anchor_of, keyed
from tests.support.dial_back import believe

BOOTSTRAP = "/ip4/127.0.0.1/tcp/1/p2p/bootstrap"
COORDINATOR = keyed(1000)
"""Whose key is the coordinator's."""
_PATIENT = 120.0
Answer = TypeVar("Answer")
Pair = tuple[bytes, bytes]
"""Private key and certificate, PEM."""


class NoDht:
    """Stands where the DHT's bootstrap peer does, which is another room's."""

    arbiter = None

    def __init__(self) -> None:
        self.addresses = [BOOTSTRAP]
        self.banned: Collection[str] = ()
        self.sources: Collection[str] = ()
        self.members: Collection[PeerId] = ()
        self.away: asyncio.Event | None = None
        """If it is given, this peer does nothing before it is set."""
        self._admitted = asyncio.Condition()
        self.closed = False
        self.published: PeerRecord | None = None

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId],
        sources: Collection[str],
        members: Collection[PeerId],
    ) -> None:
        if self.away is not None:
            await self.away.wait()
        async with self._admitted:
            self.banned, self.sources, self.members = banned, sources, members
            self._admitted.notify_all()

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        self.published = record

    async def until_admitted(self, *sources: str) -> None:
        """Wait until exactly these sources are admitted."""
        async with asyncio.timeout(20.0), self._admitted:
            await self._admitted.wait_for(lambda: set(self.sources) == set(sources))

    async def close(self) -> None:
        self.closed = True


class Running:
    """A coordinator in this process, with a separate client for each caller."""

    def __init__(
        self, spec: RunSpec, folder: Path, address: str, enrollment: str, task: asyncio.Task[None], dht: NoDht
    ) -> None:
        self.spec, self.folder, self.task, self.dht = spec, folder, task, dht
        self.address, self.enrollment = address, enrollment
        self.authority = open_authority(folder, spec.name)
        self.run = self.authority.run_id(spec)
        self._channels: dict[Keyed | None, grpc.aio.Channel] = {}

    def channel(self, peer: Keyed | None) -> grpc.aio.Channel:
        """With the certificate of `peer`, None being the operator."""
        if peer not in self._channels:
            certificate = certificate_of(self.authority, peer) if peer else operator_of(self.folder)
            self._channels[peer] = channel_to(self.address, self.authority.pem, certificate)
        return self._channels[peer]

    def stub(self, peer: Keyed | None) -> Any:
        return pb_grpc.CoordinatorStub(self.channel(peer))

    async def ask(self, request: Request[Answer], peer: Keyed | None = None) -> Answer:
        """The answer to the operator, or to `peer`."""
        return await ask(self.channel(peer), request, 60.0)

    async def join(self, peer: Keyed, /, **changes: Any) -> pb.JoinReply:
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "peer": peer.peer,
            "role": "replica",
            "capacity": capacity_to_pb(Capacity("cpu", 2**30, 2)),
            "endpoint": "127.0.0.1:9",
        }
        reply: pb.JoinReply = await self.stub(peer).Join(pb.JoinRequest(**(fields | changes)))
        return reply

    def match(self, peer: Keyed, stage: int, round_number: int) -> asyncio.Task[pb.MatchReply]:
        descriptor = descriptor_to_pb(peer.payload(self.spec, stage, round_number, run=self.run))
        request = pb.MatchRequest(peer=peer.peer, descriptor=descriptor)
        return asyncio.ensure_future(self.stub(peer).Match(request))

    def report(
        self, peer: Keyed, stage: int, round_number: int, *owners: Keyed
    ) -> asyncio.Task[pb.DecisionReply]:
        held = [
            descriptor_to_pb(owner.payload(self.spec, stage, round_number, run=self.run)) for owner in owners
        ]
        request = pb.ReportRequest(peer=peer.peer, stage=stage, round=round_number, held=held)
        return asyncio.ensure_future(self.stub(peer).Report(request))

    async def attest(
        self, peer: Keyed, stage: int, round_number: int, digest: str | None = None, part: str = "stage"
    ) -> pb.AttestReply:
        request = pb.AttestRequest(
            peer=peer.peer,
            stage=stage,
            round=round_number,
            part=part,
            digest=digest or anchor_of(stage, round_number),
        )
        reply: pb.AttestReply = await self.stub(peer).Attest(request)
        return reply

    async def invite(self, uses: int = 1, seconds: float = 3600.0, role: str = "") -> Invite:
        wanted = Role(role) if role else None
        return decode((await self.ask(IssueInvite(uses, seconds, wanted))).invite)

    async def enroll(self, peer: Keyed, invite: Invite, /, **changes: Any) -> pb.EnrollReply:
        async with channel_to(self.enrollment, self.authority.pem, None) as channel:
            stub = pb_grpc.EnrollmentStub(channel)
            reply: pb.EnrollReply = await stub.Enroll(enroll_request(peer, invite, **changes))
            return reply

    async def status(self) -> RunStatus:
        return status_from_pb(await self.stub(None).Status(pb.StatusRequest()))

    async def settle(self, stage: int, round_number: int, *peers: Keyed) -> list[pb.DecisionReply]:
        await asyncio.gather(*(self._offer(peer, stage, round_number) for peer in peers))
        decisions = await asyncio.gather(*(self.report(peer, stage, round_number, *peers) for peer in peers))
        for peer in peers:
            assert (await self.attest(peer, stage, round_number)).agrees
        return decisions

    async def _offer(self, peer: Keyed, stage: int, round_number: int) -> None:
        """Again while it is too early, as a node does: peers that train nothing differ in their speed."""
        while True:
            try:
                await self.match(peer, stage, round_number)
                return
            except grpc.aio.AioRpcError as error:
                refusal = error_from_rpc(error)
                if refusal is None or refusal.code is not ErrorCode.OFFER_TOO_EARLY:
                    raise

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
    relay: RelayOptions | None = None,
    one_port: bool = False,
    dial_back: DialBack | None = believe,
    metrics: str | None = None,
    dashboard: str | None = None,
    terms: OpenTerms = CLOSED,
    contact: str = "",
    objects: str = "",
    partner: Partner | None = None,
) -> AsyncIterator[Running]:
    """`dial_back` None dials the addresses of joining peers over the network."""
    dht = NoDht()

    async def start_bootstrap(run: str) -> NoDht:
        return dht

    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        app.run_coordinator(
            spec,
            folder,
            ListenAddresses(
                listen,
                enrollment="127.0.0.1:0",
                relay=relay,
                one_port=one_port,
                metrics=metrics,
                dashboard=dashboard,
                contact=contact,
                objects=objects,
            ),
            COORDINATOR,
            start_bootstrap,
            lambda run, *addresses: ready.set_result(addresses),
            certificate_seconds,
            dial_back,
            terms=terms,
            partner=partner,
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


def certificate_of(authority: Authority, peer: Keyed) -> Pair:
    """As the coordinator would issue it to an enrolled peer."""
    key = new_key()
    return pem(key), authority.for_peer(peer.peer, key.public_key())


def operator_of(folder: Path) -> Pair:
    return (folder / "operator.key").read_bytes(), (folder / "operator.pem").read_bytes()


def channel_to(address: str, authority: bytes, pair: Pair | None) -> grpc.aio.Channel:
    """To the coordinator; without a certificate of one's own if `pair` is None."""
    tls = grpc.ssl_channel_credentials(authority, *(pair or (None, None)))
    name = ("grpc.ssl_target_name_override", COORDINATOR_NAME)
    return grpc.aio.secure_channel(address, tls, options=[name])


def enroll_request(peer: Keyed, invite: Invite, /, **changes: Any) -> pb.EnrollRequest:
    """As an honest newcomer makes it, but for `changes`."""
    key = spki(new_key())
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "invite_id": invite.id,
        "secret": invite.secret,
        "peer": peer.peer,
        "tls_public_key": key,
        "proof": peer.sign(enrollment_message(invite.pin, key, invite.id)),
    }
    return pb.EnrollRequest(**(fields | changes))


def metrics(folder: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a coordinator's metrics file that record this kind of event."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


async def failure_of(call: Any) -> grpc.StatusCode:
    """The status of a call that TLS itself refuses."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def update_where(watch: Any, holds: Callable[[pb.PlanUpdate], bool]) -> pb.PlanUpdate:
    """The next update of a watcher for which `holds`: others, as of new sources, may come before it."""
    async with asyncio.timeout(_PATIENT):
        while True:
            update = await watch.read()
            assert isinstance(update, pb.PlanUpdate), "the stream has ended"
            if holds(update):
                return update


async def refusal_of(call: Any) -> HetnodeError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    refusal = error_from_rpc(error.value)
    assert refusal is not None, error.value
    return refusal
