"""The alarm of a real coordinator, which compares with the rounds before its restart."""

from __future__ import annotations

from pathlib import Path

from protocol.pb import hetnode_pb2 as pb
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import Running, metrics, running
from tests.support.waiting import until

A, B = keyed(0), keyed(1)
ROUNDS = 6


async def train(run: Running, round_number: int, loss: float) -> None:
    """A round of two full replicas, which measure this loss."""
    await run.settle(0, round_number, A, B)
    for replica, peer in enumerate((A, B)):
        measurement = pb.Measurement(
            peer=peer.peer, round=round_number, replica=replica, validation_loss=loss, complete=True
        )
        await run.stub(peer).Measure(measurement)


async def test_a_coordinator_that_starts_again_still_knows_what_is_usual(tmp_path: Path) -> None:
    spec = spec_of(1, 2, rounds=20)
    async with running(spec, tmp_path) as run:
        await run.join(A)
        await run.join(B)
        for number in range(1, ROUNDS + 1):
            await train(run, number, 3.0)
    async with running(spec, tmp_path) as run:
        await train(run, ROUNDS + 1, 9.0)
        await until(lambda: bool(metrics(tmp_path, "alarm")), 120, "the alarm")
        (alarm,) = metrics(tmp_path, "alarm")
        assert (alarm["round"], alarm["last_healthy"]) == (ROUNDS + 1, ROUNDS)
        assert "rose to 9.000 from a level of 3.000" in alarm["reason"]
