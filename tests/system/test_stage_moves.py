"""Nodes that move to other stages, and plans that change links and shares while links stay open."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.placement.start import initial_plan
from coordinator.run.state.commands import Leave
from coordinator.run.state.events import AssignmentReserved, PeerJoined
from node.exchange.transport import Enter
from node.ipc.worker_calls import Connect
from node.net.coordinator_client import Admission, CoordinatorClient
from node.net.link_dialer import dial as original_dial
from node.net.plan_updates import PlanUpdate
from node.security.identity import Identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.sampling import next_first_sample, sample_range
from protocol.spec.run import RunSpec
from protocol.status import Cause
from protocol.types import Member, PeerId, Plan, Replica, ReservedAssignment, Role, StageRange
from protocol.wire.typed_calls import Call, decode_request, name_of
from tests.virtual.network import current_machine
from tests.virtual.scenario import MIXED, QUICK, Play, contributions, swarm_spec
from tests.virtual.swarm import VirtualSwarm
from tests.virtual.transport import VirtualPackage, VirtualTransport
from tests.virtual.worker import VirtualWorker

MEMBERS = {"a": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE, "s": Role.STAGE, "t": Role.STAGE}
SHAPE = {name: MEMBERS[name] for name in "apq"}


def spec_with_spares(rounds: int, **overrides: Any) -> RunSpec:
    """A full replica, a pipeline of two, and spares that never become their own pipeline."""
    return swarm_spec(SHAPE, rounds, **{"grouping.spares": 2, "recovery.checkpoint_every": 1, **overrides})


async def until_s_follows(swarm: VirtualSwarm) -> None:
    """Let s come in round 2, and wait until it follows the stage of the pipeline that it has got."""
    await swarm.until_round(2)
    swarm.start("s")
    await swarm.until_round(4)


async def move(swarm: VirtualSwarm, name: str) -> StageRange:
    """Reserve the other stage of the pipeline for the node, as if the coordinator had decided it."""
    peer = swarm.peer(name)
    now = swarm.state.reservations[peer]
    other = StageRange(1 - now.stages.first, 2 - now.stages.first)
    place = ReservedAssignment(peer, now.replica, other.first, other)
    await swarm.coordinator.inject(AssignmentReserved(swarm.coordinator.command_loop.now(), place))
    return other


def stages_of(swarm: VirtualSwarm, name: str) -> StageRange:
    return swarm.trainer(name).stages


async def until_built(swarm: VirtualSwarm, name: str, stages: StageRange) -> None:
    def built(_: object) -> bool:
        worker = swarm.nodes[name].worker
        trainer = getattr(worker and worker.worker, "trainer", None)
        return trainer is not None and trainer.stages == stages

    await swarm.until(built, f"{name} has built {stages}", 120)


def test_a_node_moves_to_other_stages_without_a_restart_and_back(play: Play) -> None:
    found = []

    async def moved(swarm: VirtualSwarm) -> None:
        await until_s_follows(swarm)
        await swarm.until_round(5)
        node = swarm.nodes["s"]
        task, process, first = node.task, node.process, stages_of(swarm, "s")
        other = await move(swarm, "s")
        await until_built(swarm, "s", other)
        # The checkpoints of its former stage are kept in their own folder.
        assert list((node.folder / f"stages-{first}" / "checkpoint").glob("round-*"))
        await swarm.until_round(7)
        assert await move(swarm, "s") == first
        await until_built(swarm, "s", first)
        kept = node.folder / "checkpoint"
        assert list(kept.glob(f"round-*/stage-{first.first:02d}.safetensors"))
        assert not list(kept.glob(f"round-*/stage-{other.first:02d}.safetensors"))
        assert (node.task, node.process) == (task, process)
        found.append(first)

    later = {"s": Role.STAGE}
    swarm = play.to_the_end(moved, SHAPE, later=later, spec=spec_with_spares(12))
    assert sum(event.peer == swarm.peer("s") for event in swarm.happened(PeerJoined)) == 1
    assert set(swarm.anchors("s")) == {found[0].first}
    assert contributions(swarm, "p") == swarm.rounds


def test_a_move_retries_while_the_dht_is_unreachable_and_uses_the_newest_admission(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[tuple[str, ...]] = []
    joins: Counter[PeerId] = Counter()
    start, join = VirtualPackage.start, CoordinatorClient.join

    async def start_transport(
        self: VirtualPackage, me: Identity, enter: Enter, *more: Any
    ) -> VirtualTransport:
        if current_machine() == "s":
            entered.append(tuple((await enter()).initial_peers))
            if len(entered) in (2, 3):
                raise HetnodeError(ErrorCode.DHT_UNREACHABLE, "No peer answers.", "Wait.")
        return await start(self, me, enter, *more)

    async def join_counted(self: CoordinatorClient, *arguments: Any) -> Admission:
        joins[self._peer] += 1
        return replace(await join(self, *arguments), dht_peers=(f"of join {joins[self._peer]}",))

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*SHAPE)
        await until_s_follows(swarm)
        peer = swarm.peer("s")
        await swarm.coordinator.command_loop.execute(Leave(peer, "forgotten"))
        await swarm.until(lambda state: joins[peer] == 2 and peer in state.reservations)
        await swarm.until_round(swarm.state.current_round + 2)  # it follows again
        other = await move(swarm, "s")
        await until_built(swarm, "s", other)
        assert entered == [("of join 1",), *[("of join 2",)] * 3]
        swarm.drain("s")
        await swarm.until_over("s", seconds=20)
        assert not swarm.nodes["s"].errors

    monkeypatch.setattr(VirtualPackage, "start", start_transport)
    monkeypatch.setattr(CoordinatorClient, "join", join_counted)
    play(scenario, MEMBERS, spec_with_spares(60))


@pytest.mark.slow  # its pieces are tested by themselves
def test_a_node_that_hears_late_of_its_move_is_not_refused_and_moves(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, attest = CoordinatorClient.watch, CoordinatorClient.attest
    refused: list[ErrorCode] = []
    is_late = False

    async def watch_late(self: CoordinatorClient) -> AsyncIterator[PlanUpdate]:
        async for update in watch(self):
            if current_machine() == "s" and is_late:
                await asyncio.sleep(8)
            yield update

    async def attest_watched(self: CoordinatorClient, *arguments: Any) -> None:
        try:
            await attest(self, *arguments)
        except HetnodeError as error:
            refused.append(error.code)
            raise

    async def scenario(swarm: VirtualSwarm) -> None:
        nonlocal is_late
        swarm.start(*SHAPE)
        await until_s_follows(swarm)
        is_late = True
        other = await move(swarm, "s")
        await until_built(swarm, "s", other)
        assert not refused
        await swarm.until_over()
        assert not swarm.nodes["s"].errors

    monkeypatch.setattr(CoordinatorClient, "watch", watch_late)
    monkeypatch.setattr(CoordinatorClient, "attest", attest_watched)
    play(scenario, MEMBERS, spec_with_spares(20))


@pytest.mark.slow  # its pieces are tested by themselves
def test_a_node_that_drains_while_its_move_fails_leaves(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: Counter[str] = Counter()
    start = VirtualPackage.start

    async def start_transport(self: VirtualPackage, *arguments: Any) -> VirtualTransport:
        starts[current_machine()] += 1
        if starts["s"] > 1:
            raise HetnodeError(ErrorCode.DHT_UNREACHABLE, "No peer answers.", "Wait.")
        return await start(self, *arguments)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*SHAPE)
        await until_s_follows(swarm)
        await move(swarm, "s")
        await swarm.until(lambda _: starts["s"] > 2)
        swarm.drain("s")
        await swarm.until_over("s", seconds=5)
        assert not swarm.nodes["s"].errors
        await swarm.until_over()

    monkeypatch.setattr(VirtualPackage, "start", start_transport)
    play(scenario, MEMBERS, spec_with_spares(20))


def test_a_spare_moves_to_the_stage_that_a_pipeline_has_lost(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*SHAPE)
        await swarm.until_round(1)
        swarm.start("s")
        await swarm.until(lambda state: swarm.peer("s") in state.reservations)
        swarm.start("t")
        await swarm.until_round(3)
        at_first = [name for name in ("p", "q", "s", "t") if stages_of(swarm, name) == StageRange(0, 1)]
        left = next(name for name in ("s", "t") if name not in at_first)
        neighbour = next(name for name in ("p", "q") if name not in at_first)
        swarm.kill(*at_first)  # one of the pipeline, and its only spare
        await until_built(swarm, left, StageRange(0, 1))
        await swarm.until_over("a", neighbour, left)
        swarm.assert_all_agree("a", neighbour, left)
        assert contributions(swarm, "a") == swarm.rounds
        assert contributions(swarm, neighbour)[-1] == contributions(swarm, left)[-1] == 14

    keeping = {"recovery.checkpoint_every": 2, "recovery.keep_rounds": 30}
    play(scenario, MEMBERS, spec_with_spares(14, **keeping, **QUICK))


# What a plan may change while the links stay open


def replaced_plan(change: Callable[[Replica], Replica], at: int) -> Callable[..., Any]:
    """A rule that makes one new plan, with changed replicas, from round `at` on."""

    def next_plan(state: Any, from_round: int, _: bool) -> Plan | None:
        newest = state.plans[-1]
        if from_round != at:
            return None
        first_sample = next_first_sample(newest, state.spec, from_round)
        replicas = tuple(map(change, newest.replicas))
        return Plan(newest.epoch + 1, from_round, first_sample, replicas, "a test")

    return next_plan


@pytest.mark.parametrize("k", [4, 0, pytest.param(16, marks=pytest.mark.slow)])
def test_k_changes_at_a_round_boundary_on_both_ends_and_the_link_stays_open(
    play: Play, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    def widened(replica: Replica) -> Replica:
        return replace(replica, links=tuple(replace(link, k=k) for link in replica.links))

    monkeypatch.setattr("coordinator.run.rounds.rounds.next_plan", replaced_plan(widened, at=4))
    opened: list[str] = []
    connected: list[tuple[int, int | None, int | None]] = []
    original_call = VirtualWorker.call

    async def dial(*arguments: Any) -> Any:
        opened.append("link")
        return await original_dial(*arguments)

    def call(self: VirtualWorker, call: Call) -> Any:
        if call.method == name_of(Connect) and decode_request(Connect, call) != Connect(None, None):
            request, rounds = decode_request(Connect, call), self.worker.trainer.outer.rounds
            connected.append((min(rounds.values()), request.k_upstream, request.k_downstream))
        return original_call(self, call)

    monkeypatch.setattr("node.core.train.replica_links.dial", dial)
    monkeypatch.setattr(VirtualWorker, "call", call)

    swarm = play.to_the_end(None, SHAPE, rounds=5)
    assert opened == ["link"]
    expected = [(0, None, 8), (0, 8, None), (3, None, k), (3, k, None)]
    assert sorted(connected, key=str) == sorted(expected, key=str)
    assert contributions(swarm, "p") == contributions(swarm, "a") == swarm.rounds
    losses = [swarm.trainer(name).end_inner_phase().loss for name in ("p", "q")]
    assert sum(math.isfinite(loss) for loss in losses) == 1  # the last member's


def test_replicas_with_uneven_shares_of_the_batch_train_and_stay_equal(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {0: 3, 1: 1, 2: 2}

    def shared(replica: Replica) -> Replica:
        share = shares[replica.index]
        return replace(replica, microbatches=share, weight=share / 2)

    monkeypatch.setattr("coordinator.run.rounds.rounds.next_plan", replaced_plan(shared, at=3))

    swarm = play.to_the_end(None, MIXED, **{"timing.straggler": 1e6, "timing.match_window": 20.0})
    # Both members of the pipeline have the same weight.
    assert sorted(swarm.weights(name)[-1] for name in MIXED) == [0.5, 1.0, 1.0, 1.5]
    assert swarm.committed(0) == swarm.rounds
    assert_samples_tile(swarm)


def assert_samples_tile(swarm: VirtualSwarm) -> None:
    """Every sample of every round belongs to exactly one replica, in order, over all plans."""
    expected = 0
    for round_number in swarm.rounds:
        running = swarm.state.plan_for(round_number)
        for replica in running.replicas:
            samples = sample_range(running, swarm.spec, round_number, replica.index)
            assert samples.start == expected
            expected = samples.stop
    assert expected == 6 * 3 * swarm.spec.samples_per_round()


def test_nodes_report_their_time_of_computing(play: Play) -> None:
    swarm = play.to_the_end(None, MIXED, rounds=3)
    reported = [swarm.state.estimates[swarm.peer(name)] for name in MIXED]
    assert all(each.capacity.flops > 0 for each in reported)
    assert sorted(each.microbatch_seconds > 0 for each in reported) == [False, True, True, True]


def test_the_remaining_members_of_two_pipelines_form_one_with_all_stages(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member with only stage 0 and the one with only stage 2 die; the others host all stages."""
    cuts = [(StageRange(0, 1), StageRange(1, 3)), (StageRange(0, 2), StageRange(2, 3))]

    def unlike(*arguments: Any) -> Plan | Cause:
        found = initial_plan(*arguments)
        if isinstance(found, Cause):
            return found
        replicas = [
            replace(each, members=tuple(map(_with_stages, each.members, ranges)))
            for each, ranges in zip(found.replicas, cuts, strict=True)
        ]
        return replace(found, replicas=tuple(replicas))

    monkeypatch.setattr("coordinator.membership.joining.initial_plan", unlike)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("p", "q", "r", "s")
        await swarm.until_round(4)
        names = {swarm.peer(name): name for name in members}
        chains = [[names[member.peer] for member in each.members] for each in swarm.state.plans[0].replicas]
        (alone, second), (first, last) = chains
        swarm.kill(alone, last)
        await swarm.until_over(second, first)
        swarm.assert_all_agree(second, first)
        assert contributions(swarm, first)[-1] == 10

    members = dict.fromkeys("pqrs", Role.STAGE)
    shape = {"swarm.stages": 3, "swarm.members": 2, "swarm.pipelines": 2}
    play(scenario, members, swarm_spec(members, 10, **shape, **QUICK))


def _with_stages(member: Member, stages: StageRange) -> Member:
    return replace(member, stages=stages)
