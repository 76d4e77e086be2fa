"""The calls of the coordinator's API, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.run import command_loop
from coordinator.run.decide import Applied
from coordinator.run.rounds.deadlines import FIRST_SECONDS
from coordinator.run.state.commands import Command, Drain
from coordinator.run.state.state import State
from node.net.group_reports import GroupReports
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.status import CauseCode
from protocol.types import (
    Committed,
    Part,
    Pause,
    PausedBy,
    ReservedAssignment,
    RunChange,
    StageRange,
    StateRecord,
)
from protocol.wire.convert.payloads import decision_from_pb, descriptor_to_pb, group_from_pb
from protocol.wire.convert.plans import pause_from_pb, places_from_pb
from protocol.wire.operator_calls import ChangeSettings, GoOn, HoldRun, PauseAnswer
from protocol.wire.records import open_plan, open_state
from protocol.wire.status import status_to_pb
from tests.builders import Keyed, anchor_of, keyed, spec_of, tampered
from tests.support.coordinator_process import (
    BOOTSTRAP,
    COORDINATOR,
    Running,
    metrics,
    refusal_of,
    running,
    update_where,
)

A, B, C = (keyed(i) for i in range(3))


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    """A coordinator that waits for two full replicas of two stages."""
    async with running(spec_of(), tmp_path) as coordinator:
        yield coordinator


def has_plan(update: pb.PlanUpdate) -> bool:
    return bool(update.signed_plan)


def is_paused(update: pb.PlanUpdate) -> bool:
    return update.HasField("pause")


async def test_a_joining_node_gets_the_spec_and_the_dht_addresses(run: Running) -> None:
    reply = await run.join(A)
    assert RunSpec.from_json(reply.spec_json) == run.spec
    assert (reply.spec_hash, reply.run) == (run.spec.hash, run.run)
    assert reply.dht_peers == [BOOTSTRAP]


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
        {"name": "<b>Ada</b>"},
        {"name": "x" * 1_000_000},
    ],
)
async def test_an_invalid_join_is_refused(run: Running, changes: dict[str, Any]) -> None:
    assert (await refusal_of(run.join(A, **changes))).code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize("endpoint", ["169.254.169.254:80", "[fe80::1]:7700", "0.0.0.0:7700", "2852039166:1"])
async def test_an_endpoint_that_no_peer_may_have_is_refused_with_a_remedy(
    run: Running, endpoint: str
) -> None:
    refusal = await refusal_of(run.join(A, endpoint=endpoint))
    assert refusal.code is ErrorCode.BAD_ADDRESS
    assert endpoint in refusal.cause
    assert "--advertise" in refusal.remedy
    await run.join(A, endpoint="127.0.0.1:9")


async def test_a_watcher_gets_the_reason_to_wait_then_the_plan_then_the_end(tmp_path: Path) -> None:
    async with running(spec_of(1, 2, rounds=1), tmp_path) as run:
        await run.join(A)
        watch = run.stub(A).Watch(pb.WatchRequest(peer=A.peer))
        assert "1 more full replica (1 of 2 here)" in (await watch.read()).waiting
        await run.join(B)
        update = await update_where(watch, has_plan)
        plan = open_plan(update.signed_plan, update.signature, run.run, COORDINATOR.peer)
        assert [replica.members[0].peer for replica in plan.replicas] == [A.peer, B.peer]
        await run.settle(0, 1, A, B)
        last = await update_where(watch, lambda update: update.finished)
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
    update = await update_where(watch, lambda update: places_from_pb(update.followers) == (place,))
    assert not update.signed_plan
    own = run.stub(C).Watch(pb.WatchRequest(peer=C.peer))
    assert places_from_pb((await own.read()).followers) == (place,)
    waiting = (
        "following the rounds of stages 0-1: "
        f"replica-2 waits for ..{C.peer[-8:]} (stages 0-1), which must catch up"
    )
    await update_where(own, lambda update: update.waiting == waiting)
    for stage in (0, 1):
        assert (await run.attest(C, stage, 0)).agrees
    assert (await run.status()).peers[2].lifecycle == "ready"
    assert (await run.status()).peers[2].assignment == "replica-2, stages 0-1"
    await run.settle(0, 1, A, B)
    update = await update_where(watch, has_plan)
    plan = open_plan(update.signed_plan, update.signature, run.run, COORDINATOR.peer)
    assert [replica.index for replica in plan.replicas] == [0, 1, 2]
    assert not update.followers
    for stream in (watch, own):
        stream.cancel()


async def test_all_watchers_learn_of_a_pause_and_of_its_end(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    watch = run.stub(A).Watch(pb.WatchRequest(peer=A.peer))
    assert not (await watch.read()).HasField("pause")
    reply = await run.ask(HoldRun("a look at the data"))
    assert reply == PauseAnswer(True, Pause(2, PausedBy.OPERATOR, "a look at the data"), 1)
    update = await update_where(watch, is_paused)
    assert pause_from_pb(update.pause) == Pause(2, PausedBy.OPERATOR, "a look at the data")
    assert update.waiting == "the run is paused before round 2 by its operator: a look at the data"
    late = run.stub(B).Watch(pb.WatchRequest(peer=B.peer))
    assert (await update_where(late, is_paused)).pause.from_round == 2
    assert (await run.status()).pause == Pause(2, PausedBy.OPERATOR, "a look at the data")
    assert not (await run.ask(HoldRun("again"))).changed
    assert await run.ask(GoOn())
    await update_where(watch, lambda update: not is_paused(update))
    assert not await run.ask(GoOn())
    for stream in (watch, late):
        stream.cancel()


async def test_a_change_that_repeats_an_earlier_one_is_answered(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    for steps in (5, 6, 5):
        change = await run.ask(ChangeSettings((f"inner.steps={steps}",), 3, "a test"))
        assert change == RunChange(3, (f"inner.steps={steps}",), "a test")


async def test_all_watchers_learn_of_a_retreat(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    watch = run.stub(A).Watch(pb.WatchRequest(peer=A.peer))
    await watch.read()
    await run.stub(B).Retreat(pb.RetreatRequest(peer=B.peer, epoch=1, reason="neighbour-lost\n"))
    await update_where(watch, lambda update: [each.peer for each in update.followers] == [B.peer])
    watch.cancel()


async def test_a_joiner_learns_the_time_of_the_coordinator(run: Running) -> None:
    before = time.time()
    assert before <= (await run.join(A)).time <= time.time()


async def test_a_heartbeat_tells_when_the_round_closes(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    beat = pb.HeartbeatRequest(peer=B.peer, round=1)
    assert await run.stub(B).Heartbeat(beat) == pb.HeartbeatReply(round=1, interval=2.0)
    waiting = run.match(A, 0, 1)
    while not (reply := await run.stub(B).Heartbeat(beat)).closing:
        assert not waiting.done()
    assert 0 < reply.closes_seconds <= FIRST_SECONDS
    reply = await run.match(B, 0, 1)
    assert reply.seconds == run.spec.timing.fetch
    await waiting


async def test_a_heartbeat_is_answered_while_commands_are_decided(
    run: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.join(A)
    decided, answered = asyncio.Event(), threading.Event()
    event_loop, original = asyncio.get_running_loop(), command_loop.decide

    def decide_slowly(state: State, command: Command, now: float) -> Applied:
        if isinstance(command, Drain):
            event_loop.call_soon_threadsafe(decided.set)
            assert answered.wait(timeout=30), "the heartbeat waits for the command before it"
        return original(state, command, now)

    monkeypatch.setattr(command_loop, "decide", decide_slowly)
    draining = asyncio.ensure_future(run.stub(A).Drain(pb.DrainRequest(peer=A.peer)))
    await decided.wait()
    await run.stub(A).Heartbeat(pb.HeartbeatRequest(peer=A.peer, round=7))
    answered.set()
    await draining
    while (await run.status()).peers[0].round_number != 7:  # decided after the command
        assert not run.task.done()


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
        record = open_state(sealed.record, sealed.signature, run.run, COORDINATOR.peer)
        holders = tuple(sorted([A.peer, B.peer]))
        assert record == StateRecord(run.run, 0, Part.STAGE, 2, anchor_of(0, 2), holders)
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
        sorted((peer.payload(run.spec, 0, 1, run=run.run) for peer in (A, B)), key=lambda d: d.owner)
    )
    onlooker = run.stub(A).AwaitDecision(pb.AwaitDecisionRequest(peer=A.peer, stage=0, round=1))
    decisions = await asyncio.gather(run.report(A, 0, 1, A, B), run.report(B, 0, 1, A, B), onlooker)
    assert decisions[0] == decisions[1] == decisions[2]
    decision = decision_from_pb(decisions[0])
    assert isinstance(decision, Committed)
    assert [entry.descriptor for entry in decision.entries] == list(group.descriptors)
    assert (await run.status()).stage_rounds_committed == 1


async def test_members_of_a_group_report_it_by_positions(run: Running) -> None:
    for peer in (A, B):
        await run.join(peer)
    payloads = {peer: peer.payload(run.spec, 0, 1, run=run.run) for peer in (A, B)}

    def match(peer: Keyed) -> Awaitable[pb.MatchReply]:
        request = pb.MatchRequest(peer=peer.peer, descriptor=descriptor_to_pb(payloads[peer]), packs=True)
        reply: Awaitable[pb.MatchReply] = run.stub(peer).Match(request)
        return reply

    replies = await asyncio.gather(match(A), match(B))
    reports = {peer: GroupReports(peer.peer) for peer in (A, B)}
    for peer, reply in zip((A, B), replies, strict=True):
        assert reply.packed
        group = GroupReports.group_of(reply)
        reports[peer].note(payloads[peer], group)
    report = pb.ReportRequest(peer=A.peer, stage=0, round=1, packs=True)
    of_all, of_one = (reports[A].by_positions(report, held) for held in (group.descriptors, [payloads[A]]))
    assert of_all is not None
    assert of_one is not None
    assert reports[A].by_positions(report, [tampered(payloads[A])]) is None, "it is not in the group"
    unknown = pb.ReportRequest(peer=A.peer, stage=0, round=1, group=b"x" * 32, positions=of_all.positions)
    assert (await refusal_of(run.stub(A).Report(unknown))).code is ErrorCode.GROUP_UNKNOWN
    wrong = pb.ReportRequest(peer=A.peer, stage=0, round=1, group=of_all.group, positions=b"\x07")
    assert (await refusal_of(run.stub(A).Report(wrong))).code is ErrorCode.BAD_REQUEST

    asked = pb.AwaitDecisionRequest(peer=A.peer, stage=0, round=1, packs=True)
    by_positions, whole, packed = await asyncio.gather(
        run.stub(A).Report(of_all), run.report(B, 0, 1, A, B), run.stub(A).AwaitDecision(asked)
    )
    expected = decision_from_pb(whole)
    assert isinstance(expected, Committed)
    assert reports[A].decision_of(packed, 0, 1) == expected
    partly = await run.stub(A).Report(of_one)
    assert reports[A].decision_of(partly, 0, 1) == expected, "a peer that lacks payloads learns the holders"
    assert by_positions.counted
    decision = reports[A].decision_of(by_positions, 0, 1)
    assert [each.descriptor for each in decision.entries] == [each.descriptor for each in expected.entries]
    assert {each.holders for each in decision.entries} == {(A.peer,)}
    with pytest.raises(HetnodeError, match="does not have"):
        reports[B].decision_of(by_positions, 0, 2)


async def test_a_cancelled_wait_leaves_no_trace_and_can_be_repeated(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    waiting = run.match(A, 0, 1)
    while (await run.status()).cause.code is not CauseCode.OFFERS_LACKING:
        assert not waiting.done()
    waiting.cancel()
    again = run.match(A, 0, 1)
    assert await run.match(B, 0, 1) == await again


async def test_a_forged_payload_is_refused(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    forged = descriptor_to_pb(tampered(A.payload(run.spec, 0, 1, run=run.run)))
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
    assert [each.peer for each in (await run.status()).measurements] == [A.peer]
    await refusal_of(run.stub(A).Measure(pb.Measurement(peer=A.peer, round=2)))


@pytest.mark.parametrize(("replica", "position"), [(1, 0), (0, 1), (7, 0)])
async def test_a_peer_measures_its_own_place_only(run: Running, replica: int, position: int) -> None:
    await run.join(A)
    await run.join(B)
    lie = pb.Measurement(peer=A.peer, round=1, replica=replica, position=position)
    assert (await refusal_of(run.stub(A).Measure(lie))).code is ErrorCode.BAD_REQUEST
    assert not (await run.status()).measurements


async def test_the_status_shows_no_field_that_it_does_not_know(run: Running) -> None:
    noise = b"\xfa\x3e\x05noise"  # field 1007, bytes
    await run.join(A, capacity=pb.Capacity.FromString(pb.Capacity(device="cpu").SerializeToString() + noise))
    await run.join(B)
    for request, method in (
        (pb.Measurement(peer=A.peer, round=1), run.stub(A).Measure),
        (pb.HeartbeatRequest(peer=A.peer, round=1), run.stub(A).Heartbeat),
    ):
        await method(type(request).FromString(request.SerializeToString() + noise))
    capacity = pb.Capacity.FromString(pb.Capacity(device="cpu", flops=2.0).SerializeToString() + noise)
    estimates = pb.Estimates.FromString(pb.Estimates(capacity=capacity).SerializeToString() + noise)
    await run.stub(A).Heartbeat(pb.HeartbeatRequest(peer=A.peer, round=1, estimates=estimates))
    status = await run.status()
    assert status.peers[0].estimates.capacity.flops == 2.0
    assert b"noise" not in zlib.decompress(status_to_pb(status).record)


async def test_the_status_names_each_peer_and_its_assignment(run: Running) -> None:
    await run.join(A)
    status = await run.status()
    assert status.phase == "gathering"
    assert status.peers[0].assignment == ""
    await run.join(B)
    await run.stub(B).Heartbeat(pb.HeartbeatRequest(peer=B.peer, round=1, inner_step=5))
    status = await run.status()
    assert status.plan is not None
    assert (status.phase, status.plan.epoch, status.anchors_agree) == ("training", 1, True)
    assert [peer.assignment for peer in status.peers] == ["replica-0, stages 0-1", "replica-1, stages 0-1"]
    assert (status.peers[1].round_number, status.peers[1].inner_step) == (1, 5)


async def test_the_status_shows_what_a_peer_waits_for(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    beat = pb.HeartbeatRequest(peer=B.peer, round=1, waits=["group", "payloads", "of a later version"])
    await run.stub(B).Heartbeat(beat)
    status = await run.status()
    assert [list(peer.waits) for peer in status.peers] == [[], ["group", "payloads"]]


async def test_every_event_is_logged_in_a_sentence(run: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "coordinator")
    await run.join(A)
    await run.join(B)
    await run.settle(0, 1, A, B)
    for part in (
        f"..{A.peer[-8:]} joined as replica",
        "plan 1 from round 1 on",
        "round 1 of stage 0 is committed",
    ):
        assert part in caplog.text


async def test_an_oversized_message_is_refused_by_grpc(run: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await run.stub(A).Leave(pb.LeaveRequest(peer=A.peer, reason="x" * (5 << 20)))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
