"""Slow clients and garbage: of them only their own connections suffer."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from coordinator.ops.dashboard.application import MOST_CONNECTIONS
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import running
from tests.support.dashboard import EventReader, address_of, ask, open_socket

A, B = (keyed(i) for i in range(2))
LOOPBACK = "127.0.0.1:0"
HEAD = b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def garbage(seed: int) -> list[bytes]:
    """Requests that no browser sends."""
    noise = random.Random(seed)
    return [
        noise.randbytes(5000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise.randbytes(200),  # TLS
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: " + b"a" * 100_000,
        b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /%00%ff/../.. HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: [\r\n\r\n",
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n" + b"a" * 50_000,
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\nx",
        b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        (HEAD + b"\r\n") * 200,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]


async def test_200_slow_clients_and_garbage_do_not_disturb_run_or_readers(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK) as run:
        reader = await asyncio.to_thread(EventReader, address_of(tmp_path))
        await asyncio.to_thread(reader.until, phase="gathering")
        address = address_of(tmp_path)
        # A third says nothing, a third never ends its request, a third never reads its events.
        begun = [b"", HEAD, HEAD + b"\r\n"]
        slow = [open_socket(address, begun[i % 3]) for i in range(200)]
        for sent in garbage(1):
            client = open_socket(address)
            try:
                client.sendall(sent)
            except OSError:
                pass  # refused before it was all sent
            finally:
                client.close()
        await run.join(A)
        await run.join(B)
        for number in range(1, 4):
            await run.settle(0, number, A, B)
            await run.settle(1, number, A, B)
        record = await asyncio.to_thread(reader.until, rounds_decided=3)
        assert record["stage_rounds_committed"] == 6
        assert (await ask(tmp_path, "/")).status == 200
        reader.close()
        for client in slow:
            client.close()


async def test_more_connections_than_are_served_close_the_oldest_idle_ones(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK):
        reader = await asyncio.to_thread(EventReader, address_of(tmp_path))
        await asyncio.to_thread(reader.until, phase="gathering")
        clients = [open_socket(address_of(tmp_path)) for _ in range(MOST_CONNECTIONS + 8)]
        assert (await ask(tmp_path, "/")).status == 200
        assert await asyncio.to_thread(clients[0].recv, 1) == b""
        assert await asyncio.to_thread(reader.next) is not None, "a reader of events stays"
        reader.close()
        for client in clients:
            client.close()
