"""What relays, routers and averagers read from others: first bytes, packets, addresses, calls for payloads.

See :mod:`benchmarks.fuzz`.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import cache, partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from benchmarks.fuzz_seeds import PEER, PEERS, Target, descriptor_of, messages_in, stream_of
from node.checkpoint.transfer import CheckpointServer
from node.exchange import payload_exchange
from node.exchange.payload_service import PayloadService
from node.exchange.payload_store import PayloadStore
from node.home.relay.agent import RelayAgent
from node.home.router.interface import RouterError
from node.home.router.nat_pmp import NatPmpRouter
from node.home.router.port_mapping import PortMapping, address_problem
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import payload_pb2
from protocol.relay.client_hello import MAX_BYTES
from protocol.relay.exposed import RelayedService
from protocol.relay.greeting import TOKEN_BYTES, BadGreeting, ForName, dial_back, greeting_in
from protocol.server.admitted_sources import AdmittedSources
from protocol.server.limits import source_of, source_of_host
from protocol.trust import endpoints, host_port
from protocol.trust.names import tls_name
from protocol.trust.reachability import Addresses
from protocol.types import PeerId, RelayAddress

_PORT, _SECONDS, _ADDRESS = 7700, 1200, "203.0.113.7:7700"


def _greeting(data: bytes) -> None:
    """The first bytes of a connection to a relay, as they arrive in two pieces."""
    whole = greeting_in(data)
    assert whole is not None or len(data) < MAX_BYTES, "a relay that never decides keeps all that is sent"
    early = greeting_in(data[: len(data) // 2])
    assert early is None or early == whole
    if isinstance(whole, ForName):
        assert len(whole.name) < 256
        assert whole.name == whole.name.lower()
    if whole is None:
        raise BadGreeting("it says too little")


def _client_hello() -> bytes:
    context, sent = ssl.create_default_context(), ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=tls_name(PEER))
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


class _Agent(RelayAgent):
    """The node's end of a relay, without the connections that the relay asks for."""

    @staticmethod
    async def _carry(token: bytes, local: tuple[str, int], relay: tuple[str, int]) -> None:
        assert len(token) == TOKEN_BYTES


async def _relay_reply(data: bytes) -> None:
    """A reply of a relay to Expose."""
    reply = pb.ExposeReply.FromString(data)

    async def replies() -> AsyncIterator[pb.ExposeReply]:
        yield reply

    credentials: Any = None
    here = ("127.0.0.1", _PORT)
    servers = {service: lambda: here for service in RelayedService}
    relay = RelayAddress(PeerId(PEERS[1]), "relay.example:7800")
    agent = _Agent(relay, PeerId(PEER), credentials, servers)
    agent.admit(AdmittedSources({"203.0.113.7", "2001:db8::/64"}))
    await agent._read(replies(), here)
    await asyncio.sleep(0)
    if agent.connections:
        _check_claimed(host_port.host_port("relay.example", agent.dht_port))


def _relay_seeds() -> tuple[bytes, ...]:
    waiting = (
        pb.WaitingConnection(token=bytes(TOKEN_BYTES), dht=True, source="203.0.113.7"),
        pb.WaitingConnection(token=bytes(TOKEN_BYTES), source="2001:db8::/64"),
    )
    replies = [pb.ExposeReply(dht_port=7801), *(pb.ExposeReply(waiting=each) for each in waiting)]
    return tuple(reply.SerializeToString() for reply in replies)


class _Router(NatPmpRouter):
    """A router that answers every request with the same packet."""

    def __init__(self, answer: bytes) -> None:
        super().__init__("192.168.1.1")
        self._answer = answer

    async def _ask(self, request: bytes, read: Callable[[bytes], Any]) -> Any:
        return read(self._answer)


async def _nat_pmp(data: bytes) -> None:
    """A router's answer, and what this node then claims to be its address."""
    router, claimed = _Router(data), Addresses(f"192.168.1.2:{_PORT}")
    router.external = "44.10.0.101"
    try:
        with suppress(ValueError):
            router.external = await router.external_address()
            if not address_problem(router.external):
                _check_claimed(host_port.host_port(router.external, _PORT))
            return
        forwarding = await router.forward(_PORT, _PORT, _SECONDS)
    except RouterError as refusal:
        raise ValueError(refusal) from None
    mapping = PortMapping(router, [forwarding], 0.0)
    _check_claimed(mapping.public(claimed).endpoint)


def _check_claimed(endpoint: str) -> None:
    """The coordinator refuses a node that claims an endpoint which no peer may have."""
    try:
        endpoints.check_endpoint(endpoint)
    except ValueError as error:
        raise AssertionError(f"others make this node claim {endpoint}") from error


def _text(data: bytes) -> None:
    """Addresses in text: of endpoints, connections and sources."""
    text, refused = data.decode("utf-8", errors="replace"), None
    readers: tuple[Callable[[str], object], ...] = (
        host_port.split_host_port,
        endpoints.split_endpoint,
        endpoints.check_endpoint,
        endpoints.check_multiaddress,
        lambda source: AdmittedSources({source}),
    )
    for read in readers:
        try:
            read(text)
        except ValueError as error:
            refused = error
    source = source_of(text), source_of_host(text)
    for each in filter(None, source):
        AdmittedSources({"203.0.113.0/24", "2001:db8::/64"}).admits(each)
    if refused is not None and not any(map(_is_address, source)):
        raise refused


