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
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
from hivemind.proto import dht_pb2
from hivemind.proto.p2pd_pb2 import PersistentConnectionRequest
from hivemind.utils import MSGPackSerializer

from benchmarks import fuzz_peers, fuzz_services
from benchmarks.fuzz_seeds import (
    AUTHORITY,
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
from node.checkpoint.download import TransferError
from node.exchange import transfer
from node.exchange.hive import authorizer, dht_protocol, records, stream_calls, values
from node.net.link import LinkLimits, LinkMember, LiveLink, read_message
from node.net.link_handshake import check_hello, hello_in, hello_of
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import payload_pb2
from protocol.types import PeerId
from protocol.wire.convert.payloads import descriptor_from_pb
from protocol.wire.link_message import LinkMessage
from protocol.wire.probing import Answers

_LIMITS = LinkLimits(frame_bytes=4096, waiting_frames=1 << 20)
_HERE = LinkMember("run", "hash", PeerId(PEERS[1]), 0, 1)
_NEIGHBOUR = LinkMember("run", "hash", PeerId(PEER), 0, 0)


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
    link = LiveLink(_NEIGHBOUR, read, write, _LIMITS)
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
    except (TransferError, DecodeError) as refusal:
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


class _Writer:
    """The writing end of a stream. It keeps what is sent."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.transport = SimpleNamespace(abort=lambda: None)
        self.write, self.close = self.sent.extend, lambda: None

    async def drain(self) -> None:
        pass


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

    async def unary_call(self, data: bytes) -> None:
        """A stream that p2pd hands over. The first byte selects the call."""
        protocol, handlers = await self._protocol(), []

        async def add(_: str, handler: Callable[..., Coroutine[Any, Any, None]]) -> None:
            handlers.append(handler)

        p2p: Any = SimpleNamespace(peer_id=self._peer, add_binary_stream_handler=add)
        await protocol.add_p2p_handlers(p2p)
        reader, writer = asyncio.StreamReader(), _Writer()
        reader.feed_data(data[1:])
        reader.feed_eof()
        info = SimpleNamespace(peer_id=self._peer)
        await handlers[(data[0] if data else 0) % len(handlers)](info, reader, writer)
        await asyncio.sleep(0)
        sent = asyncio.StreamReader()
        sent.feed_data(bytes(writer.sent))
        answer = PersistentConnectionRequest()
        if writer.sent:
            await read_pbmsg_safe(sent, answer)
        if not answer.unaryResponse.HasField("response"):
            raise ValueError("no answer, or an error")

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


def _unary_seeds() -> tuple[bytes, ...]:
    """Calls in the order of the DHT's handlers, of which one is rpc_store."""
    call = PersistentConnectionRequest(callId=bytes(16))
    call.callUnary.peer, call.callUnary.proto = b"p", "rpc"
    call.callUnary.data = _store_request().SerializeToString()
    body = call.SerializeToString()
    length = bytes((len(body) & 0x7F | 0x80, len(body) >> 7))
    return tuple(bytes([number]) + length + body for number in range(3))


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


def targets() -> list[Target]:
    """All entry points. Logging of errors is switched off."""
    for name in ("node", "protocol", "coordinator", "hivemind"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    stream_calls.limit_messages()
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
        Target("DHT unary call", _in_loop(dht.unary_call), _unary_seeds(), is_entry_point=True),
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
        *fuzz_peers.targets(_loop()),
        *fuzz_services.targets(_loop()),
    ]
