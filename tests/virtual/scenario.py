"""The members, the small run and the runner that scenarios of the virtual swarm share."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from coordinator.run.state.commands import ResumeRun, RollBack
from coordinator.run.state.events import PeerLeft, PlanAdopted
from coordinator.run.state.state import State
from protocol.roles import RoleWish
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Aborted, Finding, Role, Verdict, entries_of
from tests.builders import decisions_in
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.history import write_history
from tests.virtual import swarm as virtual
from tests.virtual.swarm import VirtualSwarm
from tests.virtual.transport import VirtualArbiter

T = TypeVar("T")
Scenario = Callable[[VirtualSwarm], Awaitable[T]]
QUICK = {"timing.heartbeat": 1.0, "timing.lost_after": 4.0}
"""A loss is found within two rounds."""
SPARSE = {"outer.top_k": 128}
"""Payloads as in a real run. To search for the largest values takes a sixth of the time of a scenario, so the
others send all of them, quantized, which also leaves error feedback."""

FULL = {"a": Role.REPLICA, "b": Role.REPLICA, "c": Role.REPLICA}
TWO = {"a": Role.REPLICA, "b": Role.REPLICA}
PIPE = {"p": Role.STAGE, "q": Role.STAGE}
MIXED = {"a": Role.REPLICA, "b": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE}

# One file of the standard library: reading it takes milliseconds, the built-in corpus takes 0.1 s.
CORPUS = f"text:{argparse.__file__}"


def swarm_spec(members: Mapping[str, Role | RoleWish], rounds: int = 6, **overrides: Any) -> RunSpec:
    """A run that waits for exactly `members`. By default it has 2 stages of one layer each.

    `overrides`: settings by "section.field".
    """
    stages = [name for name, role in members.items() if role == Role.STAGE]
    return resolve(
        "nano",
        overrides={
            "rounds": rounds,
            "model.layers": overrides.get("swarm.stages", 2),
            "data.source": CORPUS,
            "swarm.stages": 2,
            "swarm.replicas": len(members) - len(stages),
            "swarm.pipelines": len(stages) // 2,
            "recovery.checkpoint_every": 2,
            "recovery.keep_rounds": 8,
            # Only in a pipeline does it matter how many microbatches are under way.
            "inner.microbatches": 2 if stages else 1,
            "outer.top_k": 0,
            "grouping.balance": False,  # a slow replica has the same weight as a fast one
            **overrides,
        },
    )


class Play:
    """Plays a scenario. Raises AssertionError if a planned fault has not fired."""

    def __init__(self, folder: Path, plan: FaultPlan) -> None:
        self._folder, self._plan = folder, plan

    def __call__(
        self,
        scenario: Scenario[T],
        members: Mapping[str, Role | RoleWish] = FULL,
        spec: RunSpec | None = None,
        **options: Any,
    ) -> T:
        return virtual.play(
            scenario, spec or swarm_spec(members), self._folder, members, plan=self._plan, **options
        )

    def to_the_end(
        self,
        during: Scenario[object] | None = None,
        members: Mapping[str, Role | RoleWish] = FULL,
        rounds: int = 6,
        later: Mapping[str, Role | RoleWish] | None = None,
        ending: Iterable[str] = (),
        spec: RunSpec | None = None,
        step_seconds: float = 1.0,
        **settings: Any,
    ) -> VirtualSwarm:
        """Start `members`, wait for `during`, and then for the end of the run, after which all anchors agree.

        Args:
            later: nodes that `during` starts.
            ending: the nodes that must come to the end; all by default.
            settings: of :func:`swarm_spec`, unless `spec` is given.
        """
        ending = tuple(ending)

        async def scenario(swarm: VirtualSwarm) -> VirtualSwarm:
            swarm.start(*members)
            if during is not None:
                await during(swarm)
            await swarm.until_over(*ending)
            swarm.assert_all_agree(*ending)
            return swarm

        spec = spec or swarm_spec(members, rounds, **settings)
        return self(scenario, {**members, **(later or {})}, spec, step_seconds=step_seconds)


async def cut_off(swarm: VirtualSwarm, name: str = "b") -> None:
    """Cut a node off from round 3 to round 6."""
    await swarm.until_round(3)
    swarm.network.isolate(name)
    await swarm.until_round(6)
    swarm.network.heal()


async def return_after(swarm: VirtualSwarm, name: str, seconds: float) -> None:
    """Wait for the planned fault of a node, and start the node again `seconds` later."""
    await swarm.until_fired(name)
    await asyncio.sleep(seconds)
    swarm.start(name)


async def roll_back(swarm: VirtualSwarm, restore_round: int) -> int:
    """Roll back as soon as peers have told what they keep. Returns the round of the rollback."""
    await swarm.until_kept(restore_round)
    await swarm.coordinator.command_loop.execute(RollBack(restore_round, "a test"))
    return max(swarm.state.restored)


async def resume(swarm: VirtualSwarm) -> None:
    await swarm.coordinator.command_loop.execute(ResumeRun())


async def roll_back_and_resume(swarm: VirtualSwarm, at: int, restore_round: int) -> int:
    """Roll back in round `at`, and go on when three peers have done so. Returns the round of the rollback."""
    await swarm.until_round(at)
    number = await roll_back(swarm, restore_round)
    await swarm.until(attested(number, 3), "the rollback")
    await resume(swarm)
    return number


def attested(number: int, count: int) -> Callable[[State], bool]:
    """Whether `count` peers have attested each stage after that round."""

    def done(state: State) -> bool:
        return all(len(state.digests.get((stage, number, "stage"), {})) >= count for stage in range(2))

    return done


async def restart_coordinator(swarm: VirtualSwarm, name: str) -> None:
    """Wait for the planned fault of a node, kill the coordinator, and start it again 10 seconds later."""
    await swarm.until_fired(name)
    swarm.coordinator.kill()
    await asyncio.sleep(10)
    await swarm.coordinator.start()


def deny_payloads(plan: FaultPlan, monkeypatch: pytest.MonkeyPatch, stage: int, round_number: int) -> None:
    """Let no member of FULL hold payloads there, and the arbiter find none: the round is aborted."""
    for name in FULL:
        plan.fail_at(name, stage, round_number, Moment.GATHERED, Action.DENY)
    monkeypatch.setattr(VirtualArbiter, "arbitrate", not_found)


async def not_found(*_: object) -> Verdict:
    """VirtualArbiter.arbitrate if no peer sends the payload to the arbiter."""
    return Verdict(Finding.NOT_FOUND, "no peer sends it")


def contributions(swarm: VirtualSwarm, name: str) -> list[int]:
    """The rounds whose commits contain a payload of the node, of any stage."""
    peer = swarm.peer(name)
    return sorted(
        {
            each.round_number
            for each in swarm.decisions
            for entry in entries_of(each)
            if entry.descriptor.owner == peer
        }
    )


def shares(swarm: VirtualSwarm, name: str, round_number: int) -> dict[int, float]:
    """By stage: the weight of the committed payload of a node, as a share of what the plan gives it."""
    peer, plans = swarm.peer(name), {each.plan.epoch: each.plan for each in swarm.happened(PlanAdopted)}
    found = {}
    for decision in swarm.decisions:
        for payload in (entry.descriptor for entry in entries_of(decision)):
            replica = plans[payload.epoch].replica_of(payload.owner)
            if (payload.owner, payload.round_number) == (peer, round_number) and replica is not None:
                found[payload.stage] = payload.weight / replica.weight
    return found


def departures(swarm: VirtualSwarm, name: str) -> list[str]:
    """The reasons that the node gave when it left."""
    peer = swarm.peer(name)
    return [event.reason for event in swarm.events if isinstance(event, PeerLeft) and event.peer == peer]


def owners(swarm: VirtualSwarm, stage: int, round_number: int) -> set[str]:
    """The nodes whose payloads count there."""
    names = {swarm.peer(name): name for name in swarm.nodes}
    entries = [
        entry
        for each in swarm.decisions
        if (each.stage, each.round_number) == (stage, round_number)
        for entry in entries_of(each)
    ]
    return {names[entry.descriptor.owner] for entry in entries}


def assert_each_sample_counts_once(swarm: VirtualSwarm) -> None:
    """Credit at each stage is what the weights of the committed payloads say, and no round was lost."""
    spec, tokens = swarm.spec, dict.fromkeys(swarm.nodes, 0)
    per_round = spec.samples_per_round() * spec.model.context
    for name in swarm.nodes:
        for number in swarm.rounds:
            tokens[name] += sum(round(each * per_round) for each in shares(swarm, name, number).values())
    history = write_history(swarm.folder / "again.sqlite", spec, swarm.events)
    for name, expected in tokens.items():
        credit = history.credit(swarm.peer(name))[2]
        assert credit is not None
        assert credit.stage_tokens == expected
    assert not decisions_in(swarm.events, Aborted)
