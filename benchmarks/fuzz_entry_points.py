"""Whole entry points for peers' bytes: streams of links and payloads, calls of the DHT and the coordinator.

Each input is what one peer sends in one stream or call. See :mod:`benchmarks.fuzz`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgpack
from google.protobuf.message import DecodeError, Message
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from benchmarks.fuzz_seeds import (
    AUTHORITY,
    CONTRIBUTION,
    PEER,
    PEERS,
    SPEC,
    TLS_KEY,
    Target,
    descriptor_of,
    messages_in,
    sealed_record,
    sign,
    stream_of,
)
from coordinator.decide import decide
from coordinator.state import commands
from coordinator.state.apply import apply
from coordinator.state.state import State
from node.hive import access, authorizer, dht_protocol, records, values
from node.net.link import Link, LinkEndpoint, LinkLimits, read_message
from node.net.link_handshake import check_hello, hello_in, hello_of
from node.transport import transfer
from protocol.errors import HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import payload_pb2
from protocol.types import PROTOCOL_VERSION, Capacity, PeerId, Role
from protocol.wire.convert.fields import name_from_pb
from protocol.wire.convert.payloads import descriptor_from_pb, descriptors_from_pb, rejections_from_pb
from protocol.wire.convert.plans import estimates_from_pb
from protocol.wire.link_message import LinkMessage
from protocol.wire.probing import Answers

_LIMITS = LinkLimits(frame_bytes=4096, waiting_frames=1 << 20)
_HERE = LinkEndpoint("run", "hash", PeerId(PEERS[1]), 0, 1)
_NEIGHBOUR = LinkEndpoint("run", "hash", PeerId(PEER), 0, 0)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _run(work: Coroutine[Any, Any, object]) -> object:
    return _loop().run_until_complete(work)


async def _link(data: bytes) -> None:
    """A stream of a neighbour, from its hello to its end, as node.net.link_server reads it."""
    messages = iter(messages_in(data))

    async def read() -> Any:
        message = next(messages, None)
        if message is None:
            return grpc.aio.EOF
        return LinkMessage.from_bytes(message)

    async def write(_: object) -> None:
        pass

    hello = hello_in(await read_message(read()))
    if hello is None:
        return
    check_hello(hello, _NEIGHBOUR)
    link = Link(_NEIGHBOUR, read, write, _LIMITS)
    reason = await link.wait_closed()
    await link.close()
    assert " failed (" not in reason.cause, reason.cause  # the link hides no unexpected error from here


def _link_seeds() -> tuple[bytes, ...]:
    header = pb.FrameHeader(
        id=pb.FrameId(epoch=1, round=1, kind="forward"),
        nbytes=8,
        tensors=[pb.TensorHeader(name="x", dtype="f32", shape=[2])],
    )
    hello = hello_of(_NEIGHBOUR).to_bytes()
    whole = LinkMessage(header=header, chunk=bytes(8)).to_bytes()
    parts = (LinkMessage(header=header).to_bytes(), LinkMessage(chunk=bytes(8)).to_bytes())
    return stream_of((hello, whole, *parts)), stream_of((hello, *parts, whole, whole))


def _probe(data: bytes) -> None:
    ticks = itertools.count()
    answers = Answers(lambda: float(next(ticks)), lambda: None)
    for message in messages_in(data)[:64]:
        try:
            request = pb.ProbeMessage.FromString(message)
        except DecodeError:
            return
        for answer in answers.to(request):
            assert answer.ByteSize() < 1 << 17


async def _payload_stream(data: bytes) -> None:
    async def stream() -> AsyncIterator[payload_pb2.PayloadChunk]:
        for message in messages_in(data):
            yield payload_pb2.PayloadChunk.FromString(message)

    try:
        await transfer.receive(stream(), _DESCRIPTOR)
    except (transfer.TransferError, DecodeError) as refusal:
        raise ValueError(refusal) from None


_PAYLOAD = b"payload" * 4
_message = descriptor_of(1)
_message.nbytes, _message.sha256 = len(_PAYLOAD), hashlib.sha256(_PAYLOAD).hexdigest()
_DESCRIPTOR = descriptor_from_pb(_message)


async def _libp2p_message(data: bytes) -> None:
    """One message of a stream between averagers, as hivemind reads it."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    try:
        await P2P.receive_protobuf(payload_pb2.StateRequest, reader)
    except (asyncio.IncompleteReadError, DecodeError, TypeError) as refusal:
        raise ValueError(refusal) from None


class _Protocol(dht_protocol.BoundedDHTProtocol):
    """The DHT's calls without a network: `answer` is what another peer answers."""

    answer: Any

    def get_stub(self, *_: object, **__: object) -> Any:
        async def rpc_find(*_: object, **__: object) -> Any:
            return self.answer

        return SimpleNamespace(rpc_find=rpc_find)


