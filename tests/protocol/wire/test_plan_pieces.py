"""A plan is told as its difference from the plan before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.types import Member, Plan, Replica, StageRange
from protocol.wire.convert.plans import plan_to_pb
from protocol.wire.plan_pieces import MOST_PLAN_BYTES, pieces_of, plan_from_pieces
from tests.builders import keyed

PEERS = [keyed(n).peer for n in range(8)]
REPLICAS = st.builds(
    lambda index, peer: Replica(index, (Member(PEERS[peer], StageRange(0, 4), "192.0.2.1:1"),), ()),
    st.integers(0, 5),
    st.integers(0, 7),
)
PLANS = st.builds(
    lambda epoch, replicas, reason: Plan(epoch, 1, 0, tuple(replicas), reason),
    st.integers(1, 300),
    st.lists(REPLICAS, max_size=12),
    st.text(max_size=5),
)


def data_of(plan: Plan) -> bytes:
    return plan_to_pb(plan).SerializeToString(deterministic=True)


def large(changed: int = -1) -> Plan:
    replicas = (
        Replica(n, (Member(keyed(n + 1000 * (n == changed)).peer, StageRange(0, 4), "192.0.2.1:1"),), ())
        for n in range(200)
    )
    return Plan(1, 1, 0, tuple(replicas), "all")


@given(PLANS, PLANS)
def test_pieces_give_the_very_bytes_that_were_signed(former: Plan, newer: Plan) -> None:
    pieces = pieces_of(data_of(former), data_of(newer))
    assert not pieces or plan_from_pieces(data_of(former), pieces) == data_of(newer)


@pytest.mark.parametrize("changed", [0, 77, 199])
def test_one_replica_of_many_costs_as_much_as_itself(changed: int) -> None:
    former, newer = data_of(large()), data_of(replace(large(changed), epoch=2, from_round=9))
    pieces = pieces_of(former, newer)
    assert plan_from_pieces(former, pieces) == newer
    assert sum(piece.ByteSize() for piece in pieces) < 200 < len(newer) / 50


def test_a_plan_of_other_peers_is_told_whole() -> None:
    newer = replace(
        large(), replicas=tuple(replace(each, index=each.index + 500) for each in large().replicas)
    )
    assert pieces_of(data_of(large()), data_of(newer)) == []
    assert pieces_of(b"", data_of(large())) == []


@pytest.mark.parametrize(
    "piece", [pb.PlanPiece(offset=5, length=6), pb.PlanPiece(offset=2**32 - 1, length=2**32 - 1)]
)
def test_pieces_outside_the_former_plan_are_refused(piece: pb.PlanPiece) -> None:
    with pytest.raises(HetnodeError) as refusal:
        plan_from_pieces(b"ten bytes.", [piece])
    assert refusal.value.code is ErrorCode.BAD_REQUEST


def test_many_copies_of_the_former_plan_are_refused_before_they_are_made() -> None:
    former = bytes(1 << 20)
    copies = [pb.PlanPiece(length=len(former))] * (MOST_PLAN_BYTES // len(former) + 1)
    with pytest.raises(HetnodeError, match="more than"):
        plan_from_pieces(former, copies)
