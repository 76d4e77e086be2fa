"""Runs of full replicas, uncompressed pipelines and compressed ones, whose lines change while they train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from coordinator.placement import search
from coordinator.run.state.events import DigestAttested, PlanAdopted
from coordinator.run.state.state import State
from protocol.errors import ErrorCode
from protocol.math.sampling import next_first_sample
from protocol.types import PeerId, Plan, Role
from tests.virtual.scenario import Play, contributions, swarm_spec
from tests.virtual.swarm import VirtualSwarm

MEMBERS = {
    "a": Role.REPLICA,
    "p": Role.STAGE,
    "q": Role.STAGE,
    "r": Role.STAGE,
    "s": Role.STAGE,
}
SLOW = 60_000.0
"""Bytes per second: a compressed activation takes one second, an uncompressed one two."""

# Frames of 64 KiB and more: the rate of a link is not measured by smaller ones.
SHAPE = {
    "link.k": 16,
    "link.least_k": 16,
    "link.most_k": 16,
    "link.uncompressed": True,
    "inner.microbatch_size": 64,
    "inner.steps": 2,
}


def ks_by_plan(swarm: VirtualSwarm, name: str) -> list[tuple[int, int]]:
    """(first round, k of the link of the node) of each plan that changes it."""
    found: list[tuple[int, int]] = []
    for event in swarm.happened(PlanAdopted):
        replica = event.plan.replica_of(swarm.peer(name))
        if replica is not None and (not found or found[-1][1] != replica.links[0].k):
            found.append((event.plan.from_round, replica.links[0].k))
    return found


def neighbours(swarm: VirtualSwarm) -> tuple[Sequence[str], Sequence[str]]:
    """The nodes of the pipelines with "s" and without it: peers join in any order."""
    plan = swarm.state.plans[-1]
    names: Mapping[PeerId, str] = {swarm.peer(name): name for name in MEMBERS}
    chains = [[names[each.peer] for each in replica.members] for replica in plan.replicas if replica.links]
    with_s, without = sorted(chains, key=lambda chain: "s" not in chain)
    return with_s, without


def test_a_full_replica_an_uncompressed_and_a_compressed_pipeline_agree_and_k_follows_the_line(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MARGIN", 1.0)  # members stay where they are: only k follows the lines

    async def changing_lines(swarm: VirtualSwarm) -> None:
        swarm.network.bandwidth["s"] = SLOW
        await swarm.until(lambda state: bool(state.plans), "the first plan")
        _, (fast, _) = neighbours(swarm)
        await swarm.until(lambda _: ks_by_plan(swarm, fast)[-1][1] == 0, "a link becomes uncompressed")
        assert "rises 16 -> uncompressed" in swarm.state.plans[-1].reason
        swarm.network.bandwidth[fast] = SLOW
        await swarm.until(lambda _: ks_by_plan(swarm, fast)[-1][1] == 16, "the link is compressed")
        assert "falls uncompressed -> 16" in swarm.state.plans[-1].reason
        del swarm.network.bandwidth[fast]
        await swarm.until(lambda _: ks_by_plan(swarm, fast)[-1][1] == 0, "the link recovers")

    swarm = play.to_the_end(changing_lines, MEMBERS, rounds=8, step_seconds=10.0, **SHAPE)
    (compressed, _), (fast, _) = neighbours(swarm)
    assert [k for _, k in ks_by_plan(swarm, fast)] == [16, 0, 16, 0]
    assert [k for _, k in ks_by_plan(swarm, compressed)] == [16]
    assert swarm.committed(0) == swarm.committed(1) == swarm.rounds
    assert all(contributions(swarm, name) == swarm.rounds for name in MEMBERS)
    digests: dict[tuple[int, int, str], set[str]] = {}
    for event in swarm.happened(DigestAttested):
        digests.setdefault((event.stage, event.round_number, event.part), set()).add(event.digest)
    assert digests
    assert all(len(found) == 1 for found in digests.values())


def test_members_refuse_a_k_beyond_the_width_of_the_model_and_full_replicas_go_on(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_wide(state: State, from_round: int, _: bool) -> Plan | None:
        newest = state.plans[-1]
        if from_round != 2:
            return None
        replicas = tuple(
            replace(replica, links=tuple(replace(link, k=33) for link in replica.links))
            for replica in newest.replicas
        )
        first_sample = next_first_sample(newest, state.spec, from_round)
        return Plan(newest.epoch + 1, from_round, first_sample, replicas, "a test")

    monkeypatch.setattr("coordinator.run.rounds.rounds.next_plan", too_wide)
    members = {name: MEMBERS[name] for name in "apq"}

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(4)
        refused = [error for name in "pq" for error in swarm.nodes[name].errors]
        assert {error.code for error in refused} == {ErrorCode.BAD_REQUEST}
        assert "k exceeds the model's width of 32" in refused[0].cause
        assert contributions(swarm, "p") == [1]
        assert contributions(swarm, "a") == [1, 2, 3]

    play(scenario, members, swarm_spec(members, rounds=5))