class _Dht:
    """The parts of a DHT process that see the bytes of other peers, all of which come from PEERS[1]."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        (folder / "own.pem").write_bytes(AUTHORITY.for_peer(PEER, TLS_KEY))
        (folder / "authority.pem").write_bytes(AUTHORITY.pem)
        self.authorizer = authorizer.CertificateAuthorizer(
            SPEC.name, sign, folder / "own.pem", folder / "authority.pem"
        )
        self._validator = CompositeValidator([records.KnownEntryValidator(SPEC.name, AUTHORITY.certificate)])
        self._peer = PeerID.from_base58(PEER)
        self._context = SimpleNamespace(remote_id=self._peer)

    async def _protocol(self) -> _Protocol:
        place = dht_protocol.node_id_of(PEERS[1])
        protocol: _Protocol = await _Protocol.create(
            None, place, 20, 5, 5, 3.0, client_mode=True, record_validator=self._validator
        )
        protocol.node_info = dht_pb2.NodeInfo(node_id=place.to_bytes())
        return protocol

    async def request(self, data: bytes) -> None:
        """The call, and then the same content with a valid signature."""
        request = dht_pb2.StoreRequest.FromString(data)
        authorizer_of_caller = dht_protocol.CALLER.set(PEER)
        await self.authorizer.validate_request(request)
        await self.authorizer.sign_request(request, PEER)
        assert await self.authorizer.validate_request(request)
        dht_protocol.CALLER.reset(authorizer_of_caller)

    async def response(self, data: bytes) -> None:
        response = dht_pb2.FindResponse.FromString(data)
        await self.authorizer.validate_response(response, dht_pb2.FindRequest())

    async def store(self, data: bytes) -> None:
        """The peer stores entries, then asks for its first key."""
        request = dht_pb2.StoreRequest.FromString(data)
        protocol = await self._protocol()
        try:
            stored = await protocol.rpc_store(request, self._context)
        except AssertionError as refusal:
            raise ValueError(refusal) from None  # hivemind ends the call, with the error as its answer
        await protocol.rpc_find(dht_pb2.FindRequest(keys=request.keys[:1]), self._context)
        await asyncio.sleep(0)  # run the tasks that the calls have started
        if not any(stored.store_ok):
            raise ValueError("nothing was stored")

    async def answer(self, data: bytes) -> None:
        """The peer answers a search for the records of the run."""
        protocol = await self._protocol()
        protocol.answer = dht_pb2.FindResponse.FromString(data)
        found = await protocol.call_find(self._peer, [DHTID.generate(source=records.peers_key(SPEC.name))])
        await asyncio.sleep(0)
        if found is None:
            raise ValueError("the answer is not used")


def _store_request() -> dht_pb2.StoreRequest:
    return dht_pb2.StoreRequest(
        keys=[DHTID.generate(source=records.peers_key(SPEC.name)).to_bytes()],
        subkeys=[MSGPackSerializer.dumps(PEER)],
        values=[MSGPackSerializer.dumps(sealed_record())],
        expiration_time=[time.time() + records.MAX_RECORD_SECONDS],
        in_cache=[False],
        peer=dht_pb2.NodeInfo(node_id=dht_protocol.node_id_of(PEER).to_bytes()),
    )


def _find_response() -> dht_pb2.FindResponse:
    dictionary = DictionaryDHTValue()
    expires = time.time() + records.MAX_RECORD_SECONDS
    dictionary.store(PEER, MSGPackSerializer.dumps(sealed_record()), expires)
    result = dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY,
        value=MSGPackSerializer.dumps(dictionary),
        expiration_time=expires,
        nearest_node_ids=[dht_protocol.node_id_of(PEER).to_bytes()],
        nearest_peer_ids=[PeerID.from_base58(PEER).to_bytes()],
    )
    return dht_pb2.FindResponse(results=[result], peer=dht_pb2.NodeInfo(node_id=bytes(20)))


def _parsing(decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """A message that cannot be parsed counts as refused: hivemind ends the call before the decoder."""

    def run(data: bytes) -> None:
        try:
            decode(data)
        except DecodeError as refusal:
            raise ValueError(refusal) from None

    return run


def _dht_call(
    name: str,
    work: Callable[[bytes], Coroutine[Any, Any, object]],
    seed: bytes,
    kind: type[Message],
) -> Target:
    return Target(name, _parsing(_in_loop(work)), (seed,), kind, is_entry_point=True)


def _values() -> tuple[bytes, ...]:
    """A record, a dictionary, and extension types inside each other."""
    nested = b"\x01"
    for _ in range(400):
        nested = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + nested))
    return MSGPackSerializer.dumps(PEER), _find_response().results[0].value, nested


def _in_loop(work: Callable[[bytes], Coroutine[Any, Any, object]]) -> Callable[[bytes], object]:
    return lambda data: _run(work(data))


@cache
def _started() -> State:
    """A run of two replicas in round 1, both of them live."""
    state = State(SPEC, SPEC.name)
    for command in (
        commands.Start(),
        *(
            commands.Join(PROTOCOL_VERSION, SPEC.hash, peer, Role.REPLICA, Capacity("cpu", 1 << 30, 2), "h:1")
            for peer in PEERS[:2]
        ),
    ):
        state = _after(state, command)
    for stage in range(SPEC.swarm.stages):
        for peer in PEERS[:2]:
            state = _after(state, commands.Attest(peer, stage, 0, "stage", "a" * 64))
    assert state.plans
    return state


def _after(state: State, command: commands.Command, now: float = 1000.0) -> State:
    for event in decide(state, command, now).events:
        state = apply(state, event)
    return state


def _heartbeat(message: pb.HeartbeatRequest) -> commands.Command:
    estimates = estimates_from_pb(message.estimates) if message.HasField("estimates") else None
    return commands.Heartbeat(PEER, message.round, message.inner_step, estimates)


def _attest(message: pb.AttestRequest) -> commands.Command:
    part, digest = name_from_pb(message.part, "part"), name_from_pb(message.digest, "digest")
    return commands.Attest(PEER, message.stage, message.round, part, digest)


def _report(message: pb.ReportRequest) -> commands.Command:
    held, rejected = descriptors_from_pb(message.held), rejections_from_pb(message.rejected)
    return commands.Report(PEER, message.stage, message.round, held, rejected)


_CALLS: tuple[tuple[type[Message], Callable[[Any], commands.Command]], ...] = (
    (pb.HeartbeatRequest, _heartbeat),
    (pb.MatchRequest, lambda message: commands.Offer(PEER, descriptor_from_pb(message.descriptor))),
    (pb.ReportRequest, _report),
    (pb.AwaitDecisionRequest, lambda m: commands.Await(PEER, m.stage, m.round, m.withheld)),
    (pb.AttestRequest, _attest),
    (pb.RetreatRequest, lambda message: commands.Retreat(PEER, message.epoch, "r")),
)


def _calls(data: bytes) -> None:
    """Calls of one peer, in order. The first byte of each message selects the call."""
    state, now, refusal = _started(), 1000.0, None
    for message in messages_in(data)[:8]:
        kind, convert = _CALLS[(message[0] if message else 0) % len(_CALLS)]
        try:
            command = convert(kind.FromString(message[1:]))
        except DecodeError:
            continue
        except HetnodeError as error:
            refusal = error
            continue
        now += 0.5
        # The other peer stays alive.
        for each in (command, commands.Heartbeat(PeerId(PEERS[1]), 1, 1), commands.Tick()):
            state = _after(state, each, now)
    if refusal is not None:
        raise refusal


def _call_seeds() -> tuple[bytes, ...]:
    own, other = descriptor_of(0), descriptor_of(0, number=1)
    made = {
        0: pb.HeartbeatRequest(round=1, inner_step=2, estimates=pb.Estimates(capacity=CONTRIBUTION.capacity)),
        1: pb.MatchRequest(descriptor=own),
        2: pb.ReportRequest(stage=0, round=1, held=[own, other]),
        3: pb.AwaitDecisionRequest(stage=1, round=1, withheld=1),
        4: pb.AttestRequest(stage=0, round=0, part="stage", digest="b" * 64),
        5: pb.RetreatRequest(epoch=1),
    }
    encoded = {kind: bytes([kind]) + message.SerializeToString() for kind, message in made.items()}
    return stream_of([encoded[i] for i in (4, 0, 1, 2, 3)]), stream_of([encoded[i] for i in (3, 2, 1, 5, 0)])


def targets() -> list[Target]:
    """All entry points. Logging of errors is switched off."""
    for name in ("node", "protocol", "coordinator", "hivemind"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    access.limit_messages()
    values.limit_values()
    dht = _Dht()
    chunks = [payload_pb2.PayloadChunk(data=_PAYLOAD[:20]), payload_pb2.PayloadChunk(data=_PAYLOAD[20:])]
    probe = [pb.ProbeMessage(echo=1), pb.ProbeMessage(tally=0), pb.ProbeMessage(data=bytes(9))]
    state_request = payload_pb2.StateRequest(stage=1, part="stage", round=2).SerializeToString()
    store, found = _store_request().SerializeToString(), _find_response().SerializeToString()
    return [
        Target("link", _in_loop(_link), _link_seeds(), is_entry_point=True),
        Target(
            "link probe",
            _probe,
            (stream_of([message.SerializeToString() for message in probe]),),
            is_entry_point=True,
        ),
        _dht_call("DHT request", dht.request, store, dht_pb2.StoreRequest),
        _dht_call("DHT response", dht.response, found, dht_pb2.FindResponse),
        _dht_call("DHT store", dht.store, store, dht_pb2.StoreRequest),
        _dht_call("DHT answer", dht.answer, found, dht_pb2.FindResponse),
        Target("DHT value", values.decode, _values(), is_entry_point=True),
        Target(
            "payload stream",
            _in_loop(_payload_stream),
            (stream_of([chunk.SerializeToString() for chunk in chunks]),),
        ),
        Target(
            "libp2p message",
            _in_loop(_libp2p_message),
            (b"\0" + len(state_request).to_bytes(8, "big") + state_request,),
        ),
        Target("coordinator's calls", _calls, _call_seeds()),
    ]
