"""The limit of a node's memory: the coordinator plans with it, and stages that cannot fit are refused."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Role
from tests.virtual.scenario import Play, swarm_spec
from tests.virtual.swarm import VirtualSwarm


def test_the_coordinator_is_told_no_more_memory_than_the_limit(play: Play) -> None:
    members = {"p": Role.STAGE, "q": Role.STAGE}

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.nodes["p"].memory_limit = 500_000_000
        swarm.nodes["q"].memory_limit = 10**15  # more than the machine has
        swarm.start()
        await swarm.until_over()
        told = {name: swarm.state.peers[swarm.peer(name)].capacity.memory_bytes for name in members}
        assert told == {"p": 500_000_000, "q": 2**30}

    play(scenario, members, swarm_spec(members, rounds=2))


def test_stages_that_cannot_fit_are_refused_with_a_sentence(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.nodes["a"].memory_limit = 100_000
        swarm.start("a")
        with pytest.raises(HetnodeError) as refused:
            await swarm.until_over("a", seconds=60)
        assert refused.value.code is ErrorCode.BAD_OPTION
        assert "--memory-limit 0.0001" in refused.value.cause
        assert "--role stage" in refused.value.remedy

    play(scenario, {"a": Role.REPLICA})


def test_a_stage_peer_without_room_for_any_stage_only_waits(play: Play) -> None:
    members = {"p": Role.STAGE, "q": Role.STAGE}

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.nodes["q"].memory_limit = 100_000
        swarm.start()
        await swarm.until(lambda state: len(state.peers) == 2)
        await asyncio.sleep(60)
        assert not swarm.state.plans
        assert all(node.is_running for node in swarm.nodes.values())

    play(scenario, members)
