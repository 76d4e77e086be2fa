"""docs/protocol and proto/ are enough to write a peer: such peers take part in a run from start to end."""

from __future__ import annotations

import ast
import asyncio
import itertools
from pathlib import Path

import pytest

from tests.builders import spec_of
from tests.hostile.peer import Peer, Refused, cancel, join_all
from tests.support.processes import COORDINATOR, ProcessSwarm

ROUNDS, STAGES = 4, (0, 1)


@pytest.mark.parametrize("module", ["wire", "peer"])
def test_the_peer_imports_nothing_of_hetnode(module: str) -> None:
    source = (Path(__file__).parent / f"{module}.py").read_text()
    roots = set()
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.module is not None
            roots.add(statement.module.split(".")[0])
            if statement.module.startswith("tests"):
                assert statement.module.startswith("tests.hostile")
    assert roots.isdisjoint({"node", "coordinator", "protocol"})


async def test_scripted_peers_commit_every_round_of_a_run(tmp_path: Path) -> None:
    with ProcessSwarm(spec_of(2, 3, rounds=ROUNDS), tmp_path, {}) as run:
        run.start_coordinator()
        peers = await join_all(run.invite(), [Peer() for _ in range(3)])
        alive = [asyncio.create_task(peer.keep_alive(1.0)) for peer in peers]
        plans = await asyncio.gather(*(peer.first_plan() for peer in peers))
        members = {member.peer for replica in plans[0].replicas for member in replica.members}
        assert members == {peer.id for peer in peers}
        for stage in STAGES:
            for peer in peers:
                assert (await peer.attest(stage, 0)).agrees
        for number in range(1, ROUNDS + 1):
            decisions = await asyncio.gather(*(peer.round(STAGES, number) for peer in peers))
            for decision in itertools.chain(*decisions):
                assert decision.committed
                owners = [entry.descriptor.owner for entry in decision.entries]
                assert owners == sorted(peer.id for peer in peers)
        await peers[0].renew()
        status = await peers[0].call("Status")
        assert (status.rounds_committed, status.rounds_aborted) == (ROUNDS * len(STAGES), 0)
        assert status.anchors_agree
        await cancel(*alive)
        for peer in peers:
            await peer.call("Leave", reason="finished")
            await peer.close()
        run.wait_over(60, COORDINATOR)
        assert [line["committed"] for line in run.decisions()] == [True] * ROUNDS * len(STAGES)


async def test_a_peer_that_stays_away_is_no_member(tmp_path: Path) -> None:
    with ProcessSwarm(spec_of(1, 1), tmp_path, {}) as run:
        run.start_coordinator()
        stranger = Peer()
        await stranger.enroll(run.invite())
        with pytest.raises(Refused) as refused:
            await stranger.call("Heartbeat")
        assert refused.value.code == "unknown-peer"
        await stranger.close()
