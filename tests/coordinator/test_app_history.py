"""The history that a real coordinator leaves: live, complete at the end, written again when it is lost."""

from __future__ import annotations

from pathlib import Path

from coordinator import app
from coordinator.api.public_ports import ListenAddresses
from coordinator.store.history import SqliteHistory
from coordinator.store.history_tables import StageOutcome
from protocol.pb import hetnode_pb2 as pb
from protocol.spec.run import RunSpec
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import COORDINATOR, NoDht, Running, running
from tests.support.history import dump
from tests.support.waiting import until

A, B = keyed(0), keyed(1)


async def train(run: Running, round_number: int) -> None:
    """A round of two full replicas, which measure it."""
    for stage in range(run.spec.swarm.stages):
        await run.settle(stage, round_number, A, B)
    for replica, peer in enumerate((A, B)):
        await run.stub(peer).Measure(
            pb.Measurement(
                peer=peer.peer,
                round=round_number,
                replica=replica,
                validation_loss=float("inf") if replica else 3.0,
                complete=True,
                link_bytes_sent=10,
            )
        )


async def start_again(spec: RunSpec, folder: Path) -> bool:
    """Start the coordinator of a finished run."""

    async def start_bootstrap(_: str) -> NoDht:
        return NoDht()

    return await app.run_coordinator(
        spec,
        folder,
        ListenAddresses("127.0.0.1:0", enrollment="127.0.0.1:0"),
        COORDINATOR,
        start_bootstrap,
        lambda *_: None,
    )


async def test_the_history_is_live_and_survives_the_loss_of_its_file(tmp_path: Path) -> None:
    spec, path = spec_of(1, 2, rounds=3), tmp_path / "history.sqlite"
    history = SqliteHistory(path)
    async with running(spec, tmp_path) as run:
        await run.join(A)
        await run.join(B)
        await train(run, 1)
        await until(lambda: not history.problem and history.credits().link_bytes == 20, 120, "a round")
        assert [each.outcome for each in history.rounds()[-1].stages] == [StageOutcome.COMMITTED]
        assert history.run().run == run.run
    path.write_bytes(path.read_bytes()[:5000])  # damaged while no coordinator runs
    async with running(spec, tmp_path) as run:
        await train(run, 2)
        await train(run, 3)
        for peer in (A, B):
            await run.stub(peer).Leave(pb.LeaveRequest(peer=peer.peer, reason="finished"))
        await run.task
    whole = dump(path)
    assert [each.validation_loss for each in history.losses()] == [3.0] * 3
    assert history.credits().stage_rounds == 6
    path.unlink()
    assert not await start_again(spec, tmp_path)
    assert dump(path) == whole
    assert not await start_again(spec, tmp_path)
    assert dump(path) == whole


async def test_a_history_that_cannot_be_written_does_not_disturb_the_run(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").mkdir()
    async with running(spec_of(1, 2, rounds=3), tmp_path) as run:
        await run.join(A)
        await run.join(B)
        await train(run, 1)
        assert (await run.status()).rounds_decided == 1
