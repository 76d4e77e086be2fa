"""Peer records, replicas and plans, to and from protobuf."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.pb import hetnode_pb2 as pb
from protocol.types import (
    Link,
    Member,
    PeerRecord,
    Plan,
    Replica,
    ReservedAssignment,
    StageRange,
)
from protocol.wire.convert.fields import (
    ENDPOINT,
    INT64,
    LEAST_POSITIVE,
    MAX_REPLICAS,
    MAX_STAGES,
    SENTENCE,
    Field,
    between,
    raises_bad_request,
    several,
)
from protocol.wire.convert.measurements import CAPACITY
from protocol.wire.convert.record import Record

MAX_RESERVED = 100_000
"""Reserved assignments in one update."""
MAX_WEIGHT = 1e6
MAX_MICROBATCHES = 2**20
MAX_K = 2**15
_FROM_1 = between(1, 2**32 - 1)

# StageRange itself refuses an empty range.
STAGE_RANGE = Record(StageRange, pb.StageRange, {"stop": between(0, MAX_STAGES)})

PEER_RECORD = Record(
    PeerRecord,
    pb.PeerRecord,
    {
        "capacity": CAPACITY,
        "endpoint": ENDPOINT,
        "stages": Field(STAGE_RANGE.read, STAGE_RANGE.write, optional=True),
    },
)

MEMBER = Record(Member, pb.Member, {"stages": STAGE_RANGE, "endpoint": ENDPOINT})

LINK = Record(Link, pb.Link, {"k": between(0, MAX_K)})

_RESERVED_ASSIGNMENT = Record(ReservedAssignment, pb.Place, {"stages": STAGE_RANGE})


def _check_replica(replica: Replica) -> None:
    """The members cover contiguous stages from 0 on, with one link between neighbours."""
    members = replica.members
    if len(replica.links) != len(members) - 1:
        raise ValueError(f"{len(replica.links)} links between {len(members)} members")
    stops = (0, *(member.stages.stop for member in members))
    if any(member.stages.first != stop for member, stop in zip(members, stops, strict=False)):
        raise ValueError(f"the members of replica {replica.index} do not cover contiguous stages from 0 on")


REPLICA = Record(
    Replica,
    pb.Replica,
    {
        "members": several(MEMBER, MAX_STAGES, least=1),
        "links": several(LINK, MAX_STAGES),
        "weight": between(LEAST_POSITIVE, MAX_WEIGHT),
        "microbatches": between(0, MAX_MICROBATCHES),
    },
    _check_replica,
)


def _check_plan(plan: Plan) -> None:
    """The plan names each peer once, and its replicas cover the same stages."""
    peers = [member.peer for replica in plan.replicas for member in replica.members]
    if len(set(peers)) != len(peers):
        raise ValueError("the plan names a peer twice")
    if len({replica.members[-1].stages.stop for replica in plan.replicas}) != 1:
        raise ValueError("the replicas of the plan cover different stages")


PLAN = Record(
    Plan,
    pb.Plan,
    {
        "epoch": _FROM_1,
        "from_round": _FROM_1,
        "first_sample": INT64,
        "replicas": several(REPLICA, MAX_REPLICAS, least=1, key="index"),
        "reason": SENTENCE,
    },
    _check_plan,
)

peer_record_to_pb, peer_record_from_pb = PEER_RECORD.to_pb, PEER_RECORD.from_pb
plan_to_pb, plan_from_pb = PLAN.to_pb, PLAN.from_pb
place_to_pb = _RESERVED_ASSIGNMENT.to_pb


@raises_bad_request
def places_from_pb(messages: Sequence[pb.Place]) -> tuple[ReservedAssignment, ...]:
    """Assignments reserved for peers, at most one of each peer."""
    return several(_RESERVED_ASSIGNMENT, MAX_RESERVED, key="peer").read(messages)
