"""A peer written from proto/ and docs/protocol/minimum-peer.md alone. It imports nothing of hetnode.

It has no model: the bytes of its payloads are any bytes, and its anchors have any digests on which the peers
of a script agree. So it takes part in rounds at the cost of a few calls. An attack uses :meth:`Peer.call`
with other fields, or :meth:`Peer.raw` with other bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import grpc

from tests.hostile import wire
from tests.hostile.wire import Identity, Invite, TlsKey, message, method

CALL_SECONDS = 60.0


class Refused(Exception):
    """The other end refused a call, with a code of docs/reference/errors.md or gRPC's own status."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        found = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
        self.status = error.code()
        self.code = found.get("hetnode-code", "")
        self.cause = unquote(found.get("hetnode-cause", error.details() or ""))
        super().__init__(f"{self.code or self.status.name}: {self.cause}")


def digest_of(stage: int, round_number: int) -> str:
    """The digest of an anchor, on which all peers of a script agree."""
    return hashlib.sha256(f"anchor {stage} {round_number}".encode()).hexdigest()


class Peer:
    """One peer of a run.

    Attributes:
        invite, authority, certificate: known after :meth:`enroll`.
        spec, run, dht_peers: known after :meth:`join`.
        epoch, weight: of the newest plan that :meth:`updates` has shown, and of its payloads there.
    """

    def __init__(self, identity: Identity | None = None) -> None:
        self.identity = identity or Identity()
        self.id = self.identity.peer
        self.tls = TlsKey()
        self.invite: Invite
        self.authority = self.certificate = b""
        self.coordinator = self.api = self.run = self.spec_json = self.spec_hash = ""
        self.dht_peers: Sequence[str] = ()
        self.epoch = 1
        self.weight = 1.0
        self._channel: grpc.aio.Channel | None = None

    # Enrollment and join

    async def enroll(self, invite: str, authority: bytes = b"", **changes: Any) -> None:
        """Trade the invite for a certificate. `authority` (PEM) saves the first connection."""
        self.invite = Invite.parse(invite)
        self.authority = authority or await self.read_authority()
        request = {
            "protocol_version": wire.PROTOCOL_VERSION,
            "invite_id": self.invite.id,
            "secret": self.invite.secret,
            "peer": self.id,
            "tls_public_key": self.tls.public,
            "proof": self.identity.key.sign(
                wire.enrollment(self.invite.pin, self.invite.id, self.tls.public)
            ),
        }
        channel = _open(self.invite.enrollment, wire.COORDINATOR, self.authority)
        try:
            reply = await _call(channel, "Enrollment", "Enroll", request | changes)
        finally:
            await channel.close()
        wire.check_certificate(reply.certificate_pem, self.authority, self.id, self.tls)
        self.certificate, self.coordinator, self.run = reply.certificate_pem, reply.coordinator, reply.run
        self.api = reply.api_address

    async def read_authority(self) -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        host, _, port = self.invite.enrollment.rpartition(":")
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
        try:
            leaf = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        finally:
            writer.transport.abort()
        return wire.carried_authority(leaf, self.invite.pin)

    async def join(self, role: str = "replica", endpoint: str = "", **changes: Any) -> Any:
        capacity = message("Capacity")(device="cpu", memory_bytes=1 << 33, threads=1, flops=1e9)
        request = {
            "protocol_version": wire.PROTOCOL_VERSION,
            "role": role,
            "capacity": capacity,
            "endpoint": endpoint,
        }
        reply = await self.call("Join", **request | changes)
        wire.verify(self.coordinator, wire.spec(reply.run, reply.spec_json), reply.spec_signature)
        if hashlib.sha256(reply.spec_json.encode()).hexdigest() != reply.spec_hash:
            raise ValueError("the hash of the specification is wrong")
        expected = wire.run_id(json.loads(reply.spec_json)["preset"], reply.spec_hash, self.invite.pin)
        if {reply.run, self.run} != {expected}:
            raise ValueError("the run has another name than its specification and authority say")
        self.spec_json, self.spec_hash, self.dht_peers = reply.spec_json, reply.spec_hash, reply.dht_peers
        return reply

    async def renew(self) -> None:
        """A certificate for another key; later calls use it."""
        key = TlsKey()
        proof = self.identity.key.sign(wire.renewal(self.invite.pin, key.public))
        reply = await self.call("Renew", tls_public_key=key.public, proof=proof)
        wire.check_certificate(reply.certificate_pem, self.authority, self.id, key)
        await self.close()
        self.tls, self.certificate = key, reply.certificate_pem

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    # Calls to the coordinator

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = self.open(self.api, wire.COORDINATOR)
        return self._channel

    def open(self, address: str, name: str) -> grpc.aio.Channel:
        """A connection with this peer's certificate, to the holder of a certificate for the TLS name."""
        return _open(address, name, self.authority, self.tls.pem, self.certificate)

    def open_as_stranger(self, address: str, name: str) -> grpc.aio.Channel:
        """The same without a certificate."""
        return _open(address, name, self.authority)

    async def call(self, name: str, /, seconds: float = CALL_SECONDS, **fields: Any) -> Any:
        """A call of one answer, in the name of this peer unless `fields` say otherwise. Raises Refused."""
        return await _call(self.channel, "Coordinator", name, {"peer": self.id} | fields, seconds)

    async def raw(self, name: str, data: bytes, service: str = "Coordinator") -> bytes:
        """A call with any bytes. Raises Refused."""
        try:
            return await self.channel.unary_unary(method(service, name)[0])(data, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise Refused(error) from None

    async def updates(self) -> AsyncIterator[Any]:
        """The updates of Watch, their plans verified; each comes with the plan in it, or None."""
        path, request, reply, *_ = method("Coordinator", "Watch")
        stream = self.channel.unary_stream(path, request.SerializeToString, reply.FromString)
        try:
            async for update in stream(request(peer=self.id)):
                plan = None
                if update.signed_plan:
                    wire.verify(self.coordinator, wire.plan(self.run, update.signed_plan), update.signature)
                    plan = message("Plan").FromString(update.signed_plan)
                    self.epoch = plan.epoch
                    self.weight = self._weight_in(plan)
                yield update, plan
        except grpc.aio.AioRpcError as error:
            raise Refused(error) from None

    def _weight_in(self, plan: Any) -> float:
        """Of this peer's payloads. It is below 1 where the honest peers are faster than this one claims."""
        own = (each for each in plan.replicas if any(member.peer == self.id for member in each.members))
        return next((float(replica.weight) for replica in own), 1.0)

    async def first_plan(self) -> Any:
        """Wait for the first plan."""
        async for _, plan in self.updates():
            if plan is not None:
                return plan
        raise AssertionError("the run ended without a plan")

    def descriptor(self, stage: int, round_number: int, payload: bytes = b"", **changes: Any) -> Any:
        """A descriptor with this peer's signature. By default its payload does not exist."""
        fields = {
            "run": self.run,
            "epoch": self.epoch,
            "stage": stage,
            "round": round_number,
            "owner": self.id,
            "anchor_digest": digest_of(stage, round_number - 1),
            "codec": "any",
            "weight": self.weight,
            "nbytes": len(payload) or 100,
            "sha256": hashlib.sha256(payload or f"{self.id} {stage} {round_number}".encode()).hexdigest(),
        }
        made = message("PayloadDescriptor")(**fields | changes)
        made.signature = self.identity.key.sign(wire.descriptor(made))
        return made

    async def attest(self, stage: int, round_number: int, digest: str = "", part: str = "stage") -> Any:
        digest = digest or digest_of(stage, round_number)
        return await self.call("Attest", stage=stage, round=round_number, part=part, digest=digest)

    async def contribute(self, stage: int, round_number: int) -> Any:
        """One stage of one round, from the offer to the attestation. Returns the decision."""
        group = await self.offer(self.descriptor(stage, round_number))
        held = list(group.descriptors)
        for each in held:
            wire.verify(each.owner, wire.descriptor(each), each.signature)
        assert [each.owner for each in held] == sorted({each.owner for each in held})
        decision = await self.call("Report", stage=stage, round=round_number, held=held)
        await self.attest(stage, round_number)
        return decision

    async def offer(self, descriptor: Any) -> Any:
        """Offer until it is no longer too early. Returns the group."""
        while True:
            try:
                return await self.call("Match", descriptor=descriptor)
            except Refused as refused:
                if refused.code != "offer-too-early":
                    raise
            await asyncio.sleep(0.1)

    async def round(self, stages: Iterable[int], round_number: int) -> list[Any]:
        """A round of all stages that this peer hosts. Returns the decisions."""
        await self.call("Heartbeat", round=round_number, inner_step=1)
        return list(await asyncio.gather(*(self.contribute(stage, round_number) for stage in stages)))

    async def keep_alive(self, seconds: float) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await self.call("Heartbeat")
            await asyncio.sleep(seconds)


def _open(
    address: str, name: str, authority: bytes, key: bytes | None = None, certificate: bytes | None = None
) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    # Peers of one script must not share a connection: each shows its own certificate.
    options = (("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1))
    return grpc.aio.secure_channel(address, credentials, options)


async def _call(
    channel: grpc.aio.Channel,
    service: str,
    name: str,
    fields: dict[str, Any],
    seconds: float = CALL_SECONDS,
) -> Any:
    path, request, reply, *_ = method(service, name)
    # Some requests name no peer.
    known = {key: value for key, value in fields.items() if key in request.DESCRIPTOR.fields_by_name}
    unknown = fields.keys() - known.keys() - {"peer"}
    assert not unknown, f"{name} has no {unknown}"
    call = channel.unary_unary(path, request.SerializeToString, reply.FromString)
    try:
        return await call(request(**known), timeout=seconds)
    except grpc.aio.AioRpcError as error:
        raise Refused(error) from None


async def join_all(invite: str, peers: Iterable[Peer]) -> list[Peer]:
    """Enroll all `peers` and let them join the run."""
    joined = list(peers)
    for peer in joined:
        await peer.enroll(invite)
        await peer.join()
    return joined


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """End tasks of a script."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Refused):
            await task
