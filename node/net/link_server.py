"""The accepting end of links: one gRPC server for each node, which also answers probes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Set
from dataclasses import dataclass
from typing import Any

import grpc

from node.net.link import LinkLimits, LinkMember, LiveLink, Received, read_message, refusal
from node.net.link_handshake import SERVICE, check_hello, hello_in, hello_of, stream_options, unreachable
from node.net.probe import answer_probe
from node.security.channels import server_tls
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.server.descriptors import raise_descriptor_limit
from protocol.server.line import UNLIMITED, Line
from protocol.server.renewed_server import RenewedServer
from protocol.trust.host_port import host_port
from protocol.trust.names import identity_of, peer_of, peer_uri
from protocol.types import PeerId
from protocol.wire.link_message import LinkMessage
from protocol.wire.probing import ProbeDoor
from protocol.wire.rpc_errors import abort_with

log = logging.getLogger(__name__)

_MAX_STREAMS = 64
_PROBES_AT_ONCE = 2
_STREAMS_PER_PEER = 4  # one link, and earlier attempts whose end this server has not noticed yet
_HANDSHAKE_SECONDS = 20.0
_RENEWAL_SECONDS = 10.0
"""How often a changed certificate is looked for."""


@dataclass(frozen=True)
class _Expectation:
    here: LinkMember
    neighbour: LinkMember
    limits: LinkLimits
    link: asyncio.Future[LiveLink]


class LinkServer:
    """Accepts links from neighbours that dial. Refuses a stream that no :meth:`accept` expects within 20 s.

    Args:
        credentials: called every few seconds; the certificate to show and the authority to trust.
        received: called for each timed frame of an accepted link.
        probes: admits the probes of other peers.
        line: how fast links and probes may send and receive, also those that this node dials.
    """

    def __init__(
        self,
        credentials: Callable[[], Credentials],
        received: Received | None = None,
        probes: ProbeDoor | None = None,
        line: Line = UNLIMITED,
    ) -> None:
        self._received, self.line = received, line
        self._probes = probes or ProbeDoor(_PROBES_AT_ONCE, time.monotonic)
        self._banned: Callable[[], Set[PeerId]] = frozenset
        self._expected: dict[PeerId, _Expectation] = {}
        self._expectations = asyncio.Condition()
        self._streams: Counter[str] = Counter()
        self._server = RenewedServer(self._new_server, lambda: server_tls(credentials()), same_port=True)
        self._renewing: asyncio.Task[None] | None = None
        self.port = 0  # before it listens

    async def start(self, host: str, port: int) -> int:
        """Listen and return the bound port. Raises HetnodeError PORT_IN_USE."""
        # Strangers can hold a connection for 10 s each, and the node must still be able to open its files.
        raise_descriptor_limit()
        try:
            bound = await self._server.start(host, port)
        except OSError:
            raise HetnodeError(
                ErrorCode.PORT_IN_USE,
                f"Cannot listen for links on {host_port(host, port)}: the port is taken, or the address is "
                "not ours.",
                "Give another --listen HOST:PORT; port 0 takes a free one.",
            ) from None
        self._renewing = asyncio.create_task(self._keep_renewed())
        self.port = bound
        return bound

    async def renew(self) -> None:
        """Show the newest credentials to new connections, from now on. The open ones go on."""
        try:
            await self._server.port()
        except OSError as error:
            log.error("links are still accepted under the former certificate: %s", error)

    async def _keep_renewed(self) -> None:
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            await self.renew()

    def _new_server(self, *options: tuple[str, int]) -> grpc.aio.Server:
        server = grpc.aio.server(options=(*stream_options(), *options), maximum_concurrent_rpcs=_MAX_STREAMS)
        server.add_generic_rpc_handlers((_handlers(self),))
        return server

    async def accept(
        self, here: LinkMember, neighbour: LinkMember, limits: LinkLimits, deadline: float
    ) -> LiveLink:
        """Wait up to `deadline` seconds for the link that `neighbour` opens to `here`."""
        future: asyncio.Future[LiveLink] = asyncio.get_running_loop().create_future()
        async with self._expectations:
            expectation = self._expected[neighbour.peer] = _Expectation(here, neighbour, limits, future)
            self._expectations.notify_all()
        try:
            async with asyncio.timeout(deadline):
                return await future
        except TimeoutError:
            raise unreachable(neighbour, f"it did not open its link within {deadline:.0f} s") from None
        finally:
            # A later call for the same peer may have replaced this expectation by its own.
            if self._expected.get(neighbour.peer) is expectation:
                del self._expected[neighbour.peer]

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        await self._server.stop(grace=1.0)

    def refuse_probes_of(self, banned: Callable[[], Set[PeerId]]) -> None:
        """Refuse all calls of the `banned()` peers from now on. Their links end when the plan changes."""
        self._banned = banned

    def limit_probes_while(self, is_busy: Callable[[], bool]) -> None:
        """From now on answer only echoes while `is_busy()`: training needs the bandwidth."""
        self._probes.is_busy = is_busy

    async def Probe(
        self, requests: AsyncIterator[pb.ProbeMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        caller = identity_of(context)
        try:
            self._check_not_banned(caller)
            await answer_probe(requests, context, self._probes, self.line)
        except HetnodeError as error:
            log.debug("refused a probe of %s: %s", caller, error)
            await abort_with(context, error)

    def _check_not_banned(self, caller: str) -> None:
        if peer_of(caller) in self._banned():
            raise refusal(ErrorCode.BANNED, f"{caller} is banned from the run")

    async def Exchange(
        self, requests: AsyncIterator[LinkMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        caller = identity_of(context)
        self._streams[caller] += 1
        try:
            await self._serve(caller, context)
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    async def _serve(self, caller: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Carry one stream, opened by the holder of a certificate for the URI `caller`, until it ends."""
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                self._check_not_banned(caller)
                if self._streams[caller] > _STREAMS_PER_PEER:
                    raise refusal(ErrorCode.RATE_LIMITED, f"{caller} has {_STREAMS_PER_PEER} streams open")
                hello = hello_in(await read_message(context.read()))
                if hello is None:
                    raise refusal(ErrorCode.FRAME_CORRUPT, "the first message of a link must be a hello")
                peer = PeerId(hello.peer)
                # The greeting is only a claim; the certificate of the TLS handshake proves the peer.
                if caller != peer_uri(peer):
                    raise refusal(
                        ErrorCode.CERTIFICATE_REFUSED,
                        f"{peer!r:.80} came with the certificate of {caller!r:.100}",
                    )
                async with self._expectations:
                    await self._expectations.wait_for(lambda: peer in self._expected)
                expected = self._expected[peer]
                check_hello(hello, expected.neighbour)
                await context.write(hello_of(expected.here))
        except TimeoutError:
            log.warning("refused a link of %s: this node does not expect it", caller)
            await abort_with(context, refusal(ErrorCode.UNKNOWN_PEER, "this node does not expect it"))
        except HetnodeError as error:
            # An unknown peer may be ahead of this node; it tries again until both are in the same round.
            level = logging.DEBUG if error.code is ErrorCode.UNKNOWN_PEER else logging.WARNING
            log.log(level, "refused a link of %s: %s", caller, error)
            await abort_with(context, error)
        else:
            link = LiveLink(
                expected.neighbour, context.read, context.write, expected.limits, self._received, self.line
            )
            if expected.link.done():  # `accept` has timed out, or another stream was faster
                await link.close()
                return
            expected.link.set_result(link)
            reason = await link.wait_closed()
            if not link.is_closed_here:
                await abort_with(context, reason)


def _handlers(servicer: LinkServer) -> grpc.GenericRpcHandler:
    """The handlers that protoc would generate, except that LinkMessage encodes the messages of Exchange."""
    exchange = grpc.stream_stream_rpc_method_handler(
        servicer.Exchange, LinkMessage.from_bytes, LinkMessage.to_bytes
    )
    probe = grpc.stream_stream_rpc_method_handler(
        servicer.Probe, pb.ProbeMessage.FromString, pb.ProbeMessage.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Exchange": exchange, "Probe": probe})
