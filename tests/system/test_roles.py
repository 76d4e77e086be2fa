"""Nodes that leave their role to the coordinator, on the virtual network."""

from __future__ import annotations

from coordinator.base.phrases import short
from coordinator.placement.cost_model import memory_needed
from coordinator.run.state.events import RoleChanged
from coordinator.run.state.state import State
from protocol.roles import RoleWish
from protocol.types import Role, StageRange
from tests.virtual.scenario import Play, contributions, swarm_spec
from tests.virtual.swarm import VirtualSwarm

AUTO = {"big": RoleWish.AUTO, "p": RoleWish.AUTO, "q": RoleWish.AUTO}
SHAPE = {"big": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE}


def test_nodes_with_different_memory_get_different_roles(play: Play) -> None:
    spec = swarm_spec(SHAPE, 3)
    whole = memory_needed(spec, StageRange(0, 2), 1, "cpu")

    async def scenario(swarm: VirtualSwarm) -> None:
        for name in ("p", "q"):
            swarm.nodes[name].memory_limit = int(0.8 * whole / 0.9)
        swarm.start("p", "q", "big")
        await swarm.until_over()
        assert {name: swarm.state.peers[swarm.peer(name)].role for name in AUTO} == SHAPE
        swarm.assert_all_agree()
        assert {*swarm.anchors("big")} == {0, 1}
        assert len(swarm.anchors("p")) == len(swarm.anchors("q")) == 1

    play(scenario, AUTO, spec)


def test_a_full_replica_becomes_a_stage_peer_and_a_full_replica_again(play: Play) -> None:
    """Its stages are built anew each time, between two rounds, and all anchors agree at the end."""

    async def beside_a_stage_peer(swarm: VirtualSwarm) -> None:
        await swarm.until(lambda state: state.current_round > 3 and len(state.plans[-1].replicas) == 2)
        swarm.start("s")

        def trains_in_a_pipeline(state: State) -> bool:
            replica = state.plans[-1].replica_of(swarm.peer("b"))
            return replica is not None and len(replica.members) == 2

        await swarm.until(trains_in_a_pipeline, "b completes a pipeline")
        await swarm.until_round(swarm.state.current_round + 3)
        swarm.drain("s")
        await swarm.until_over()

    swarm = play.to_the_end(
        beside_a_stage_peer,
        {"a": RoleWish.REPLICA, "b": RoleWish.AUTO},
        later={"s": RoleWish.STAGE},
        ending="ab",
        spec=swarm_spec({"a": Role.REPLICA}, 32, **{"recovery.checkpoint_every": 1}),
    )
    assert [event.role for event in swarm.happened(RoleChanged)] == [Role.STAGE, Role.REPLICA]
    reason = f"since {short(swarm.peer('b'))} is a stage peer now"
    assert any("goes on without" in plan.reason and reason in plan.reason for plan in swarm.state.plans)
    assert {*swarm.anchors("b")} == {0, 1}
    assert contributions(swarm, "b")[-1] == swarm.spec.rounds
    assert len(contributions(swarm, "s")) >= 2