def _is_address(source: str) -> bool:
    with suppress(ValueError):
        ip_network(source)
        return True
    return False


@cache
def _service() -> PayloadService:
    """Holds its own payload of round 1, and awaits none."""
    payload_exchange.TURN_SECONDS = 0.0  # one peer has no turns to take
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    store = PayloadStore(folder / "payloads", 4)
    store.put(1, hashlib.sha256(_PAYLOAD).hexdigest(), _PAYLOAD)
    checkpoints, no_calls = CheckpointServer(folder / "checkpoints"), None
    return PayloadService(PeerId(PEER), 1, len(_PAYLOAD), store, checkpoints, no_calls)  # type: ignore[arg-type]


_PAYLOAD = b"payload" * 4
_CALLER = PEERS[1]


async def _fetch(data: bytes) -> None:
    wanted = pb.PayloadDescriptor.FromString(data)
    sent = b""
    async for chunk in _service().answer(_CALLER, wanted):
        if chunk.refusal:
            raise ValueError(chunk.refusal)
        sent += chunk.data
        if len(sent) >= len(_PAYLOAD):
            break  # the sender waits for this: it does not know what arrives
    assert sent == _PAYLOAD, "nothing else is ever sent"


async def _fetch_range(data: bytes) -> None:
    wanted = payload_pb2.RangeRequest.FromString(data)
    sent = b""
    async for chunk in _service().answer(_CALLER, wanted):
        if chunk.refusal:
            raise ValueError(chunk.refusal)
        sent += chunk.data
        if len(sent) >= wanted.nbytes:
            break  # the sender waits for this
    assert sent in _PAYLOAD, "nothing else is ever sent"


async def _push(data: bytes) -> None:
    async def stream() -> AsyncIterator[payload_pb2.PayloadChunk]:
        for message in messages_in(data):
            yield payload_pb2.PayloadChunk.FromString(message)

    (await _service().take_push(_CALLER, stream())).SerializeToString()


async def _state(data: bytes) -> None:
    async for chunk in _service().answer(_CALLER, payload_pb2.StateRequest.FromString(data)):
        assert chunk.refusal, "there is no checkpoint"


def _calls(loop: asyncio.AbstractEventLoop) -> list[Target]:
    """Calls for payloads, as a transport hands them over."""
    wanted = descriptor_of(1)
    wanted.sha256, wanted.nbytes = hashlib.sha256(_PAYLOAD).hexdigest(), len(_PAYLOAD)
    pushed = payload_pb2.PayloadChunk(announced=wanted).SerializeToString()
    piece = payload_pb2.PayloadChunk(data=_PAYLOAD).SerializeToString()
    state = payload_pb2.StateRequest(stage=1, part="stage", round=2)
    some = payload_pb2.RangeRequest(descriptor=wanted, first=2, nbytes=9)

    calls = (_fetch, _fetch_range, _push, _state)
    fetch, fetch_range, push, part = (partial(_run, loop, call) for call in calls)
    return [
        Target("rpc_fetch", fetch, (wanted.SerializeToString(),), pb.PayloadDescriptor),
        Target("rpc_fetch_range", fetch_range, (some.SerializeToString(),), payload_pb2.RangeRequest),
        Target("rpc_push", push, (stream_of([pushed, piece]),)),
        Target("rpc_state", part, (state.SerializeToString(),), payload_pb2.StateRequest),
    ]


def _run(loop: asyncio.AbstractEventLoop, read: Callable[[bytes], Any], data: bytes) -> None:
    try:
        loop.run_until_complete(read(data))
    except DecodeError as refusal:
        raise ValueError(refusal) from None


def targets(loop: asyncio.AbstractEventLoop) -> list[Target]:
    """Everything that is read here."""

    def run(read: Callable[[bytes], Any]) -> Callable[[bytes], object]:
        return partial(_run, loop, read)

    address = bytes((0, 128, 0, 0)) + bytes(4) + bytes((44, 10, 0, 101))
    ports = bytes((0, 130, 0, 0)) + bytes(4) + _PORT.to_bytes(2) * 2 + _SECONDS.to_bytes(4)
    texts = (_ADDRESS, "[2001:db8::7]:7700", "/ip4/203.0.113.7/tcp/7700", "ipv6:%5B2001:db8::1%5D:7700")
    return [
        Target("relay's first bytes", _greeting, (_client_hello(), dial_back(bytes(TOKEN_BYTES)))),
        Target("relay's reply", run(_relay_reply), _relay_seeds(), pb.ExposeReply),
        Target("NAT-PMP answer", run(_nat_pmp), (address, ports)),
        Target("address", _text, tuple(text.encode() for text in texts)),
        *_calls(loop),
    ]
