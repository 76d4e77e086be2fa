"""The coordinator's DHT peer and all members admit the sources of members: over real gRPC, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.admission import seconds_to_tell
from protocol.errors import ErrorCode
from protocol.group.peers import MemberSource
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.wire.convert.plans import sources_from_pb
from protocol.wire.operator_calls import BanPeer, UnbanPeer
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_process import (
    COORDINATOR,
    NoDht,
    Running,
    certificate_of,
    channel_to,
    refusal_of,
    running,
)
from tests.support.hostile import relay

A, B, C = (keyed(i) for i in range(3))
HERE, THERE = "127.0.0.1", "127.0.0.2"
PATIENT = 120.0


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    """A coordinator that waits for two full replicas of two stages."""
    async with running(spec_of(), tmp_path) as coordinator:
        yield coordinator


async def heartbeat_from(run: Running, peer: Keyed, source: str) -> None:
    pair = certificate_of(run.authority, peer)
    async with relay(run.address, source) as address, channel_to(address, run.authority.pem, pair) as channel:
        await pb_grpc.CoordinatorStub(channel).Heartbeat(pb.HeartbeatRequest(peer=peer.peer))


async def sources_after(watch: Any, count: int) -> set[MemberSource]:
    """What a watcher was told, once it knows `count` sources."""
    known: set[MemberSource] = set()
    async with asyncio.timeout(PATIENT):
        while len(known) < count:
            known |= set(sources_from_pb((await watch.read()).sources))
    return known


async def test_a_source_is_admitted_before_the_join_is_answered(run: Running) -> None:
    assert set(run.dht.sources) == set()
    await run.join(A)
    assert set(run.dht.sources) == {HERE}


async def test_a_join_does_not_wait_for_a_dht_peer_that_is_away(run: Running) -> None:
    run.dht.away = asyncio.Event()
    async with asyncio.timeout(PATIENT):
        await run.join(A)
    assert set(run.dht.sources) == set()
    run.dht.away.set()


async def test_callers_without_the_certificate_of_a_peer_are_not_admitted(run: Running) -> None:
    await run.status()  # the operator
    async with channel_to(run.address, run.authority.pem, None) as channel:
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await pb_grpc.CoordinatorStub(channel).Status(pb.StatusRequest())
    await run.join(A)
    assert set(run.dht.sources) == {HERE}


async def test_members_learn_the_sources_of_all_members_and_then_the_new_ones(run: Running) -> None:
    await run.join(A)
    first = MemberSource(A.peer, HERE)
    watch = run.stub(A).Watch(pb.WatchRequest(peer=A.peer))
    assert sources_from_pb((await watch.read()).sources) == (first,)
    await run.join(B)
    await heartbeat_from(run, B, THERE)
    new = {MemberSource(B.peer, HERE), MemberSource(B.peer, THERE)}
    assert await sources_after(watch, 2) == new
    again = run.stub(B).Watch(pb.WatchRequest(peer=B.peer))
    assert await sources_after(again, 3) == {first, *new}


async def test_a_coordinator_that_has_moved_is_heard_by_those_that_do_not_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its DHT peer publishes where it is, and admits members at the places where they accept links."""
    monkeypatch.setattr(NoDht, "arbiter", object())
    async with running(spec_of(), tmp_path) as first:
        await asyncio.gather(first.join(A, endpoint="192.0.2.7:9"), first.join(B, endpoint="name.example:9"))
        await first.settle(0, 1, A, B)
    async with running(spec_of(), tmp_path) as second:
        await second.dht.until_admitted("192.0.2.7")
        assert second.address != first.address
        assert second.dht.published is not None
        assert (second.dht.published.peer, second.dht.published.endpoint) == (
            COORDINATOR.peer,
            second.address,
        )


async def test_a_restarted_coordinator_learns_the_sources_from_heartbeats(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path) as first:
        await first.join(A)
    async with running(spec_of(), tmp_path, first.address) as second:
        assert set(second.dht.sources) == set()
        await second.stub(A).Heartbeat(pb.HeartbeatRequest(peer=A.peer))
        await second.dht.until_admitted(HERE)


async def test_a_banned_member_loses_the_sources_that_no_other_member_has(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    await heartbeat_from(run, B, THERE)
    await run.join(A)  # its answer comes when all known sources are admitted
    assert set(run.dht.sources) == {HERE, THERE}
    await run.ask(BanPeer(B.peer, "sends noise"))
    await run.dht.until_admitted(HERE)
    assert list(run.dht.banned) == [B.peer]
    assert (
        await refusal_of(run.stub(B).Heartbeat(pb.HeartbeatRequest(peer=B.peer)))
    ).code is ErrorCode.BANNED
    await run.ask(UnbanPeer(B.peer))
    await run.dht.until_admitted(HERE, THERE)


def test_new_sources_wait_longer_for_others_in_a_large_swarm() -> None:
    assert [seconds_to_tell(members) for members in (0, 100, 1000)] == [0.5, 0.5, 5.0]
