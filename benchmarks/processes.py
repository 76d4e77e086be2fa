"""Processes of a benchmark. They answer commands: lines of JSON over standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from node.security.credentials import Credentials

_CLOSE_SECONDS = 10.0
_LINE_BYTES = 2**22


async def start_process(command: Sequence[str], **environment: str) -> asyncio.subprocess.Process:
    """Start a process that runs :func:`answer_commands`."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C is for the benchmark; these processes end with their input
        limit=_LINE_BYTES,
    )


async def ask(process: asyncio.subprocess.Process, command: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `process` to `command`. Raises RuntimeError if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(command).encode() + b"\n")
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a process of the benchmark has ended: see its output above")
    answer: dict[str, Any] = json.loads(line)
    return answer


async def end_processes(processes: Sequence[asyncio.subprocess.Process]) -> None:
    """Close their input, and kill those that do not end by themselves."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    await asyncio.gather(*map(_end, processes))


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def answer_commands(member: object) -> None:
    """Answer each command with the method of `member` that its "do" names, until the input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    commands: asyncio.Queue[bytes] = asyncio.Queue()

    async def read() -> None:
        while line := await reader.readline():
            commands.put_nowait(line)

    async def answer() -> None:
        while True:
            command = json.loads(await commands.get())
            reply = await getattr(member, command.pop("do"))(**command)
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()

    # Two tasks, because the end of the input also ends a command that is being answered.
    tasks = asyncio.create_task(read()), asyncio.create_task(answer())
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


def pems_of(credentials: Credentials) -> dict[str, str]:
    """`credentials` as JSON."""
    return {name: pem.decode() for name, pem in asdict(credentials).items()}


def credentials_of(pems: Mapping[str, str]) -> Credentials:
    """The inverse of :func:`pems_of`."""
    return Credentials(**{name: pem.encode() for name, pem in pems.items()})
