"""A node whose place gets other stages builds those; a plan may change links and shares as it goes on."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.placement.initial_placement import initial_plan
from coordinator.state.commands import Leave
from coordinator.state.events import AssignmentReserved, PeerJoined, PlanAdopted
from coordinator.state.text import Waiting
from node.ipc.typed_calls import name_of
from node.ipc.worker_calls import Connect
from node.net.coordinator_client import Admission, CoordinatorClient, PlanUpdate
from node.net.link_dialer import Links
from protocol.algorithm.sampling import sample_range
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.types import Member, PeerId, Plan, Replica, ReservedAssignment, Role, StageRange
from tests.virtual.hive import VirtualTransport
from tests.virtual.network import here
from tests.virtual.scenario import MIXED, Play, contributions, swarm_spec
from tests.virtual.swarm import VirtualSwarm
from tests.virtual.worker import VirtualWorker

BENCH = {"a": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE, "s": Role.STAGE, "t": Role.STAGE}


def bench_spec(rounds: int, **overrides: Any) -> RunSpec:
    """A full replica, a pipeline of two, and a bench that never becomes a pipeline of its own."""
    shape = {name: BENCH[name] for name in ("a", "p", "q")}
    return swarm_spec(shape, rounds, **{"grouping.spares": 2, "recovery.checkpoint_every": 1, **overrides})


async def move(swarm: VirtualSwarm, name: str) -> StageRange:
    """Reserve the other stage of the pipeline for the node, as if the coordinator had decided it."""
    peer = swarm.peer(name)
    now = swarm.state.reservations[peer]
    other = StageRange(1 - now.stages.first, 2 - now.stages.first)
    place = ReservedAssignment(peer, now.replica, other.first, other)
    await swarm.coordinator.happen(AssignmentReserved(swarm.coordinator.command_loop.now(), place))
    return other


def stages_of(swarm: VirtualSwarm, name: str) -> StageRange:
    return swarm.trainer(name).stages


async def until_built(swarm: VirtualSwarm, name: str, stages: StageRange) -> None:
    def built(_: object) -> bool:
        worker = swarm.nodes[name].worker
        trainer = getattr(worker and worker.worker, "trainer", None)
        return trainer is not None and trainer.stages == stages

    await swarm.until(built, f"{name} has built {stages}", 120)


def test_a_node_takes_up_other_stages_without_being_started_again(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "p", "q")
        await swarm.until_round(2)
        swarm.start("s")
        await swarm.until_round(5)
        task, life = swarm.nodes["s"].task, swarm.nodes["s"].life
        before = stages_of(swarm, "s")
        other = await move(swarm, "s")
        await until_built(swarm, "s", other)
        folder = swarm.nodes["s"].folder
        aside = folder / f"stages-{before}" / "checkpoint"
        assert list(aside.glob("round-*"))  # what it had kept of the stage before is still there, by itself
        await swarm.until_over()
        swarm.assert_all_agree("a", "p", "q", "s")
        assert swarm.nodes["s"].task is task
        assert swarm.nodes["s"].life is life
        joins = [event for event in swarm.events if isinstance(event, PeerJoined)]
        assert sum(event.peer == swarm.peer("s") for event in joins) == 1
        assert set(swarm.anchors("s")) == {other.first}
        assert contributions(swarm, "p") == list(range(1, 11))

    play(scenario, BENCH, bench_spec(10))


def test_a_move_outlasts_a_dht_that_is_away_and_goes_by_the_newest_admission(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[tuple[str, ...]] = []
    joins: Counter[PeerId] = Counter()
    start, join = VirtualSwarm.start_transport, CoordinatorClient.join

    async def start_transport(self: VirtualSwarm, **options: Any) -> VirtualTransport:
        if here() == "s":
            entered.append(options["initial_peers"])
            if len(entered) in (2, 3):
                raise HetnodeError(ErrorCode.DHT_UNREACHABLE, "Nobody is there.", "Wait.")
        return await start(self, **options)

    async def join_counted(self: CoordinatorClient, *arguments: Any) -> Admission:
        joins[self._peer] += 1
        return replace(await join(self, *arguments), dht_peers=(f"of join {joins[self._peer]}",))

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "p", "q")
        await swarm.until_round(2)
        swarm.start("s")
        await swarm.until_round(4)
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

    monkeypatch.setattr(VirtualSwarm, "start_transport", start_transport)
    monkeypatch.setattr(CoordinatorClient, "join", join_counted)
    play(scenario, BENCH, bench_spec(60))


@pytest.mark.slow  # its pieces are tested by themselves
def test_who_is_refused_because_of_a_move_that_it_has_not_heard_of_moves(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, attest = CoordinatorClient.watch, CoordinatorClient.attest
    refused: list[ErrorCode] = []
    is_late = False

    async def watch_late(self: CoordinatorClient) -> AsyncIterator[PlanUpdate]:
        async for news in watch(self):
            if here() == "s" and is_late:
                await asyncio.sleep(8)
            yield news

    async def attest_watched(self: CoordinatorClient, *arguments: Any) -> None:
        try:
            await attest(self, *arguments)
        except HetnodeError as error:
            refused.append(error.code)
            raise

    async def scenario(swarm: VirtualSwarm) -> None:
        nonlocal is_late
        swarm.start("a", "p", "q")
        await swarm.until_round(2)
        swarm.start("s")
        await swarm.until_round(4)
        is_late = True
        other = await move(swarm, "s")
        await until_built(swarm, "s", other)
        assert refused == [ErrorCode.BAD_REQUEST]
        await swarm.until_over()
        assert not swarm.nodes["s"].errors

    monkeypatch.setattr(CoordinatorClient, "watch", watch_late)
    monkeypatch.setattr(CoordinatorClient, "attest", attest_watched)
    play(scenario, BENCH, bench_spec(20))


@pytest.mark.slow  # its pieces are tested by themselves
def test_who_is_asked_to_leave_while_it_cannot_move_does(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: Counter[str] = Counter()
    start = VirtualSwarm.start_transport

    async def start_transport(self: VirtualSwarm, **options: Any) -> VirtualTransport:
        starts[here()] += 1
        if starts["s"] > 1:
            raise HetnodeError(ErrorCode.DHT_UNREACHABLE, "Nobody is there.", "Wait.")
        return await start(self, **options)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "p", "q")
        await swarm.until_round(2)
        swarm.start("s")
        await swarm.until_round(4)
        await move(swarm, "s")
        await swarm.until(lambda _: starts["s"] > 2)
        swarm.drain("s")
        await swarm.until_over("s", seconds=5)
        assert not swarm.nodes["s"].errors
        await swarm.until_over()

    monkeypatch.setattr(VirtualSwarm, "start_transport", start_transport)
    play(scenario, BENCH, bench_spec(20))


def test_a_pipeline_that_has_lost_a_stage_for_good_trains_again_with_a_spare_that_had_another(
    play: Play,
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "p", "q")
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
        assert contributions(swarm, "a") == list(range(1, 41))
        assert contributions(swarm, neighbour)[-1] == contributions(swarm, left)[-1] == 40

    play(scenario, BENCH, bench_spec(40, **{"recovery.checkpoint_every": 2, "recovery.keep_rounds": 50}))


def test_who_is_moved_back_finds_what_it_had_kept(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "p", "q")
        await swarm.until_round(2)
        swarm.start("s")
        await swarm.until_round(4)
        other = await move(swarm, "s")
        await until_built(swarm, "s", other)
        await swarm.until_round(7)
        first = await move(swarm, "s")
        await until_built(swarm, "s", first)
        folder = swarm.nodes["s"].folder
        assert list((folder / "checkpoint").glob(f"round-*/stage-{first.first:02d}.safetensors"))
        assert not list((folder / "checkpoint").glob(f"round-*/stage-{other.first:02d}.safetensors"))
        await swarm.until_over()
        swarm.assert_all_agree()

    play(scenario, {name: BENCH[name] for name in "apqs"}, bench_spec(12))


# What a plan may change while the links stay open


def replaced_plan(change: Callable[[Replica], Replica], at: int) -> Callable[..., Any]:
    """The rule of what plan follows: one new one, of changed replicas, from round `at` on."""

    def next_plan(state: Any, spec: RunSpec, epoch: int, from_round: int, first_sample: int) -> Plan | None:
        newest = state.plans[-1]
        if from_round != at:
            return None
        return Plan(epoch, from_round, first_sample, tuple(map(change, newest.replicas)), "a test")

    return next_plan


@pytest.mark.parametrize("k", [4, 0, pytest.param(16, marks=pytest.mark.slow)])
def test_k_moves_at_a_round_boundary_on_both_ends_and_no_link_is_opened_anew(
    play: Play, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    def widened(replica: Replica) -> Replica:
        return replace(replica, links=tuple(replace(link, k=k) for link in replica.links))

    monkeypatch.setattr("coordinator.rounds.rounds.next_plan", replaced_plan(widened, at=4))
    opened: list[str] = []
    connected: list[tuple[int, int | None, int | None]] = []
    original_dial, original_call = Links.dial, VirtualWorker.call

    async def dial(self: Links, *arguments: Any) -> Any:
        opened.append("link")
        return await original_dial(self, *arguments)

    def call(self: VirtualWorker, method: str, body: Any, *blobs: Any) -> Any:
        if method == name_of(Connect) and (body["k_upstream"], body["k_downstream"]) != (None, None):
            rounds = min(self.worker.trainer.rounds.values())
            connected.append((rounds, body["k_upstream"], body["k_downstream"]))
        return original_call(self, method, body, *blobs)

    monkeypatch.setattr(Links, "dial", dial)
    monkeypatch.setattr(VirtualWorker, "call", call)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert opened == ["link"]
        assert sorted(connected, key=str) == sorted(
            [(0, None, 8), (0, 8, None), (3, None, k), (3, k, None)], key=str
        )
        assert contributions(swarm, "p") == contributions(swarm, "a") == [1, 2, 3, 4, 5, 6]
        losses = [swarm.trainer(name).end_inner_phase().loss for name in ("p", "q")]
        assert sum(math.isfinite(loss) for loss in losses) == 1  # the last member's

    play(scenario, MIXED)


def test_replicas_with_uneven_shares_of_the_batch_train_and_stay_equal(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {0: 3, 1: 1, 2: 2}

    def shared(replica: Replica) -> Replica:
        share = shares[replica.index]
        return replace(replica, microbatches=share, weight=share / 2)

    monkeypatch.setattr("coordinator.rounds.rounds.next_plan", replaced_plan(shared, at=3))

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        weights = {
            entry.descriptor.owner: entry.descriptor.weight
            for decision in swarm.decisions
            if decision.round_number == 6 and decision.committed
            for entry in decision.entries
        }
        assert sorted(weights.values()) == [0.5, 1.0, 1.0, 1.5]  # both members of the pipeline weigh alike
        assert swarm.committed(0) == [1, 2, 3, 4, 5, 6]
        assert_samples_tile(swarm)

    play(scenario, MIXED, swarm_spec(MIXED, 6, **{"timing.least_window": 20.0}))


def assert_samples_tile(swarm: VirtualSwarm) -> None:
    """Every sample of every round belongs to exactly one replica, in order, over all plans."""
    plans = [event.plan for event in swarm.events if isinstance(event, PlanAdopted)]
    expected = 0
    for round_number in range(1, swarm.spec.rounds + 1):
        running = max(
            (plan for plan in plans if plan.from_round <= round_number), key=lambda plan: plan.epoch
        )
        for replica in running.replicas:
            samples = sample_range(running, swarm.spec, round_number, replica.index)
            assert samples.start == expected
            expected = samples.stop
    assert expected == 6 * 3 * swarm.spec.samples_per_round()


def test_a_node_says_how_long_it_has_computed(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        told = [swarm.state.estimates[swarm.peer(name)] for name in MIXED]
        assert all(each.capacity.flops > 0 for each in told)
        assert sorted(each.microbatch_seconds > 0 for each in told) == [False, True, True, True]

    play(scenario, MIXED, swarm_spec(MIXED, 8))


def test_two_halves_of_unlike_pipelines_become_one_where_together_they_have_all_stages(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts of stage 0 alone and of stage 2 alone go for good; the others have all state there is."""
    cuts = [(StageRange(0, 1), StageRange(1, 3)), (StageRange(0, 2), StageRange(2, 3))]

    def unlike(*arguments: Any) -> Plan | Waiting:
        found = initial_plan(*arguments)
        if isinstance(found, Waiting):
            return found
        replicas = [
            replace(each, members=tuple(map(_with_stages, each.members, ranges)))
            for each, ranges in zip(found.replicas, cuts, strict=True)
        ]
        return replace(found, replicas=tuple(replicas))

    monkeypatch.setattr("coordinator.membership.joining.initial_plan", unlike)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("p", "q", "r", "s")
        await swarm.until_round(8)
        names = {swarm.peer(name): name for name in members}
        chains = [[names[member.peer] for member in each.members] for each in swarm.state.plans[0].replicas]
        (alone, second), (first, last) = chains
        swarm.kill(alone, last)
        await swarm.until_over(second, first)
        swarm.assert_all_agree(second, first)
        assert contributions(swarm, first)[-1] == 20

    members = dict.fromkeys("pqrs", Role.STAGE)
    shape = {"swarm.stages": 3, "swarm.members": 2, "swarm.pipelines": 2}
    play(scenario, members, swarm_spec(members, 20, **shape))


def _with_stages(member: Member, stages: StageRange) -> Member:
    return replace(member, stages=stages)
