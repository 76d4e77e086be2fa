"""gRPC without sockets: stands for ``grpc.aio.server`` and ``grpc.aio.secure_channel`` in a virtual swarm.

Stubs, servicers, messages, interceptors, statuses and trailing metadata are the real ones, and messages
travel as bytes. There is no TLS: a server knows from which machine a call comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from protocol.trust.names import OPERATOR_URI, peer_of
from tests.virtual.loop import VirtualLoop, VirtualProcess, current_process, running_loop
from tests.virtual.network import OPERATOR, Network, current_machine
from tests.virtual.rpc_call import Unavailable
from tests.virtual.rpc_client import VirtualChannel
from tests.virtual.rpc_server import VirtualServer

_CONNECT_SECONDS = 20.0


class VirtualGrpc:
    """All servers of a virtual swarm.

    Attributes:
        duplicated: names of methods. The server gets every call of them twice.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.duplicated: set[str] = set()
        self._servers: dict[str, VirtualServer] = {}
        self._uris: dict[str, str] = {OPERATOR: OPERATOR_URI}
        self._ports = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace ``grpc.aio`` by this object."""

        def server(*_: Any, interceptors: Sequence[Any] = (), **__: Any) -> VirtualServer:
            return VirtualServer(self, interceptors)

        def channel(target: str, *_: Any, **__: Any) -> VirtualChannel:
            host, _, port = target.removeprefix("ipv4:").rpartition(":")
            loop = asyncio.get_running_loop()
            if target.startswith("ipv4:") and isinstance(loop, VirtualLoop):
                host = loop.name_of(host)  # servers are known by the names of their machines
            return VirtualChannel(self, f"{host}:{port}")

        with patch("grpc.aio.server", server), patch("grpc.aio.secure_channel", channel):
            yield

    def register(self, name: str, uri: str) -> None:
        """Let calls of the machine `name` carry a certificate for `uri`."""
        self._uris[name] = uri

    def uri_of(self, name: str) -> str:
        return self._uris.get(name, "")

    def peer_of(self, name: str) -> str:
        """The peer id of the machine `name`."""
        return str(peer_of(self.uri_of(name)))

    def free_port(self) -> int:
        self._ports += 1
        return self._ports

    def deliveries(self, path: str) -> int:
        return 2 if path.rpartition("/")[2] in self.duplicated else 1

    def add_server(self, server: VirtualServer, addresses: Sequence[str]) -> None:
        self._servers |= dict.fromkeys(addresses, server)
        self.network.announce_change()

    def remove_server(self, server: VirtualServer) -> None:
        self._servers = {address: other for address, other in self._servers.items() if other is not server}
        self.network.close_connections_to(server)

    def kill(self, process: VirtualProcess) -> None:
        """SIGKILL: end `process`, and close its ports and connections."""
        running_loop().end(process)
        self._servers = {
            address: each for address, each in self._servers.items() if each.process is not process
        }
        self.network.end_process(process)

    async def connect(self, address: str, wait_for_ready: bool) -> VirtualServer:
        """The server at `address`.

        Raises Unavailable if there is none; with `wait_for_ready` it waits for one without a limit.
        """
        clock = asyncio.get_running_loop().time
        caller, host, ends = current_machine(), address.rpartition(":")[0], clock() + _CONNECT_SECONDS
        process = current_process.get()
        while True:
            if process is not None and process.is_unwound:
                raise Unavailable("the test is over")
            can_call, server = self.network.can_call(caller, host), self._servers.get(address)
            if can_call and server is not None:
                await self.network.transfer(caller, host, 0)
                if self._servers.get(address) is server:
                    return server
                continue
            if can_call and not wait_for_ready:
                raise Unavailable(f"connection to {address} refused")
            try:
                async with asyncio.timeout_at(None if wait_for_ready else ends):
                    await self.network.wait_for_change()
            except TimeoutError:
                raise Unavailable(f"connection to {address} timed out") from None
