"""docs/protocol and proto/ are enough to write a peer: such peers take part in a run from start to end."""

from __future__ import annotations

import ast
import asyncio
import itertools
from pathlib import Path

import pytest

from tests.hostile.coordinator import coordinator, join_all
from tests.hostile.peer import Peer, Refused, cancel

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
    options = ("--rounds", str(ROUNDS), "--stages", "2", "--replicas", "3", "--pipelines", "0")
    with coordinator(tmp_path, *options) as run:
        peers = await join_all(run, [Peer() for _ in range(3)])
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
        assert run.process.wait(60) == 0, run.log()
        assert [line["committed"] for line in run.decisions()] == [True] * ROUNDS * len(STAGES)


async def test_a_peer_that_stays_away_is_no_member(tmp_path: Path) -> None:
    options = ("--rounds", "4", "--stages", "1", "--replicas", "1", "--pipelines", "0")
    with coordinator(tmp_path, *options) as run:
        stranger = Peer()
        await stranger.enroll(run.invite())
        with pytest.raises(Refused) as refused:
            await stranger.call("Heartbeat")
        assert refused.value.code == "unknown-peer"
        await stranger.close()
