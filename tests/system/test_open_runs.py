"""Runs that anyone may join: what strangers count, and the order in which they are let in."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from coordinator.membership.open_places import OpenTerms
from coordinator.run.state.commands import Ban, CreateInvite, Enroll
from protocol.errors import HetnodeError
from protocol.types import Role
from tests.builders import spec_of
from tests.support.cheats import cheat
from tests.support.processes import COORDINATOR, ProcessSwarm
from tests.virtual.network import current_machine
from tests.virtual.scenario import FULL, Play, contributions
from tests.virtual.swarm import VirtualSwarm

ROUNDS = 18


async def enroll(swarm: VirtualSwarm, *names: str) -> None:
    """As the coordinator's enrollment does, which these swarms do not have: all come from one address."""
    for name in names:
        await swarm.coordinator.command_loop.execute(OpenTerms(64, 8).ask(swarm.peer(name), "192.0.2.1"))


async def let_in(swarm: VirtualSwarm, terms: OpenTerms) -> None:
    """The members of FULL have invites, and the coordinator is started again for everyone."""
    await swarm.coordinator.command_loop.execute(CreateInvite("invite", "a" * 64, 3, 3600.0, None))
    for name in FULL:
        await swarm.coordinator.command_loop.execute(Enroll(swarm.peer(name), "invite", "a" * 64))
    swarm.coordinator.terms = terms
    await kill_and_start_coordinator(swarm)
    await swarm.until_round(2)


async def kill_and_start_coordinator(swarm: VirtualSwarm) -> None:
    swarm.coordinator.kill()
    await asyncio.sleep(10)
    await swarm.coordinator.start()


def test_a_stranger_counts_when_its_scores_are_good_and_a_cheat_never_does(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheat(monkeypatch, {"y": "flip"}, current_machine)

    async def strangers(swarm: VirtualSwarm) -> None:
        await let_in(swarm, OpenTerms(64, 8))
        await enroll(swarm, "x", "y")
        swarm.start("x", "y")

    later = {"x": Role.REPLICA, "y": Role.REPLICA}
    swarm = play.to_the_end(strangers, FULL, ROUNDS, later, ending="abcx")
    offered = {each.round_number for each in swarm.decisions if "bad scores or none" in each.reason}
    assert min(offered) < min(contributions(swarm, "x")) < ROUNDS
    assert not contributions(swarm, "y")
    assert all(contributions(swarm, name) == swarm.rounds for name in FULL)


def test_strangers_wait_for_their_turn_and_keep_their_places_when_the_coordinator_is_killed(
    play: Play,
) -> None:
    later = dict.fromkeys("xyz", Role.REPLICA)

    async def strangers(swarm: VirtualSwarm) -> None:
        await let_in(swarm, OpenTerms(1, 8))
        await enroll(swarm, "x", "y", "z")
        for name in "zy":  # they have certificates, and there is less room at their joins
            asked = swarm.coordinator.terms.ask(swarm.peer(name), "192.0.2.1")
            with pytest.raises(HetnodeError, match="waiting list"):
                await swarm.coordinator.command_loop.execute(asked)
        swarm.start("x")
        await swarm.until(lambda state: swarm.peer("x") in state.peers, "x")
        swarm.start("z", "y")
        await asyncio.sleep(60)
        await kill_and_start_coordinator(swarm)
        await asyncio.sleep(60)
        places = swarm.state.open_places
        assert [*places] == [swarm.peer(name) for name in "xyz"]
        assert [each.admitted for each in places.values()] == [True, False, False]
        await swarm.coordinator.command_loop.execute(Ban(swarm.peer("x"), "a test"))
        await swarm.until(lambda state: swarm.peer("y") in state.peers, "y", 90)
        await asyncio.sleep(60)
        assert swarm.peer("z") not in swarm.state.peers
        swarm.kill("z")

    play.to_the_end(strangers, FULL, 26, later, ending="abcy", step_seconds=10.0)


class OpenSwarm(ProcessSwarm):
    """All but the first node are strangers, and join with the text that the coordinator prints for everyone.

    There is room for one of them. Addresses stay when the coordinator is started again.
    """

    def start_coordinator(self, *options: str) -> None:
        super().start_coordinator("--one-port", "--open", "--open-members", "1", *options)

    def invite_file(self, uses: int = 100) -> Path:
        if not self.started.keys() & self.members.keys():
            return super().invite_file(uses)
        found = re.search(r"anyone may come with: hetnode join (\S+)", self.log(COORDINATOR))
        assert found is not None, self.log(COORDINATOR)
        file = self.folder / "for-all"
        file.write_text(found[1])
        return file


@pytest.mark.swarm
def test_real_strangers_join_wait_and_keep_their_places_when_both_sides_are_killed(tmp_path: Path) -> None:
    spec = spec_of(1, 1, rounds=5000, inner__steps=2)
    with OpenSwarm(spec, tmp_path, dict.fromkeys("abcd", Role.REPLICA)) as swarm:
        swarm.start_coordinator()
        swarm.start_node("a")
        swarm.wait_round(1, 120)
        swarm.start_node("b")
        swarm.wait_log("b", "this node has no invite")
        swarm.wait_log("b", "joined run")
        swarm.wait_log(COORDINATOR, "without 1 payload of peers with bad scores or none")
        # Those that train would take both cores from other tests while this one waits.
        swarm.ask("run", "pause", str(swarm.run))
        swarm.start_node("c")
        swarm.wait_log("c", "waiting for room in the run: place 1 of 1 in the waiting list")
        swarm.start_node("d")
        swarm.wait_log("d", "waiting for room in the run: place 2 of 2 in the waiting list")
        for name in (COORDINATOR, "c", "d"):
            swarm.kill(name)
        swarm.start_coordinator()
        swarm.start_node("d")
        swarm.wait_log("d", "place 2 of 2 in the waiting list", count=2)
        swarm.start_node("c")
        swarm.wait_log("c", "place 1 of 2 in the waiting list")
        status = swarm.ask("status", str(swarm.run))
        assert "place 1 of 2 in the waiting list" in status
        assert "place 2 of 2 in the waiting list" in status
        swarm.ask("run", "resume", str(swarm.run))
        number = swarm.round_number
        swarm.wait_round(number + 5, 120)
        assert not swarm.contributions("b")
        assert number in swarm.contributions("a")
        assert "count for nothing until they have agreed" in " ".join(status.split())
        swarm.ask("run", "pause", str(swarm.run))
        swarm.ask("peers", "ban", swarm.peer("b"), "--folder", str(swarm.run))
        swarm.wait_log("c", "the run has room for this node")
        swarm.wait_log("c", "joined run")
        swarm.wait_log("d", "place 1 of 1 in the waiting list")
