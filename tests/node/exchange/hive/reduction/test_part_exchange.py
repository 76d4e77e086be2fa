"""hivemind's all-reduce with parts of payloads: all members get the same bytes, or know what is missing."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows only typing's in rpc signatures

import pytest
import pytest_asyncio
from hivemind.p2p import P2P, P2PContext
from hivemind.proto.averaging_pb2 import PROTOCOL_VIOLATION, AveragingData

from node.exchange.hive.reduction.part_exchange import PartExchange
from node.exchange.hive.reduction.part_plan import PartPlan, Reduction
from node.exchange.hive.reduction.part_reducer import ReducedPart
from protocol.reduction.counted_result import CountedResult
from protocol.types import ExchangeGroup, MemberLine, ResultClaim
from tests.builders import keyed, spec_of
from tests.support.part_group import GROUP, LAYOUT, PartGroup, open_group, plan_prefix, uncounted

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATIENT, BRIEF = 60.0, 12.0
SPEC = spec_of(outer__exchange="reduced")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group() -> AsyncIterator[PartGroup]:
    async with open_group() as group:
        yield group


def claim_of(reduction: Reduction) -> ResultClaim | None:
    data = reduction.to_bytes()
    return None if data is None else reduction.claim(data)


@pytest.mark.parametrize("fractions", [(1, 1, 1, 1), (3, 0, 1, 0)])
async def test_all_members_get_the_sum_of_all_in_canonical_order(
    group: PartGroup, fractions: tuple[float, ...]
) -> None:
    plan = group.plan(fractions)
    assert [len(parts) > 1 for parts in plan.parts] == [fraction > 0 for fraction in fractions]
    found = await group.run(group.members(plan, PATIENT), plan)
    assert [each.result for each in found] == [group.expected(plan, range(4))] * 4
    assert all(uncounted(each, member) == () for each in found for member in plan.members)
    data = found[0].to_bytes()
    assert data is not None
    counted = CountedResult.from_bytes(LAYOUT, data)
    assert counted.result == found[0].result, "a member that lacks parts fetches these bytes"
    assert set(counted.senders) == {(0, 1, 2, 3)}
    digest = hashlib.sha256(data).hexdigest()
    assert [claim_of(each) for each in found] == [ResultClaim(digest, len(data))] * 4


async def test_a_part_that_is_not_valid_counts_nowhere_and_those_before_it_do(group: PartGroup) -> None:
    class Corrupt(PartExchange):
        async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[AveragingData]:
            number = 0
            async for message in super()._generate_input_for_peer(peer_index):
                if number == 1 and peer_index == 0:
                    message.tensor_part.buffer = bytes(len(message.tensor_part.buffer))
                number += 1
                yield message

    plan = group.plan()
    kinds = (PartExchange, PartExchange, PartExchange, Corrupt)
    found = await group.run(group.members(plan, BRIEF, *kinds), plan)
    results = {each.result for each in found[:3]}
    assert len(results) == 1
    assert results != {None}
    assert found[3].lacks == [0]
    for each in found[:3]:
        assert uncounted(each, plan.members[3]) == plan.parts[0][1:]
        assert uncounted(each, plan.members[2]) == ()


async def test_what_a_sender_says_of_its_weight_does_not_count(group: PartGroup) -> None:
    plan = group.plan()
    members = group.members(plan, PATIENT)
    members[2].weight = 1000.0
    found = await group.run(members, plan)
    assert [each.result for each in found] == [group.expected(plan, range(4))] * 4


async def test_a_silent_sender_is_left_out_after_half_of_the_time(group: PartGroup) -> None:
    class Silent(PartExchange):
        async def _communicate_with_peer(self, peer_id: Any) -> None:
            self.tensor_part_container.register_failed_reducer(self.ordered_peer_ids.index(peer_id))

    plan = group.plan((1, 1, 1, 0))
    kinds = (PartExchange, PartExchange, PartExchange, Silent)
    found = await group.run(group.members(plan, BRIEF, *kinds), plan)
    assert [each.result for each in found] == [group.expected(plan, range(3))] * 3 + [None]
    assert uncounted(found[0], plan.members[3]) == tuple(plan.all_parts)
    claims = [claim_of(each) for each in found]
    assert claims[0] is not None
    assert claims[0].without == (plan.members[3].to_base58(),)
    assert claims == [claims[0]] * 3 + [None]


async def test_without_one_reducer_only_its_parts_are_missing(group: PartGroup) -> None:
    plan = group.plan((1, 1, 1, 1))
    found = await group.run(group.members(plan, BRIEF, *[PartExchange] * 3), plan)
    for each in found:
        assert each.lacks == [3]
        assert each.result is None
        assert each.parts == found[0].parts
        assert uncounted(each, plan.members[3]) == tuple(part for of_one in plan.parts[:3] for part in of_one)


@pytest.mark.parametrize("answer", ["too short", "not valid", "of nobody"])
async def test_an_answer_that_is_not_valid_is_missing_at_the_member_that_got_it(
    group: PartGroup, answer: str
) -> None:
    class Liar(PartExchange):
        async def rpc_aggregate_part(
            self, stream: AsyncIterator[AveragingData], context: P2PContext
        ) -> AsyncIterator[AveragingData]:
            async for message in super().rpc_aggregate_part(stream, context):
                good, part = message.tensor_part.buffer, message.tensor_part
                if context.remote_id == self.ordered_peer_ids[0]:
                    false = {"too short": good[:-1], "not valid": bytes([1]) + bytes(len(good) - 1)}
                    part.buffer = false.get(answer, bytes(1) + good[1:])
                yield message

    plan = group.plan()
    kinds = (PartExchange, PartExchange, Liar, PartExchange)
    found = await group.run(group.members(plan, BRIEF, *kinds), plan)
    assert found[0].lacks == [2]
    # The others have one result, and member 0 has reduced its own parts for them.
    results = {each.result for each in found[1:]}
    assert len(results) == 1
    assert results != {None}
    for each in found[1:]:
        assert all(uncounted(each, member) == () for member in plan.members[1:])
        # Member 0 ends its stream at the first wrong answer, and counts in the parts that it has sent before.
        assert set(uncounted(each, plan.members[0])) < set(plan.parts[2])


async def test_a_peer_outside_the_group_and_a_second_stream_are_refused(group: PartGroup) -> None:
    async with open_group(1, group.peers) as others:
        stranger = others.peers[0]
        plan = group.plan()
        has_begun = asyncio.Event()

        class Seen(PartExchange):
            async def rpc_aggregate_part(
                self, stream: AsyncIterator[AveragingData], context: P2PContext
            ) -> AsyncIterator[AveragingData]:
                async for message in super().rpc_aggregate_part(stream, context):
                    if context.remote_id == plan.members[1]:
                        has_begun.set()
                    yield message

        kinds = (Seen, PartExchange, PartExchange)
        members = group.members(plan, BRIEF, *kinds)
        running = asyncio.create_task(group.run(members, plan))

        async def ask(caller: P2P) -> int:
            async def messages() -> AsyncIterator[AveragingData]:
                yield AveragingData(group_id=GROUP)

            stub: Any = PartExchange.get_stub(caller, plan.members[0], namespace=plan_prefix(plan))
            stream = await stub.rpc_aggregate_part(messages())
            return int((await anext(stream)).code)

        await has_begun.wait()
        assert await ask(stranger) == PROTOCOL_VIOLATION
        assert await ask(group.peers[1]) == PROTOCOL_VIOLATION
        found = await running
        assert found[0].parts == found[1].parts
        assert uncounted(found[0], plan.members[1]) == ()


@pytest.mark.parametrize("data", [b"", b"\0abc", b"\x10abc"])
async def test_an_answer_counts_members_of_the_group_alone(data: bytes) -> None:
    with pytest.raises(ValueError, match="members"):
        ReducedPart.from_bytes(data, 4)
    assert ReducedPart.from_bytes(ReducedPart((0, 9), b"x").to_bytes(12), 12) == ReducedPart((0, 9), b"x")


@pytest.mark.parametrize(
    ("lines", "reduces"),
    [
        ((), [True] * 4),
        ((MemberLine(0, 0, True), MemberLine(0, 0, True), MemberLine(9, 9, False)), [True, True, False]),
        ((MemberLine(100, 9, True), MemberLine(0, 9, True), MemberLine(99, 9, False)), [True, False, False]),
    ],
)
async def test_members_make_the_plan_from_the_lines_of_their_group(
    lines: tuple[MemberLine, ...], reduces: list[bool]
) -> None:
    count = len(lines) or 4
    payloads = sorted((keyed(number).payload(SPEC, 0, 1) for number in range(count)), key=lambda d: d.owner)
    plan = PartPlan.of_group(LAYOUT, ExchangeGroup("g", tuple(payloads), 1.0, lines))
    assert [member.to_base58() for member in plan.members] == [each.owner for each in payloads]
    assert plan.weights == (1.0,) * count
    assert [len(each) > 0 for each in plan.ranges] == reduces
    assert [part.last_chunk for part in plan.all_parts][-1] == LAYOUT.chunks.total


async def test_a_group_that_no_one_can_dial_has_no_plan() -> None:
    group = ExchangeGroup("g", (keyed(0).payload(SPEC, 0, 1),), 1.0, (MemberLine(9, 9, False),))
    with pytest.raises(ValueError, match="no shares"):
        PartPlan.of_group(LAYOUT, group)
