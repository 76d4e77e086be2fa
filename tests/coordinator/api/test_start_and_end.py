"""How a coordinator starts, restarts and ends: its folder, its port, and its log."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator import app
from coordinator.run.state import apply_rounds
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.status import CauseCode
from protocol.types import Committed
from protocol.wire.convert.payloads import decision_from_pb
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import Running, metrics, running

A, B, C = (keyed(i) for i in range(3))


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    """A coordinator that waits for two full replicas of two stages."""
    async with running(spec_of(), tmp_path) as coordinator:
        yield coordinator


async def test_a_restart_on_the_same_folder_goes_on_where_it_was(tmp_path: Path) -> None:
    spec = spec_of()
    async with running(spec, tmp_path) as first:
        await first.join(A)
        await first.join(B)
        decisions = await first.settle(0, 1, A, B)
        await asyncio.gather(first.match(A, 1, 1), first.match(B, 1, 1))
        lost = first.report(A, 1, 1, A, B)
        while (await first.status()).cause.code is not CauseCode.REPORTS_LACKING:
            assert not lost.done()
        watch = first.stub(A).Watch(pb.WatchRequest(peer=A.peer))
        await watch.read()
    for cut_off in (lost, watch.read()):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await cut_off
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    async with running(spec, tmp_path, first.address) as second:
        assert await second.report(A, 0, 1, A, B) == decisions[0]
        assert (await second.match(A, 1, 1)).descriptors == (await second.match(B, 1, 1)).descriptors
        later = await asyncio.gather(second.report(A, 1, 1, A, B), second.report(B, 1, 1, A, B))
        assert later[0] == later[1]
        assert later[0].committed
        assert (await second.status()).rounds_decided == 1


async def test_the_folder_of_another_run_is_refused_with_both_hashes(tmp_path: Path) -> None:
    first, second = spec_of(rounds=3), spec_of(rounds=4)
    async with running(first, tmp_path):
        pass
    with pytest.raises(HetnodeError) as error:
        async with running(second, tmp_path):
            pass
    assert error.value.code is ErrorCode.SPEC_MISMATCH
    assert first.hash in error.value.cause
    assert second.hash in error.value.cause


async def test_a_folder_in_use_is_refused_and_its_coordinator_unharmed(run: Running, tmp_path: Path) -> None:
    with pytest.raises(HetnodeError) as error:
        async with running(run.spec, tmp_path):
            pass
    assert error.value.code is ErrorCode.RUN_FOLDER_IN_USE
    await run.join(A)


async def test_a_port_in_use_is_refused(run: Running, tmp_path: Path) -> None:
    with pytest.raises(HetnodeError) as error:
        async with running(run.spec, tmp_path / "other", run.address):
            pass
    assert error.value.code is ErrorCode.PORT_IN_USE
    assert run.address in error.value.cause


@pytest.mark.parametrize(
    "listen", ["7700", "127.0.0.1:", "127.0.0.1:x", ":7700", "h:70000", "192.0.2.1:7700"]
)
async def test_an_address_of_another_machine_is_refused(tmp_path: Path, listen: str) -> None:
    with pytest.raises(HetnodeError) as error:
        async with running(spec_of(), tmp_path, listen):
            pass
    assert error.value.code is ErrorCode.BAD_ADDRESS


async def test_the_coordinator_ends_by_itself_when_all_have_finished_and_left(tmp_path: Path) -> None:
    async with running(spec_of(1, 2, rounds=2), tmp_path) as run:
        await run.join(A)
        await run.join(B)
        for number in (1, 2):
            await run.settle(0, number, A, B)
        for peer in (A, B):
            await run.stub(peer).Leave(pb.LeaveRequest(peer=peer.peer, reason="finished"))
        await run.task
    assert len(metrics(tmp_path, "finished")) == 1
    assert len(metrics(tmp_path, "decision")) == 2
    with socket.create_server(("127.0.0.1", int(run.address.rpartition(":")[2]))):
        pass


async def test_a_failed_write_of_the_log_ends_the_coordinator_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise HetnodeError(ErrorCode.STORE_CORRUPT, "The disk is full.", "Free some space.")

    async with running(spec_of(), tmp_path) as run:
        monkeypatch.setattr(app.SqliteStore, "append", full)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await run.join(A)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(HetnodeError, match="disk is full"):
            await asyncio.shield(run.task)
        run.task = asyncio.create_task(asyncio.sleep(0))
        await run.task


async def test_a_late_peer_gets_a_decision_that_the_state_does_not_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply_rounds, "KEPT_DECISIONS", 0)
    spec = spec_of(stages=1)
    asked = pb.AwaitDecisionRequest(peer=A.peer, stage=0, round=1)
    async with running(spec, tmp_path) as first:
        await asyncio.gather(first.join(A), first.join(B))
        decisions = await first.settle(0, 1, A, B)
        assert isinstance(decision_from_pb(decisions[0]), Committed)
        assert decisions == [await first.stub(A).AwaitDecision(asked)] * 2
    async with running(spec, tmp_path, first.address) as second:
        assert await second.stub(A).AwaitDecision(asked) == decisions[0]
        assert await second.report(A, 0, 1, A, B) == decisions[0]
