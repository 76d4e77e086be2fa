"""Peers that reduce and check each other over libp2p: the bytes on their lines, and who gets an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hivemind.p2p import P2P
from hivemind.proto.averaging_pb2 import BAD_GROUP_ID, AveragingData

from node.core.model.shapes import parameter_shapes
from node.exchange.allow_list import AllowList
from node.exchange.hive.records import stage_prefix
from node.exchange.hive.reduction.part_plan import PartPlan
from node.exchange.hive.reduction.reduction_peer import ReductionPeer
from node.exchange.payload_store import PayloadStore
from node.exchange.transport import ExchangeResult
from node.security.identity import Identity, open_identity
from protocol.pb.payload_pb2 import CountRequest
from protocol.reduction.counted_result import mask_of
from protocol.reduction.parts import ReductionLayout
from protocol.server.line import Line
from protocol.types import ExchangeGroup, MemberLine
from tests.builders import spec_of
from tests.support.hive_nodes import RUN, canonical, describe
from tests.support.reduction import payloads_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEC = spec_of(outer__exchange="reduced")
LAYOUT = ReductionLayout(parameter_shapes(SPEC, 0), SPEC.outer)
PAYLOADS = payloads_of(LAYOUT, 4)
SECONDS = 60.0


@dataclass(frozen=True)
class Member:
    identity: Identity
    p2p: P2P
    peer: ReductionPeer
    line: Line
    payload: bytes

    def stub(self, of: Member) -> Any:
        return ReductionPeer.get_stub(self.p2p, of.p2p.peer_id, namespace=stage_prefix(RUN, 0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def members(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Member]]:
    """In the order of their peer ids; the fifth is in no group."""
    folder: Path = tmp_path_factory.mktemp("peers")
    async with AsyncExitStack() as stack:
        found: list[Member] = []
        identities = [open_identity(folder / f"{number}.key") for number in range(5)]
        allowed = AllowList([each.peer for each in identities])
        for number, identity in enumerate(identities):
            known = [address for each in found for address in await each.p2p.get_visible_maddrs()]
            file = str(folder / f"{number}.key")
            p2p = await P2P.create(
                known, identity_path=file, check_if_identity_free=False, nat_port_map=False
            )
            stack.push_async_callback(p2p.shutdown)
            store, line = PayloadStore(folder / str(number), 4), Line()
            peer = ReductionPeer(p2p, RUN, 0, SPEC, store, identity.sign, line)
            await peer.serve(allowed)
            found.append(Member(identity, p2p, peer, line, PAYLOADS[number % 4]))
        yield [*sorted(found[:4], key=lambda each: each.identity.peer), found[4]]


def group_of(members: list[Member], round_number: int, is_open: str = "oooo") -> ExchangeGroup:
    descriptors = [describe(each.identity, each.payload, 0, round_number) for each in members[:4]]
    lines = tuple(MemberLine(1000, 1000, each == "o") for each in is_open)
    return ExchangeGroup(f"{RUN}/0/{round_number}", canonical(descriptors), SECONDS, lines)


async def reduce(members: list[Member], group: ExchangeGroup) -> list[ExchangeResult]:
    pairs = zip(members, group.descriptors, strict=False)
    return await asyncio.gather(*(each.peer.reduce(own, each.payload, group, SECONDS) for each, own in pairs))


@pytest.mark.parametrize(("round_number", "is_open"), [(1, "oooo"), (2, "o-o-"), (3, "-o--")])
async def test_members_send_what_the_plan_accounts_for(
    members: list[Member], round_number: int, is_open: str
) -> None:
    group = group_of(members, round_number, is_open)
    plan = PartPlan.of_group(LAYOUT, group)
    before = [(each.line.up.passed, each.line.down.passed) for each in members[:4]]
    found = await reduce(members, group)
    assert found[0].claim is not None
    assert {each.claim for each in found} == {found[0].claim}
    assert not any(each.rejected for each in found)
    after = [(each.line.up.passed, each.line.down.passed) for each in members[:4]]
    passed = [(up - was[0], down - was[1]) for (up, down), was in zip(after, before, strict=True)]
    assert passed == [plan.traffic(position) for position in range(4)]


async def test_who_is_not_in_the_group_or_has_no_part_in_a_call_is_refused(members: list[Member]) -> None:
    group = group_of(members, 4)
    found = await reduce(members, group)
    assert found[0].claim is not None
    name = group.group_id.encode()

    async def first() -> AsyncIterator[AveragingData]:
        yield AveragingData(group_id=name)

    stranger = members[4].stub(members[0])
    stream = await stranger.rpc_aggregate_part(first())
    assert (await anext(stream)).code == BAD_GROUP_ID
    assert await is_refused(stranger.rpc_copy(first()))
    assert await is_refused(stranger.rpc_sign(first()))
    count = CountRequest(group_id=name, senders=mask_of([0], 4))
    assert (await stranger.rpc_count(count)).refusal
    # Member 0 is checked by member 1, and checks member 3.
    assert "no such group" in (await members[0].stub(members[2]).rpc_count(count)).refusal
    assert "already" in (await members[0].stub(members[1]).rpc_count(count)).refusal
    assert "takes no such copies" in (await members[1].stub(members[0]).rpc_copy(first())).refusal


async def is_refused(call: Awaitable[Any]) -> bool:
    """Whether a call is refused, with a reply or without: p2pd may lose one that is sent while it is read."""
    try:
        return bool((await call).refusal)
    except ValueError:  # of hivemind: the stream of answers is empty
        return True


async def test_an_exchange_whose_caller_has_given_up_ends_without_a_result(members: list[Member]) -> None:
    group = group_of(members, 5)
    first = members[0]
    running = asyncio.create_task(first.peer.reduce(group.descriptors[0], first.payload, group, SECONDS))

    async def copy() -> AsyncIterator[AveragingData]:
        yield AveragingData(group_id=group.group_id.encode())

    # Its answer shows that the exchange has begun.
    assert (await members[1].stub(first).rpc_copy(copy())).refusal
    first.peer.break_off()
    assert await running == ExchangeResult((group.descriptors[0],))


async def test_in_a_group_without_the_own_payload_nothing_is_reduced(members: list[Member]) -> None:
    group = group_of(members, 6)
    own = describe(members[0].identity, members[1].payload, 0, 6)
    assert await members[0].peer.reduce(own, members[1].payload, group, SECONDS) == ExchangeResult((own,))
