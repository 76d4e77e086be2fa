"""Processes reduce in parts, and one of them is killed in the middle of a round."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

SECONDS, PATIENT = 12.0, 60.0


class Member:
    """A running tests.support.part_member with libp2p's daemon in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.peer = self.address = ""

    async def line(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.readline(), PATIENT)).decode().strip()

    async def introduce(self) -> None:
        self.peer, self.address = (await self.line()).split()

    def tell(self, text: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n".encode())

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


@asynccontextmanager
async def members(fractions: str, stalling: int | None) -> AsyncIterator[list[Member]]:
    """Four members that are ready to exchange; fractions are in the order of their peer ids."""
    async with AsyncExitStack() as stack:
        started: list[Member] = []
        for position in range(4):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.support.part_member", str(position), fractions, str(SECONDS)),
                *("stalls" if position == stalling else "runs", *(each.address for each in started)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            started.append(Member(process))
            stack.push_async_callback(started[-1].kill)
            await started[-1].introduce()
        for each in started:
            each.tell(" ".join(sorted(member.peer for member in started)))
        for each in started:
            assert await each.line() == "ready"
        yield started


@pytest.mark.slow
async def test_four_processes_get_the_same_result() -> None:
    async with members("1,1,1,1", None) as all_members:
        found = await outcomes(all_members)
    assert len({each["digest"] for each in found}) == 1
    assert found[0]["digest"] is not None
    assert all(each["missing"] == each["uncounted"] == [] for each in found)


@pytest.mark.slow
async def test_after_a_reducer_is_killed_its_parts_are_missing_and_all_others_agree() -> None:
    async with members("1,1,1,1", 3) as (*others, victim):
        for each in (*others, victim):
            each.tell()
        assert await victim.line() == "stalled"
        await victim.kill()
        found = [json.loads(await each.line()) for each in others]
    assert {tuple(each["missing"]) for each in found} == {(victim.peer,)}
    # A part that one of them has got before counts for nobody: the round has no result.
    assert {each["digest"] for each in found} == {None}


async def outcomes(some: list[Member]) -> list[dict[str, Any]]:
    for each in some:
        each.tell()
    return [json.loads(await each.line()) for each in some]
