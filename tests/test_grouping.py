"""The first grouping: every stage covered once, nobody twice, and independent of the order of its input."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from coordinator.grouping import Waiting, group, missing
from coordinator.state import Peer
from protocol.spec import RunSpec, resolve
from protocol.types import Capacity, Dialer, Lifecycle, Link, PeerId, Plan, Role, StageRange


def peer(arrival: int, role: Role, endpoint: bool = True, live: bool = True) -> Peer:
    return Peer(
        PeerId(f"peer-{arrival}"),
        role,
        Capacity("cpu", 2**30, 1),
        f"10.0.0.{arrival}:40" if endpoint else "",
        arrival,
        Lifecycle.READY if live else Lifecycle.GONE,
    )


def spec_of(stages: int, replicas: int, pipelines: int) -> RunSpec:
    return resolve(
        "nano",
        overrides={
            "model.layers": max(stages, 1),
            "swarm.stages": stages,
            "swarm.replicas": replicas,
            "swarm.pipelines": pipelines,
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
    plan = group(peers, spec, epoch=1, from_round=1, first_sample=0)
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
    plan = group(peers, spec, 1, 1, 0)
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
    assert group(shuffled, spec, 1, 1, 0) == group(peers, spec, 1, 1, 0)


def test_reachable_peers_form_pipelines_in_order_of_arrival() -> None:
    peers = [peer(i, Role.STAGE) for i in range(1, 5)] + [peer(5, Role.REPLICA)]
    plan = group(peers, spec_of(2, 1, 2), 1, 1, 0)
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
    plan = group(peers, spec_of(2, 0, 2), 1, 1, 0)
    assert isinstance(plan, Plan)
    assert [[m.peer for m in replica.members] for replica in plan.replicas] == [
        ["peer-1", "peer-3"],
        ["peer-2", "peer-4"],
    ]
    assert {link.dialer for replica in plan.replicas for link in replica.links} == {Dialer.DOWNSTREAM}


def test_a_pair_without_endpoints_waits_and_both_are_named_until_a_third_peer_connects_them() -> None:
    spec = spec_of(2, 0, 1)
    peers = [peer(1, Role.STAGE, endpoint=False), peer(2, Role.STAGE, endpoint=False)]
    waiting = group(peers, spec, 1, 1, 0)
    assert isinstance(waiting, Waiting)
    assert "peer-1 and peer-2" in waiting.sentence
    plan = group([*peers, peer(3, Role.STAGE)], spec, 1, 1, 0)
    assert isinstance(plan, Plan)
    assert [member.peer for member in plan.replicas[0].members] == ["peer-1", "peer-3"]


def test_what_is_missing_is_counted_without_the_peers_that_are_gone() -> None:
    spec = spec_of(2, 1, 1)
    peers = [peer(1, Role.STAGE), peer(2, Role.STAGE, live=False)]
    assert missing(peers, spec) == "1 more stage peer (1 of 2 here) and 1 more full replica (0 of 1 here)"
    waiting = group(peers, spec, 1, 1, 0)
    assert waiting == Waiting(f"waiting for {missing(peers, spec)}")
