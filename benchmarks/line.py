"""How exactly several processes keep the limit of their node's line: ``python -m benchmarks.line``.

Each sender is a process that writes to a TCP connection as fast as the shared account of
:mod:`protocol.server.line` lets it. The receiver counts bytes, after the first second.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from protocol.server.line import Line, LineLimits

_SECONDS = 8.0
_CHUNK = bytes(256 << 10)


async def _send(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    line = Line.from_environment()
    while True:
        for piece in line.up.pieces(_CHUNK):
            await line.up.take(len(piece))
            writer.write(piece)
            await writer.drain()


async def _measure(megabits: float, senders: int) -> float:
    """Bytes that arrive, as a share of the limit."""
    counted, connections = 0, list[asyncio.Task[None]]()

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal counted
        task = asyncio.current_task()
        assert task is not None
        connections.append(task)
        while data := await reader.read(1 << 16):
            counted += len(data)
        writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    rate = megabits * 1e6 / 8
    with tempfile.TemporaryDirectory() as folder:
        line = Line.create(LineLimits(upload=rate), Path(folder) / "line")
        command = [sys.executable, "-m", "benchmarks.line", str(port)]
        environment = {**os.environ, **line.environment}
        children = [
            subprocess.Popen(command, env=environment)  # noqa: ASYNC220  it starts within a moment
            for _ in range(senders)
        ]
        try:
            while not counted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)
            before, began = counted, time.monotonic()
            await asyncio.sleep(_SECONDS)
            return (counted - before) / (time.monotonic() - began) / rate
        finally:
            for child in children:
                child.kill()
                child.wait()
            server.close()
            await asyncio.gather(*connections, return_exceptions=True)


async def _main() -> None:
    print("| limit, Mb/s | 1 process | 2 processes | 4 processes |\n|---|---|---|---|")
    for megabits in (1, 8, 100):
        shares = [await _measure(megabits, senders) for senders in (1, 2, 4)]
        print(f"| {megabits} | {' | '.join(f'{share:.1%}' for share in shares)} |", flush=True)


if __name__ == "__main__":
    asyncio.run(_send(int(sys.argv[1])) if len(sys.argv) > 1 else _main())
