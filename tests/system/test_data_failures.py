"""Data that fails at one member in the middle of a run ends that member alone; another takes its place."""

from __future__ import annotations

from coordinator.run.state.events import PeerLeft
from node.data.files import unreadable
from protocol.errors import ErrorCode
from protocol.types import Role
from tests.virtual.scenario import QUICK, Play, swarm_spec
from tests.virtual.swarm import VirtualSwarm

PLANNED = {"a": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE}


def _fail(*_: int) -> None:
    raise unreadable("hf:owner/name", "the file is damaged", "Get it again.")


def test_another_peer_takes_the_place_of_a_member_whose_data_fails(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> tuple[VirtualSwarm, str]:
        swarm.start(*PLANNED)
        await swarm.until_round(2)
        swarm.start("r")
        await swarm.until_round(4)
        (failing,) = (name for name in "pq" if 0 in swarm.trainer(name).stages)
        swarm.trainer(failing).samples.training = _fail  # type: ignore[method-assign, assignment]
        others = [name for name in "apqr" if name != failing]
        await swarm.until_over(*others)
        swarm.assert_all_agree(*others)
        return swarm, failing

    spec = swarm_spec(PLANNED, 14, **QUICK)
    swarm, failing = play(scenario, {**PLANNED, "r": Role.STAGE}, spec)
    assert [error.code for error in swarm.nodes[failing].errors] == [ErrorCode.DATA_UNREADABLE]
    (left,) = (each for each in swarm.happened(PeerLeft) if each.peer == swarm.peer(failing))
    assert left.reason == "stopped before the end: data-unreadable"
    assert not [each for each in swarm.happened(PeerLeft) if each.peer != left.peer and not each.finished]
    last = swarm.state.plan_for(14)
    members = {member.peer for replica in last.replicas for member in replica.members}
    assert swarm.peer("r") in members
    assert swarm.peer(failing) not in members
