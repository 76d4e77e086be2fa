"""The first plan covers each stage once, uses no peer twice, and ignores the order of its input."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.placement.initial_placement import initial_plan, lacking
from coordinator.state.state import Peer
from coordinator.state.text import Waiting
from protocol.roles import POLICIES
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import (
    Capacity,
    Dialer,
    Estimates,
    Lifecycle,
    Link,
    PeerId,
    Plan,
    Role,
    StageRange,
)
from protocol.wire.convert.plans import plan_from_pb, plan_to_pb
from tests.builders import keyed


def peer(arrival: int, role: Role, endpoint: bool = True, live: bool = True) -> Peer:
    return Peer(
        PeerId(f"peer-{arrival}"),
        role,
        Capacity("cpu", 2**30, 1),
        f"10.0.0.{arrival}:40" if endpoint else "",
        arrival,
        Lifecycle.READY if live else Lifecycle.GONE,
    )


def spec_of(stages: int, replicas: int, pipelines: int, members: int = 0) -> RunSpec:
    return resolve(
        "nano",
        overrides={
            "model.layers": max(stages, 1),
            "swarm.stages": stages,
            "swarm.replicas": replicas,
            "swarm.pipelines": pipelines,
            "swarm.members": members,
        },
    )


@st.composite
def swarms(draw: st.DrawFn) -> tuple[RunSpec, list[Peer]]:
    """A spec and exactly as many peers as it takes, with or without endpoints."""
    stages = draw(st.integers(2, 7))
    replicas, pipelines = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    roles = draw(st.permutations([Role.REPLICA] * replicas + [Role.STAGE] * pipelines * stages))
    reachable = draw(st.floats(0, 1))
    coin = draw(st.randoms(use_true_random=False))
    peers = [peer(i + 1, role, coin.random() < reachable) for i, role in enumerate(roles)]
    return spec_of(stages, replicas, pipelines), peers


def chainable(peers: list[Peer], spec: RunSpec) -> bool:
    """The condition by counting: a chain of S holds at most ceil(S/2) members that only dial."""
    dialing = sum(p.role is Role.STAGE and not p.endpoint for p in peers)
    return dialing <= spec.swarm.pipelines * -(-spec.swarm.stages // 2)


@given(swarms())
def test_a_plan_covers_every_stage_once_per_replica_and_uses_each_peer_at_most_once(
    swarm: tuple[RunSpec, list[Peer]],
) -> None:
    spec, peers = swarm
    plan = initial_plan(peers, spec)
    if isinstance(plan, Waiting):
        assert not chainable(peers, spec)
        assert plan.unreachable
        return
    assert chainable(peers, spec)
    names = [member.peer for replica in plan.replicas for member in replica.members]
    assert len(set(names)) == len(names) == len(peers)
    assert [replica.index for replica in plan.replicas] == list(
        range(spec.swarm.replicas + spec.swarm.pipelines)
    )
    for replica in plan.replicas:
        assert [s for member in replica.members for s in member.stages] == list(range(spec.swarm.stages))
        assert len(replica.links) == len(replica.members) - 1


@given(swarms())
def test_every_link_is_dialed_toward_an_end_that_accepts_connections(
    swarm: tuple[RunSpec, list[Peer]],
) -> None:
    spec, peers = swarm
    plan = initial_plan(peers, spec)
    for replica in plan.replicas if isinstance(plan, Plan) else ():
        for i, link in enumerate(replica.links):
            upstream, downstream = replica.members[i : i + 2]
            assert link.k == spec.link.k
            assert (downstream if link.dialer is Dialer.UPSTREAM else upstream).endpoint
            assert link.dialer is Dialer.UPSTREAM or not downstream.endpoint


@given(swarms(), st.integers())
def test_the_order_of_the_input_does_not_matter(swarm: tuple[RunSpec, list[Peer]], seed: int) -> None:
    spec, peers = swarm
    shuffled = random.Random(seed).sample(peers, len(peers))
    assert initial_plan(shuffled, spec) == initial_plan(peers, spec)


def test_reachable_peers_form_pipelines_in_order_of_arrival() -> None:
    peers = [peer(i, Role.STAGE) for i in range(1, 5)] + [peer(5, Role.REPLICA)]
    plan = initial_plan(peers, spec_of(2, 1, 2))
    assert isinstance(plan, Plan)
    assert [[m.peer for m in replica.members] for replica in plan.replicas] == [
        ["peer-5"],
        ["peer-1", "peer-2"],
        ["peer-3", "peer-4"],
    ]
    assert plan.replicas[0].members[0].stages == StageRange(0, 2)
    assert plan.replicas[1].links == (Link(8, Dialer.UPSTREAM),)
    assert plan.reason == "1 full replica and 2 pipelines of 2 stages, in order of arrival"


def test_peers_without_endpoint_are_spread_over_the_pipelines() -> None:
    peers = [peer(i, Role.STAGE, endpoint=i <= 2) for i in range(1, 5)]
    plan = initial_plan(peers, spec_of(2, 0, 2))
    assert isinstance(plan, Plan)
    assert [[m.peer for m in replica.members] for replica in plan.replicas] == [
        ["peer-1", "peer-3"],
        ["peer-2", "peer-4"],
    ]
    assert {link.dialer for replica in plan.replicas for link in replica.links} == {Dialer.DOWNSTREAM}


def test_a_pair_without_endpoints_waits_and_both_are_named_until_a_third_peer_connects_them() -> None:
    spec = spec_of(2, 0, 1)
    peers = [peer(1, Role.STAGE, endpoint=False), peer(2, Role.STAGE, endpoint=False)]
    waiting = initial_plan(peers, spec)
    assert isinstance(waiting, Waiting)
    assert "peer-1 and peer-2" in waiting.sentence
    plan = initial_plan([*peers, peer(3, Role.STAGE)], spec)
    assert isinstance(plan, Plan)
    assert [member.peer for member in plan.replicas[0].members] == ["peer-1", "peer-3"]


def test_what_is_lacking_does_not_count_peers_that_are_gone() -> None:
    spec = spec_of(2, 1, 1)
    peers = [peer(1, Role.STAGE), peer(2, Role.STAGE, live=False)]
    assert [(each.role, each.count, each.total) for each in lacking(peers, spec)] == [
        (Role.STAGE, 1, 2),
        (Role.REPLICA, 1, 1),
    ]
    assert isinstance(initial_plan(peers, spec), Waiting)


def test_a_pipeline_of_fewer_members_than_stages_waits_for_its_members_and_shares_the_stages_evenly() -> None:
    spec = spec_of(5, 0, 2, members=3)
    assert POLICIES[Role.STAGE].peers_needed(spec) == 6
    peers = [peer(i, Role.STAGE) for i in range(1, 7)]
    assert initial_plan(peers[1:], spec) == Waiting("waiting for 1 more stage peer (5 of 6 here)")
    plan = initial_plan(peers, spec)
    assert isinstance(plan, Plan)
    for replica in plan.replicas:
        assert [str(member.stages) for member in replica.members] == ["0-1", "2-3", "4"]


def test_peers_that_drain_are_not_in_the_first_plan() -> None:
    peers = [peer(1, Role.STAGE), replace(peer(2, Role.STAGE), lifecycle=Lifecycle.DRAINING)]
    assert initial_plan(peers, spec_of(2, 0, 1)) == Waiting("waiting for 1 more stage peer (1 of 2 here)")


def measured(arrival: int, gigaflops: float, megabytes: float = 0.0) -> Peer:
    """`megabytes` per second up and down; 0 is not measured."""
    known = peer(arrival, Role.STAGE)
    line = megabytes * 1e6
    return replace(known, capacity=Capacity("cpu", 2**30, 1, gigaflops * 1e9, line, line))


def test_measured_peers_form_pipelines_by_what_they_can_carry_and_the_plan_says_so() -> None:
    peers = [measured(1, 1.0, 0.5), measured(2, 3.0, 0.5), peer(3, Role.REPLICA)]
    plan = initial_plan(peers, spec_of(4, 1, 1, members=2))
    assert isinstance(plan, Plan)
    assert plan.replicas[0].members[0].peer == "peer-3"
    shares = {member.peer: len(member.stages) for member in plan.replicas[1].members}
    assert shares == {"peer-1": 1, "peer-2": 3}
    assert plan.reason.startswith("1 full replica and 1 pipeline by what peers can carry: replica-1: ..peer-")
    assert "bottleneck: " in plan.reason


def test_estimates_count_more_than_the_capacity_declared_at_the_join() -> None:
    spec = spec_of(4, 0, 1, members=2)
    peers = [measured(1, 1.0), measured(2, 3.0)]
    estimates = {PeerId("peer-1"): Estimates(Capacity("cpu", 2**30, 1, 9e9))}
    plan = initial_plan(peers, spec, estimates)
    assert isinstance(plan, Plan)
    assert {member.peer: len(member.stages) for member in plan.replicas[0].members}["peer-1"] == 3


def test_the_reason_for_many_pipelines_describes_only_the_slowest() -> None:
    peers = [measured(i, 1.0 if i == 7 else 5.0, 0.5) for i in range(1, 13)]
    plan = initial_plan(peers, spec_of(2, 0, 6))
    assert isinstance(plan, Plan)
    assert plan.reason.startswith("6 pipelines by what peers can carry: the slowest is replica-")
    assert "..peer-7" in plan.reason
    assert len(plan.reason) < 200


def test_the_run_waits_for_memory_if_no_pipeline_fits() -> None:
    peers = [
        replace(each, capacity=replace(each.capacity, memory_bytes=10_000))
        for each in (measured(1, 1.0), measured(2, 1.0))
    ]
    waiting = initial_plan(peers, spec_of(2, 0, 1))
    assert isinstance(waiting, Waiting)
    assert not waiting.unreachable
    assert "waiting for more memory" in waiting.sentence


def test_the_reason_of_a_plan_with_many_members_is_short_enough_for_nodes() -> None:
    spec = spec_of(16, 0, 4)
    peers = [peer(i, Role.STAGE) for i in range(1, 65)]
    estimates = {each.peer: Estimates(replace(each.capacity, flops=1e9 * each.arrival)) for each in peers}
    plan = initial_plan(peers, spec, estimates)
    assert isinstance(plan, Plan)
    renamed = {each.peer: keyed(each.arrival).peer for each in peers}
    members = [
        [replace(member, peer=renamed[member.peer]) for member in replica.members]
        for replica in plan.replicas
    ]
    real = [
        replace(replica, members=tuple(each)) for replica, each in zip(plan.replicas, members, strict=True)
    ]
    sent = plan_to_pb(replace(plan, replicas=tuple(real), reason=f"{plan.reason}{1000 * '.'}"))
    assert plan_from_pb(sent).reason.startswith(plan.reason[:900])
    assert len(plan.reason) < 1000


def test_without_speeds_a_peer_with_too_little_memory_is_not_in_the_plan() -> None:
    spec = spec_of(2, 0, 1)
    first, second, third = (peer(i, Role.STAGE) for i in (1, 2, 3))
    weak = replace(first, capacity=replace(first.capacity, memory_bytes=10_000))
    plan = initial_plan([weak, second, third], spec)
    assert isinstance(plan, Plan)
    assert plan.replica_of(weak.peer) is None
    waiting = initial_plan([weak, second], spec)
    assert isinstance(waiting, Waiting)
    assert "memory" in waiting.sentence
