"""Digests are told in the background: nobody waits for them, and a failure reaches who depends on them."""

from __future__ import annotations

import asyncio

import pytest

from node.net.attestations import Attestations
from node.net.spreading import PEERS_PER_SECOND
from protocol.types import Part
from tests.virtual.loop import run

FAILURE = RuntimeError("other replicas have another anchor")


class _Coordinator:
    """Hears of anchors; the answers wait for `answering`, and are `failure` if there is any."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Part]] = []
        self.answering, self.asked = asyncio.Event(), asyncio.Event()
        self.answering.set()
        self.failure: Exception | None = None

    async def tell(self, stage: int, part: Part) -> None:
        self.heard.append((stage, part))
        self.asked.set()
        await self.answering.wait()
        if self.failure is not None:
            raise self.failure


async def test_anchors_are_told_one_after_the_other_and_each_newest_one_once() -> None:
    coordinator = _Coordinator()
    attestations = Attestations(coordinator.tell, lambda: 0)
    await attestations.told()
    for stage in (1, 0, 1):
        attestations.add(stage, Part.STAGE)
    await attestations.told()
    assert coordinator.heard == [(1, Part.STAGE), (0, Part.STAGE)]


async def test_a_digest_that_is_due_during_a_call_is_told_after_it() -> None:
    coordinator = _Coordinator()
    coordinator.answering.clear()
    attestations = Attestations(coordinator.tell, lambda: 0)
    attestations.add(0, Part.STAGE)
    await coordinator.asked.wait()
    attestations.add(0, Part.STAGE)
    coordinator.answering.set()
    await attestations.told()
    assert coordinator.heard == 2 * [(0, Part.STAGE)]


async def test_a_failure_is_raised_once_to_all_who_wait() -> None:
    coordinator = _Coordinator()
    coordinator.failure = FAILURE
    attestations = Attestations(coordinator.tell, lambda: 0)
    attestations.add(0, Part.STAGE)
    attestations.add(1, Part.STAGE)
    failure = asyncio.create_task(attestations.failure())
    with pytest.raises(RuntimeError, match="another anchor"):
        await attestations.told()
    assert await failure is FAILURE
    await attestations.told()
    assert coordinator.heard == [(0, Part.STAGE)], "nothing more is told"


async def test_nothing_is_told_after_a_drop() -> None:
    coordinator = _Coordinator()
    attestations = Attestations(coordinator.tell, lambda: 0)
    attestations.add(0, Part.STAGE)
    attestations.drop()
    await attestations.told()
    assert not coordinator.heard
    coordinator.failure = FAILURE
    attestations.add(0, Part.STAGE)
    await coordinator.asked.wait()
    attestations.drop()
    await attestations.told()


def test_the_members_of_a_large_swarm_spread_over_seconds() -> None:
    peers = 1000

    async def began() -> float:
        coordinator = _Coordinator()
        attestations = Attestations(coordinator.tell, lambda: peers)
        begin = asyncio.get_running_loop().time()
        attestations.add(0, Part.STAGE)
        await attestations.told()
        return asyncio.get_running_loop().time() - begin

    pauses = [run(began(), 3600.0) for _ in range(100)]
    assert 0 <= min(pauses) < max(pauses) <= peers / PEERS_PER_SECOND
    assert max(pauses) - min(pauses) > 0.5 * peers / PEERS_PER_SECOND
