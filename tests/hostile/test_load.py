"""1,000 peers of one script come into a run at the same time, and send heartbeats. Prints the figures.

    python -m pytest -m hostile -n 0 -s tests/hostile/test_load.py

The test asserts that every peer is in and every heartbeat is answered, and no time. The figures of one
machine are in docs/findings.md.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.builders import spec_of
from tests.hostile.measure import unharmed
from tests.hostile.peer import Peer, Refused
from tests.hostile.wire import Invite
from tests.support.processes import ProcessSwarm

PEERS, HEARTBEATS = 1000, 10_000
AT_ONCE = 32
_GROWTH = 512 << 20  # not an attack: what 1,000 members take


@dataclass(frozen=True)
class Figures:
    """Seconds of each call, and of all of them together."""

    what: str
    each: list[float]
    whole: float

    def __str__(self) -> str:
        cuts = statistics.quantiles(self.each, n=100, method="inclusive")
        return (
            f"{len(self.each)} {self.what} in {self.whole:.1f} s, {len(self.each) / self.whole:.0f} per s; "
            f"median {1000 * cuts[49]:.0f} ms, p99 {1000 * cuts[98]:.0f} ms, "
            f"most {1000 * max(self.each):.0f} ms"
        )


async def timed(what: str, calls: Iterable[Callable[[], Awaitable[object]]], at_once: int) -> Figures:
    """Make the calls, at most `at_once` at the same time."""
    room, each = asyncio.Semaphore(at_once), []

    async def one(call: Callable[[], Awaitable[object]]) -> None:
        async with room:
            began = time.perf_counter()
            await call()
            each.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*map(one, calls))
    return Figures(what, each, time.perf_counter() - began)


async def load(run: ProcessSwarm, count: int, heartbeats: int) -> list[Figures]:
    """Enroll and join `count` peers, then send `heartbeats` from all of them in turn."""
    invite = run.invite(uses=count)
    first = Peer()
    first.invite = Invite.parse(invite)
    authority = await first.read_authority()
    peers = [Peer() for _ in range(count)]

    async def enter(peer: Peer) -> None:
        await with_retries(lambda: peer.enroll(invite, authority))

    async def join(peer: Peer) -> None:
        await with_retries(peer.join)

    found = [
        await timed("enrollments", [lambda peer=peer: enter(peer) for peer in peers], AT_ONCE),
        await timed("joins", [lambda peer=peer: join(peer) for peer in peers], AT_ONCE),
    ]
    beats = [lambda peer=peers[i % count]: peer.call("Heartbeat") for i in range(heartbeats)]
    found.append(await timed("heartbeats", beats, AT_ONCE))
    known = (await peers[0].call("Status")).peers
    assert {each.peer for each in known} == {peer.id for peer in peers}
    assert all(each.lifecycle != "gone" for each in known)
    await asyncio.gather(*(peer.close() for peer in peers))
    return found


async def with_retries(call: Callable[[], Awaitable[object]]) -> None:
    """Repeat a call that the other end asks to repeat later, or could not answer now."""
    while True:
        try:
            await call()
        except Refused as refused:
            if refused.code != "rate-limited" and refused.status.name != "UNAVAILABLE":
                raise
            await asyncio.sleep(0.5)
        else:
            return


@pytest.mark.hostile
async def test_a_thousand_peers_come_in_at_once(tmp_path: Path) -> None:
    # A busy machine is slow, but it must lose no peer: the heartbeats begin when all have joined.
    spec = spec_of(1, PEERS, timing__heartbeat=60.0, timing__lost_after=600.0)
    with ProcessSwarm(spec, tmp_path, {}) as run:
        run.start_coordinator()
        with unharmed(run, _GROWTH) as watch:
            print(f"\nload of this machine before: {os.getloadavg()[0]:.1f}")
            for figures in await load(run, PEERS, HEARTBEATS):
                print(figures)
            print(watch.report())
