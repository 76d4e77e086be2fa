"""A process of benchmarks.calls: the server, or some of the clients."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.processes import answer_commands
from coordinator.authority import ServerCertificate, open_authority
from node.security.channels import open_channel
from node.security.credentials import Credentials, new_tls_key
from protocol.server.renewed_server import ServerTls
from protocol.trust.names import COORDINATOR_NAME
from protocol.trust.tls import tls_key_from_der
from tests.builders import keyed

_REQUEST, _REPLY = b"q" * 200, b"r" * 50
_HANDSHAKES_AT_ONCE = 16
_PENDING = 16_384


class Member:
    """The commands of the benchmark."""

    def __init__(self) -> None:
        self._server: grpc.aio.Server
        self._unary: list[Any] = []
        self._streams: list[Any] = []

    async def serve(self, folder: str) -> dict[str, str]:
        authority = open_authority(Path(folder), "calls")
        tls = ServerTls(*ServerCertificate(authority).pair(), authority.pem)
        limits = ("grpc.server.max_pending_requests", "grpc.server.max_pending_requests_hard_limit")
        self._server = grpc.aio.server(options=[(limit, _PENDING) for limit in limits])
        handlers = {
            "unary": grpc.unary_unary_rpc_method_handler(_answer),
            "stream": grpc.stream_stream_rpc_method_handler(_answer_each),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("calls", handlers),))
        port = self._server.add_secure_port("127.0.0.1:0", tls.credentials())
        await self._server.start()
        return {"address": f"127.0.0.1:{port}"}

    async def cpu(self) -> dict[str, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"seconds": used.ru_utime + used.ru_stime}

    async def connect(self, folder: str, address: str, kind: str, numbers: list[int]) -> dict[str, Any]:
        """Connect the clients of these numbers, each with a certificate of its own."""
        authority = open_authority(Path(folder), "calls")
        at_once = asyncio.Semaphore(_HANDSHAKES_AT_ONCE)

        async def connect(number: int) -> None:
            blank = Credentials(authority.pem, b"", new_tls_key())
            certificate = authority.for_peer(keyed(number).peer, tls_key_from_der(blank.public_key))
            own_connection = (("grpc.use_local_subchannel_pool", 1),)
            tls = replace(blank, certificate=certificate)
            channel = open_channel(address, tls, COORDINATOR_NAME, own_connection)
            async with at_once:
                call = channel.unary_unary("/calls/unary")
                await call(_REQUEST, wait_for_ready=True)
            self._unary.append(call)
            if kind == "stream":
                stream = channel.stream_stream("/calls/stream")()
                await _exchange(stream)
                self._streams.append(stream)

        await asyncio.gather(*map(connect, numbers))
        return {}

    async def call(self, calls: int) -> dict[str, list[float]]:
        """Call `calls` times with each client, all at once. Returns when each was answered, in seconds."""
        began = time.monotonic()

        async def timed(made: Any) -> float:
            await made
            return time.monotonic() - began

        if self._streams:
            made: list[Any] = [_exchange(stream) for stream in self._streams]
        else:
            made = [call(_REQUEST) for call in self._unary for _ in range(calls)]
        return {"seconds": await asyncio.gather(*map(timed, made))}


async def _answer(_: bytes, __: object) -> bytes:
    return _REPLY


async def _answer_each(requests: AsyncIterator[bytes], context: Any) -> None:
    async for _ in requests:
        await context.write(_REPLY)


async def _exchange(stream: Any) -> None:
    await stream.write(_REQUEST)
    await stream.read()


async def _main() -> None:
    await answer_commands(Member())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main())
