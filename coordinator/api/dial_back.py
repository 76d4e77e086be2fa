"""Dials the addresses that a peer claims, before its call is answered.

An address counts if a TLS server answers there with the certificate of that very peer. The transport speaks
another protocol: its port counts as well if it accepts a connection on a host that is known to be the peer's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol

from coordinator.membership.reachability import check_claims, reached
from protocol.server.calls import rate_limited
from protocol.server.limits import FairShare, source_of_host
from protocol.trust.endpoints import check_address, split_endpoint
from protocol.trust.names import tls_name
from protocol.trust.reachability import DIAL_BACK_SECONDS, Addresses, Reached, address_obstacle, port_obstacle
from protocol.types import PeerId

_AT_ONCE, _AT_ONCE_OF_A_SOURCE = 64, 16
_RESOLVERS = 4
"""Names that are resolved at the same time, in threads of their own: a slow name must not stop the store."""


class DialBack(Protocol):
    """Tries the addresses that `peer` claims in a call of `caller`, gRPC's name of the client."""

    async def __call__(self, peer: PeerId, caller: str, addresses: Addresses) -> Reached: ...


@dataclass(frozen=True)
class _Attempt:
    """What happened at one address. `host` is the IP address; `is_peer` is proved by TLS."""

    problem: str
    host: str = ""
    is_connected: bool = False

    @property
    def is_peer(self) -> bool:
        return not self.problem


class TlsDialBack:
    """Dials back over the network, for at most DIAL_BACK_SECONDS.

    Args:
        authority: PEM; what answers must show its certificate for the peer.
        source_of: the source of a call, by gRPC's name of the client.
    """

    def __init__(self, authority: bytes, source_of: Callable[[str], str]) -> None:
        self._source_of = source_of
        self._tls = ssl.create_default_context(cadata=authority.decode())
        # With TLS 1.3 a handshake ends before the server asks for a certificate, and this end needs none.
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        self._tls.set_alpn_protocols(["h2"])
        self._places = FairShare(_AT_ONCE_OF_A_SOURCE, _AT_ONCE)
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="resolve")

    async def __call__(self, peer: PeerId, caller: str, addresses: Addresses) -> Reached:
        """Raises HetnodeError: BAD_ADDRESS; RATE_LIMITED if too many are dialled back at the same time."""
        check_claims(addresses.endpoint, addresses.dht)
        source = self._source_of(caller)
        if not self._places.take(source):
            raise rate_limited("Too many nodes are dialled back at the same time")
        try:
            endpoint, dht = await asyncio.gather(
                self._attempt(addresses.endpoint, peer, source), self._attempt(addresses.dht, peer, source)
            )
        finally:
            self._places.release(source)
        is_known_host = dht.host and (
            (endpoint.is_peer and dht.host == endpoint.host) or source_of_host(dht.host) == source
        )
        dht_problem = "" if dht.is_connected and is_known_host else dht.problem
        return reached(addresses, endpoint.problem, dht_problem)

    async def _attempt(self, address: str, peer: PeerId, source: str) -> _Attempt:
        if not address:
            return _Attempt("it is not claimed")
        if obstacle := port_obstacle(address):
            return _Attempt(obstacle)
        host, connection = "", None
        try:
            async with asyncio.timeout(DIAL_BACK_SECONDS):
                name, port = split_endpoint(address)
                host = await self._resolved(name, port)
                if obstacle := address_obstacle(host, source):
                    return _Attempt(obstacle)
                _, connection = await asyncio.open_connection(host, port)
                await connection.start_tls(self._tls, server_hostname=tls_name(peer))
        except TimeoutError:
            problem = "no answer" if connection is None else "it accepts connections, but not as this node"
        except ssl.SSLCertVerificationError:
            problem = "another peer answers"
        except (OSError, ssl.SSLError, EOFError) as error:
            plain = isinstance(error, OSError) and connection is None
            problem = _cause_of(error) if plain else "it accepts connections, but not as this node"
        except ValueError as error:  # the name resolves to an address that no peer may have
            problem = str(error)
        else:
            problem = ""
        finally:
            if connection is not None:
                connection.transport.abort()
        return _Attempt(problem, host, connection is not None)

    async def _resolved(self, name: str, port: int) -> str:
        """The first IP address of `name` that a peer may have. Raises OSError, ValueError."""
        with suppress(ValueError):
            return str(ip_address(name))
        loop, last = asyncio.get_running_loop(), ValueError(f"{name} has no address")
        found = await loop.run_in_executor(
            self._resolvers, lambda: socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        )
        for *_, (host, *_) in found:
            try:
                check_address(ip_address(host))
            except ValueError as error:
                last = error
            else:
                return str(host)
        raise last


def _cause_of(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "the connection is refused"
    if isinstance(error, socket.gaierror):
        return "the name is not known"
    return "there is no way to it"
