"""The coordinator as its clients see it: real gRPC on loopback, a real log on disk."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator import app
from coordinator.api import service
from coordinator.authority import ServerCertificate
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Part, ReservedAssignment, StageRange, StateRecord
from protocol.wire.convert.payloads import decision_from_pb, descriptor_to_pb, group_from_pb
from protocol.wire.convert.plans import places_from_pb
from protocol.wire.records import open_plan, open_state
from tests.builders import anchor_of, keyed, spec_of, tampered
from tests.support.coordinator_process import BOOTSTRAP, OWNER, Running, refusal_of, running

A, B, C = (keyed(i) for i in range(3))


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    """A coordinator that waits for two full replicas of two stages."""
    async with running(spec_of(), tmp_path) as coordinator:
        yield coordinator


async def test_a_joining_node_gets_the_spec_and_the_dht_addresses(run: Running) -> None:
    reply = await run.join(A)
    assert RunSpec.from_json(reply.spec_json) == run.spec
    assert (reply.spec_hash, reply.run) == (run.spec.hash, run.spec.run_id)
    assert reply.dht_peers == [BOOTSTRAP]


async def test_another_spec_is_refused_with_both_hashes_code_and_remedy(run: Running) -> None:
    other = spec_of(rounds=99).hash
    refusal = await refusal_of(run.join(A, spec_hash=other))
    assert refusal.code is ErrorCode.SPEC_MISMATCH
    assert run.spec.hash in refusal.cause
    assert other in refusal.cause
    assert refusal.remedy


async def test_the_version_is_checked_before_anything_else_is_understood(run: Running) -> None:
    refusal = await refusal_of(run.join(A, protocol_version=99, role="conductor", endpoint="nowhere"))
    assert refusal.code is ErrorCode.VERSION_MISMATCH


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "conductor"},
        {"endpoint": "nowhere"},
        {"endpoint": "host:70000"},
        {"capacity": pb.Capacity(device="x" * 10_000)},
    ],
)
async def test_an_invalid_join_is_refused(run: Running, changes: dict[str, Any]) -> None:
    assert (await refusal_of(run.join(A, **changes))).code is ErrorCode.BAD_REQUEST


async def test_a_watcher_gets_the_reason_to_wait_then_the_plan_then_the_end(tmp_path: Path) -> None:
    async with running(spec_of(1, 2, rounds=1), tmp_path) as run:
        await run.join(A)
        watch = run.stub(A).Watch(pb.WatchRequest(peer=A.peer))
        assert "1 more full replica (1 of 2 here)" in (await watch.read()).waiting
        await run.join(B)
        update = await watch.read()
        plan = open_plan(update.signed_plan, update.signature, run.spec.run_id, OWNER.peer)
        assert [replica.members[0].peer for replica in plan.replicas] == [A.peer, B.peer]
        await run.settle(0, 1, A, B)
        last = await watch.read()
        assert last.finished
        assert not last.signed_plan
        assert await watch.read() is grpc.aio.EOF


async def test_a_late_watcher_gets_the_current_plan_at_once(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    watch = run.stub(B).Watch(pb.WatchRequest(peer=B.peer))
    assert pb.Plan.FromString((await watch.read()).signed_plan).epoch == 1
    watch.cancel()


async def test_all_watchers_see_a_late_joiner_as_follower_until_a_plan_assigns_it(
    run: Running,
) -> None:
    await run.join(A)
    await run.join(B)
    watch = run.stub(A).Watch(pb.WatchRequest(peer=A.peer))
    update = await watch.read()
    assert (list(update.followers), update.round) == ([], 1)
    await run.join(C)
    place = ReservedAssignment(C.peer, 2, 0, StageRange(0, 2))
    update = await watch.read()
    assert places_from_pb(update.followers) == (place,)
    assert not update.signed_plan
    own = run.stub(C).Watch(pb.WatchRequest(peer=C.peer))
    assert places_from_pb((await own.read()).followers) == (place,)
    assert (await own.read()).waiting == (
        "following the rounds of stages 0-1: "
        f"replica-2 waits for ..{C.peer[-8:]} (stages 0-1), which must catch up"
    )
    for stage in (0, 1):
        assert (await run.attest(C, stage, 0)).agrees
    assert (await run.status()).peers[2].lifecycle == "ready"
    assert (await run.status()).peers[2].place == "replica-2, stages 0-1"
    await run.settle(0, 1, A, B)
    update = await watch.read()
    plan = open_plan(update.signed_plan, update.signature, run.spec.run_id, OWNER.peer)
    assert [replica.index for replica in plan.replicas] == [0, 1, 2]
    assert not update.followers
    for stream in (watch, own):
        stream.cancel()


async def test_all_watchers_learn_of_a_retreat(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    watch = run.stub(A).Watch(pb.WatchRequest(peer=A.peer))
    await watch.read()
    await run.stub(B).Retreat(pb.RetreatRequest(peer=B.peer, epoch=1, reason="neighbour-lost\n"))
    assert [follower.peer for follower in (await watch.read()).followers] == [B.peer]
    watch.cancel()


async def test_a_joiner_learns_the_time_of_the_coordinator(run: Running) -> None:
    before = time.time()
    assert before <= (await run.join(A)).time <= time.time()


async def test_a_heartbeat_tells_when_the_round_closes(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    beat = pb.HeartbeatRequest(peer=B.peer, round=1)
    assert await run.stub(B).Heartbeat(beat) == pb.HeartbeatReply(round=1)
    waiting = run.match(A, 0, 1)
    while not (reply := await run.stub(B).Heartbeat(beat)).closing:
        assert not waiting.done()
    assert 0 < reply.closes_seconds <= run.spec.timing.least_window
    reply = await run.match(B, 0, 1)
    assert reply.seconds == run.spec.timing.fetch
    await waiting


async def test_checkpoints_are_located_under_the_signature_of_the_coordinator(tmp_path: Path) -> None:
    spec = resolve(
        "nano",
        overrides={
            "rounds": 3,
            "swarm.stages": 1,
            "swarm.replicas": 2,
            "swarm.pipelines": 0,
            "recovery.checkpoint_every": 2,
        },
    )
    async with running(spec, tmp_path) as run:
        await run.join(A)
        await run.join(B)
        request = pb.LocateRequest(peer=A.peer, stage=0, part="stage")
        for number in (1, 2):
            assert not (await run.stub(A).Locate(request)).states
            await run.settle(0, number, A, B)
        (sealed,) = (await run.stub(A).Locate(request)).states
        record = open_state(sealed.record, sealed.signature, spec.run_id, OWNER.peer)
        holders = tuple(sorted([A.peer, B.peer]))
        assert record == StateRecord(spec.run_id, 0, Part.STAGE, 2, anchor_of(0, 2), holders)
        wrong = pb.LocateRequest(peer=A.peer, stage=0, part="optimizer")
        assert (await refusal_of(run.stub(A).Locate(wrong))).code is ErrorCode.BAD_REQUEST


async def test_strangers_are_told_to_join(run: Running) -> None:
    calls = [
        run.stub(C).Watch(pb.WatchRequest(peer=C.peer)).read(),
        run.stub(C).Heartbeat(pb.HeartbeatRequest(peer=C.peer)),
        run.stub(C).Leave(pb.LeaveRequest(peer=C.peer)),
        run.stub(C).AwaitDecision(pb.AwaitDecisionRequest(peer=C.peer, round=1)),
        run.stub(C).Measure(pb.Measurement(peer=C.peer, round=1)),
        run.stub(C).Locate(pb.LocateRequest(peer=C.peer, part="stage")),
        run.stub(C).Retreat(pb.RetreatRequest(peer=C.peer, epoch=1)),
        run.match(C, 0, 1),
        run.report(C, 0, 1),
    ]
    for call in calls:
        assert (await refusal_of(call)).code is ErrorCode.UNKNOWN_PEER


async def test_two_clients_match_report_and_get_the_same_decision(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    waiting = run.match(A, 0, 1)
    groups = [await run.match(B, 0, 1), await waiting]
    assert groups[0] == groups[1]
    group = group_from_pb(groups[0])
    assert group.descriptors == tuple(
        sorted((A.payload(run.spec, 0, 1), B.payload(run.spec, 0, 1)), key=lambda d: d.owner)
    )
    onlooker = run.stub(A).AwaitDecision(pb.AwaitDecisionRequest(peer=A.peer, stage=0, round=1))
    decisions = await asyncio.gather(run.report(A, 0, 1, A, B), run.report(B, 0, 1, A, B), onlooker)
    assert decisions[0] == decisions[1] == decisions[2]
    decision = decision_from_pb(decisions[0])
    assert decision.committed
    assert [entry.descriptor for entry in decision.entries] == list(group.descriptors)
    assert (await run.status()).rounds_committed == 1


async def test_a_cancelled_wait_leaves_no_trace_and_can_be_repeated(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    waiting = run.match(A, 0, 1)
    while "waiting for replica-1 at stage 0" not in (await run.status()).sentence:
        assert not waiting.done()
    waiting.cancel()
    again = run.match(A, 0, 1)
    assert await run.match(B, 0, 1) == await again


async def test_a_forged_payload_is_refused(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    forged = descriptor_to_pb(tampered(A.payload(run.spec, 0, 1)))
    refusal = await refusal_of(run.stub(A).Match(pb.MatchRequest(peer=A.peer, descriptor=forged)))
    assert refusal.code is ErrorCode.BAD_REQUEST


async def test_a_different_anchor_is_answered_with_the_expected_one(run: Running, tmp_path: Path) -> None:
    await run.join(A)
    await run.join(B)
    await run.settle(0, 1, A, B)
    reply = await run.attest(B, 0, 1, digest="another")
    assert not reply.agrees
    assert reply.expected == anchor_of(0, 1)
    assert not (await run.status()).anchors_agree
    assert [line["peer"] for line in metrics(tmp_path, "diverged")] == [B.peer]


async def test_measurements_are_shown_and_written_once(run: Running, tmp_path: Path) -> None:
    await run.join(A)
    await run.join(B)
    measurement = pb.Measurement(peer=A.peer, round=1, tokens=64, train_loss=float("nan"), complete=True)
    for _ in range(2):
        await run.stub(A).Measure(measurement)
    (line,) = metrics(tmp_path, "measurement")
    assert (line["peer"], line["tokens"], line["train_loss"], line["complete"]) == (A.peer, 64, None, True)
    assert [latest.peer for latest in (await run.status()).latest] == [A.peer]
    await refusal_of(run.stub(A).Measure(pb.Measurement(peer=A.peer, round=2)))


async def test_the_status_names_each_peer_and_its_assignment(run: Running) -> None:
    await run.join(A)
    status = await run.status()
    assert status.phase == "gathering"
    assert status.peers[0].place == ""
    await run.join(B)
    await run.stub(B).Heartbeat(pb.HeartbeatRequest(peer=B.peer, round=1, inner_step=5))
    status = await run.status()
    assert (status.phase, status.plan.epoch, status.anchors_agree) == ("training", 1, True)
    assert [peer.place for peer in status.peers] == ["replica-0, stages 0-1", "replica-1, stages 0-1"]
    assert (status.peers[1].round, status.peers[1].inner_step) == (1, 5)


async def test_a_restart_on_the_same_folder_goes_on_where_it_was(tmp_path: Path) -> None:
    spec = spec_of()
    async with running(spec, tmp_path) as first:
        await first.join(A)
        await first.join(B)
        decisions = await first.settle(0, 1, A, B)
        await asyncio.gather(first.match(A, 1, 1), first.match(B, 1, 1))
        lost = first.report(A, 1, 1, A, B)
        while "reports of replica-1 at stage 1" not in (await first.status()).sentence:
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


async def test_grpc_itself_does_not_share_the_port(run: Running) -> None:
    """The check before binding could be overtaken by another program."""
    host, _, port = run.address.rpartition(":")
    credentials = app.server_credentials(ServerCertificate(run.authority), run.authority, clients=True)
    with pytest.raises(HetnodeError) as error:
        app.bind(service.new_server(), host, int(port), credentials)
    assert error.value.code is ErrorCode.PORT_IN_USE


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


async def test_every_event_is_logged_in_a_sentence(run: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "coordinator")
    await run.join(A)
    await run.join(B)
    await run.settle(0, 1, A, B)
    for part in (f"{A.peer} joined as replica", "plan 1 from round 1 on", "round 1 of stage 0 is committed"):
        assert part in caplog.text


async def test_an_oversized_message_is_refused_by_grpc(run: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await run.stub(A).Leave(pb.LeaveRequest(peer=A.peer, reason="x" * (5 << 20)))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def metrics(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]
