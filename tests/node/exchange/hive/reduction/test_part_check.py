"""A member that checks another one: whom it counts, and what it signs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hivemind.p2p import PeerID
from hivemind.proto.averaging_pb2 import AveragingData
from hivemind.proto.runtime_pb2 import Tensor

from node.exchange.hive.reduction.part_check import PartCheck
from node.exchange.hive.reduction.part_plan import CHECK_ROUNDS, PartPlan
from node.exchange.hive.reduction.part_reducer import ReducedPart
from protocol.pb.payload_pb2 import CountRequest
from protocol.reduction.counted_result import mask_of, senders_of
from protocol.reduction.partition import partition
from protocol.reduction.parts import Reducer, cut_payload
from protocol.reduction.stage_reducers import StageReducers
from protocol.server.line import UNLIMITED
from protocol.trust.envelope import is_signed_by
from protocol.types import ExchangeGroup, MemberLine
from tests.builders import keyed, spec_of
from tests.support.part_group import GROUP, LAYOUT, payload_of

SPEC = spec_of(outer__exchange="reduced")
OWNERS = sorted((keyed(number) for number in range(4)), key=lambda each: each.peer)
PLAN = PartPlan(
    LAYOUT,
    tuple(PeerID.from_base58(each.peer) for each in OWNERS),
    (1.0, 1.0, 1.0, 1.0),
    tuple(partition(LAYOUT.chunks.total, [1.0, 1.0, 1.0, 1.0])),
    (1, 2, 3, 0),
)
CHECKED, OWN = 0, 1
CUT = [cut_payload(LAYOUT, payload_of(seed), PLAN.parts[CHECKED]) for seed in range(4)]


async def messages(parts: Sequence[bytes]) -> AsyncIterator[AveragingData]:
    for part in parts:
        yield AveragingData(group_id=GROUP, tensor_part=Tensor(buffer=part))


def check_of(seconds: float = 60.0) -> PartCheck:
    sign = OWNERS[OWN].sign
    return PartCheck(PLAN, OWN, GROUP, StageReducers(LAYOUT), asyncio.Lock(), sign, seconds, UNLIMITED)


async def counting(check: PartCheck, senders: Sequence[int], asked: Sequence[int] = range(4)) -> str:
    """Let these members send copies, and the reducer ask for `asked`. Returns the refusal."""
    for sender in senders:
        assert (await check.copy(sender, messages(CUT[sender]))).refusal == ""
    reply = await check.count(CountRequest(group_id=GROUP, senders=mask_of(asked, 4)))
    if not reply.refusal:
        assert set(senders_of(reply.senders, 4)) == set(senders) & set(asked)
    return str(reply.refusal)


def sums(counted: Sequence[int], told: Sequence[int] | None = None) -> list[bytes]:
    """The answers of an honest reducer that says that the members `told` are in its sums."""
    return [
        ReducedPart(
            tuple(told or counted),
            Reducer(LAYOUT, part).reduce([CUT[each][number] for each in counted], [1.0] * len(counted)),
        ).to_bytes(4)
        for number, part in enumerate(PLAN.parts[CHECKED])
    ]


async def test_right_sums_are_signed_all_together() -> None:
    check = check_of()
    assert await counting(check, range(4)) == ""
    reply = await check.sign(messages(sums(range(4))))
    message = PLAN.sums_message(GROUP, CHECKED, sums(range(4)))
    assert is_signed_by(OWNERS[OWN].peer, message, reply.signature)
    assert not check.found_false


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (sums([0, 1]), "other members"),
        (sums([0, 1], [0, 1, 2]), "not the sum"),
        (sums(range(4)), "other members"),
        (sums([0, 1, 2])[:-1], "missing"),
        ([*sums([0, 1, 2]), b"more"], "too many"),
        ([b""] * len(PLAN.parts[CHECKED]), "bytes"),
    ],
    ids=["leaves one out", "false", "counts a stranger", "too few", "too many", "empty"],
)
async def test_other_sums_are_refused(answers: list[bytes], reason: str) -> None:
    check = check_of()
    assert await counting(check, range(4), [0, 1, 2]) == ""
    reply = await check.sign(messages(answers))
    assert reason in reply.refusal
    assert not reply.signature


async def test_members_that_have_not_sent_copies_in_time_do_not_count() -> None:
    assert await counting(check_of(0.0), [0, 1, 3]) == ""
    assert "too few" in await counting(check_of(0.0), [0, 3])
    assert "too few" in await counting(check_of(), range(4), [1, 2])


async def test_the_reducer_gets_one_count_and_no_signature_before_it() -> None:
    check = check_of()
    assert "not counted yet" in (await check.sign(messages(sums(range(4))))).refusal
    assert await counting(check, range(4)) == ""
    assert "already" in await counting(check, [])


@pytest.mark.parametrize("copies", [CUT[0][:-1], [*CUT[0], CUT[0][-1]], [b"x"] * len(CUT[0])])
async def test_copies_that_are_not_those_of_a_payload_are_refused(copies: list[bytes]) -> None:
    check = check_of(0.0)
    assert (await check.copy(0, messages(copies))).refusal
    assert await counting(check, [1, 2, 3]) == ""
    assert (await check.copy(1, messages(CUT[1]))).refusal, "a member sends copies once"


async def test_who_holds_back_what_the_other_one_has_not_begins_anew() -> None:
    reducers = StageReducers(LAYOUT)
    reducers.since = 7
    check = PartCheck(PLAN, OWN, GROUP, reducers, asyncio.Lock(), OWNERS[OWN].sign, 60.0, UNLIMITED)
    for sender in range(4):
        await check.copy(sender, messages(CUT[sender]))
    reply = await check.count(CountRequest(group_id=GROUP, senders=mask_of(range(4), 4), since=6))
    assert (reply.since, reducers.since) == (7, 0)


async def test_own_copies_go_to_the_own_check_without_a_call() -> None:
    check = check_of(0.0)

    def stub_of(peer: PeerID) -> object:
        raise OSError("no network")

    await check.send_copies(cut_payload(LAYOUT, payload_of(OWN), PLAN.all_parts), stub_of)
    async with asyncio.timeout(60):
        assert await counting(check, [0, 2, 3], [0, 2]) == "too few members have sent all parts to both"


def test_turns_follow_the_rounds() -> None:
    def checkers(round_number: int) -> tuple[int | None, ...]:
        group = tuple(
            sorted((each.payload(SPEC, 0, round_number) for each in OWNERS), key=lambda each: each.owner)
        )
        lines = tuple(MemberLine(0, 0, True) for _ in group)
        return PartPlan.of_group(LAYOUT, ExchangeGroup("g", group, 1.0, lines)).checkers

    assert checkers(1) == checkers(CHECK_ROUNDS - 1) == (1, 2, 3, 0)
    assert checkers(CHECK_ROUNDS) == (2, 3, 0, 1)
