"""Members with fast uplinks pass payloads on, and fail while they do: every peer has processes of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import ask, end_processes, pems_of, start_process
from protocol.group.gathering import Schedule
from protocol.types import MemberLine, PeerId
from tests.support.certificates import credentials
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan

NBYTES = 700_000
"""Some chunks, of which the helper has sent half of the first when the fault strikes."""
HOME, STRONG = MemberLine(1_000_000, 4_000_000, True), MemberLine(100_000_000, 100_000_000, True)
NAMES = ("alice", "bob", "carol", "strong")
SECONDS = 60.0
"""To gather; helpers have half of it."""


@dataclass
class Swarm:
    processes: dict[str, asyncio.subprocess.Process]
    peers: dict[str, PeerId]

    async def ask(self, command: dict[str, Any], names: Sequence[str] = NAMES) -> list[dict[str, Any]]:
        return await asyncio.gather(*(ask(self.processes[name], command) for name in names))

    async def exchange(self, round_number: int, waits_for: Sequence[str] = NAMES) -> list[int]:
        """How many payloads each of `waits_for` has after a round of all peers."""
        proposed = await self.ask({"do": "propose", "round_number": round_number, "sizes": [NBYTES]})
        groups = [[each["descriptors"][0] for each in proposed]]
        lines = [asdict(STRONG if name == "strong" else HOME) for name in NAMES]
        command = {"do": "exchange", "groups": groups, "lines": lines, "seconds": SECONDS}
        working = {name: asyncio.create_task(ask(self.processes[name], command)) for name in NAMES}
        done = [(await working.pop(name))["held"] for name in waits_for]
        for task in working.values():
            task.cancel()
        await asyncio.gather(*working.values(), return_exceptions=True)
        return done


@asynccontextmanager
async def swarm_of(folder: Path, plan: FaultPlan) -> AsyncIterator[Swarm]:
    """Three homes and a helper; each runs the faults that `plan` has for its name."""
    processes: dict[str, asyncio.subprocess.Process] = {}
    try:
        for name in NAMES:
            command = [sys.executable, "-m", "benchmarks.round_member", str(folder / name)]
            processes[name] = await start_process(command, **plan.environment(name))
        swarm = Swarm(processes, {})
        introduced = await swarm.ask({"do": "introduce"})
        swarm.peers = {name: each["peer"] for name, each in zip(NAMES, introduced, strict=True)}
        known: list[str] = []
        for name, process in processes.items():
            start = {"do": "start", "address": "127.0.0.1", "initial_peers": known}
            started = await ask(process, {**start, "shown": pems_of(credentials(swarm.peers[name]))})
            known = known or started["addresses"]
        peers = list(swarm.peers.values())
        await swarm.ask({"do": "host", "peers": peers, "capacity": NBYTES, "stages": 1})
        yield swarm
    finally:
        await end_processes(list(processes.values()))


def test_the_helper_of_these_tests_passes_on_every_payload() -> None:
    peers = [PeerId(name) for name in NAMES]
    lines = {peer: STRONG if peer == "strong" else HOME for peer in peers}
    schedule = Schedule("group", lines)
    assert schedule.sources(PeerId("alice"), PeerId("bob")) == ("strong", "alice")


@pytest.mark.slow  # four nodes with all their processes; tests/virtual plays the same faults
async def test_homes_have_each_others_payloads_whatever_the_helper_does(tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "faults")
    # Long after each other: a helper that failed is left out of the next rounds.
    plan.fail_at("strong", 0, 2, Moment.SENDING, Action.CORRUPT, times=3)
    plan.fail_at("strong", 0, 22, Moment.SENDING, Action.DROP, times=3)
    plan.fail_at("strong", 0, 42, Moment.SENDING, Action.STOP, seconds=8.0)
    plan.fail_at("strong", 0, 62, Moment.SENDING, Action.KILL)
    async with swarm_of(tmp_path, plan) as swarm:
        for round_number in (1, 2, 21, 22, 41, 42, 61):
            assert await swarm.exchange(round_number) == [4] * 4
        # Its own payload is lost with it, so the others wait for it as long as they may.
        assert await swarm.exchange(62, NAMES[:3]) == [3] * 3
    plan.assert_all_fired()
