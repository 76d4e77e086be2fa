"""What a plan is made from and of: capacities, estimates, peer records, replicas; to and from protobuf."""

from __future__ import annotations

from protocol.group.peers import MemberSource, PeerRecord
from protocol.pb import hetnode_pb2 as pb
from protocol.spec.change import CHANGEABLE, MOST_CHANGES
from protocol.spec.run import MOST_MICROBATCHES
from protocol.trust.reachability import Addresses, Reached
from protocol.trust.term import Succession
from protocol.types import (
    Capacity,
    Estimates,
    Link,
    LinkEstimate,
    Member,
    Pause,
    Plan,
    Reachability,
    RelayAddress,
    Replica,
    ReservedAssignment,
    Rollback,
    RunChange,
    StageRange,
)
from protocol.wire.convert.fields import (
    AS_SENT,
    DIALABLE,
    ENDPOINT,
    INT64,
    LEAST_POSITIVE,
    MAX_RELAYS,
    MAX_REPLICAS,
    MAX_STAGES,
    NAME,
    SENTENCE,
    SETTING,
    SOURCE,
    Field,
    Record,
    between,
    printable,
    several,
)

MAX_ESTIMATES = 64
"""Links that one peer reports."""
MAX_RESERVED = 100_000
"""Reserved assignments in one update."""
MAX_SOURCES = 100_000
"""Sources of members in one update."""
MAX_WEIGHT = 1e6
MAX_K = 2**15
_FROM_1 = between(1, 2**32 - 1)


def _measured(least: float, most: float) -> Field[float]:
    """A number from `least` to `most`, or 0 for not measured. Any other number, NaN too, is sent as 0."""

    def write(value: float) -> float:
        return value if least <= value <= most else 0.0

    def read(value: float) -> float:
        if value != write(value):
            raise ValueError(f"{value} is neither 0 nor within {least:g} and {most:g}")
        return value

    return Field(read, write)


_RATE = _measured(1, 1e21)
"""Bytes or operations per second. The bounds keep the cost model's sums and quotients finite."""
_SECONDS = _measured(1e-9, 1e6)

_ROLLBACK = Record(Rollback, pb.Rollback, {})

PAUSE = Record(Pause, pb.Pause, {"from_round": _FROM_1, "reason": SENTENCE})

CAPACITY = Record(
    Capacity,
    pb.Capacity,
    {
        "device": Field(lambda device: printable(device, empty=True)),
        "memory_bytes": INT64,
        "main_bytes": INT64,
        "flops": _RATE,
        "uplink": _RATE,
        "downlink": _RATE,
        "round_trip": _SECONDS,
    },
)

_LINK_ESTIMATE = Record(
    LinkEstimate, pb.LinkEstimate, {"round_trip": _SECONDS, "bandwidth": _RATE, "incoming": _RATE}
)

ESTIMATES = Record(
    Estimates,
    pb.Estimates,
    {
        "capacity": CAPACITY,
        "microbatch_seconds": _SECONDS,
        "links": several(_LINK_ESTIMATE, MAX_ESTIMATES, key="peer"),
    },
)

# StageRange itself refuses an empty range.
STAGE_RANGE = Record(StageRange, pb.StageRange, {"stop": between(0, MAX_STAGES)})

PEER_RECORD = Record(
    PeerRecord,
    pb.PeerRecord,
    {
        "capacity": CAPACITY,
        "endpoint": DIALABLE,
        "dht": DIALABLE,
        "stages": Field(STAGE_RANGE.read, STAGE_RANGE.write, optional=True),
    },
)

MEMBER = Record(Member, pb.Member, {"stages": STAGE_RANGE, "endpoint": ENDPOINT})

LINK = Record(Link, pb.Link, {"k": between(0, MAX_K)})

_MEMBER_SOURCE = Record(MemberSource, pb.MemberSource, {"source": SOURCE})

_MOST_OTHERS = 4
_SUCCESSION = Record(
    Succession,
    pb.Succession,
    {"term": AS_SENT, "others": several(ENDPOINT, _MOST_OTHERS), "dht_peers": several(NAME, _MOST_OTHERS)},
)

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
        "microbatches": between(0, MOST_MICROBATCHES),
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
    if plan.repairs >= plan.epoch:
        raise ValueError(f"plan {plan.epoch} repairs plan {plan.repairs}, which is not an earlier one")


_RUN_CHANGE = Record(
    RunChange,
    pb.RunChange,
    {
        "from_round": _FROM_1,
        "settings": several(SETTING, len(CHANGEABLE), least=1),
        "reason": SENTENCE,
        "first_sample": INT64,
    },
)

PLAN = Record(
    Plan,
    pb.Plan,
    {
        "epoch": _FROM_1,
        "from_round": _FROM_1,
        "first_sample": INT64,
        "replicas": several(REPLICA, MAX_REPLICAS, least=1, key="index"),
        "reason": SENTENCE,
        "changes": several(_RUN_CHANGE, MOST_CHANGES),
    },
    _check_plan,
)

_RELAY = Record(RelayAddress, pb.RelayAddress, {"endpoint": ENDPOINT})

_ADDRESSES = Record(Addresses, pb.Addresses, {"endpoint": ENDPOINT, "dht": ENDPOINT})
_REACHED = Record(
    Reached, pb.Reached, {name: SENTENCE for name in ("reason", "endpoint_problem", "dht_problem")}
)

addresses_to_pb, addresses_from_pb = _ADDRESSES.to_pb, _ADDRESSES.from_pb
reached_to_pb, reached_from_pb = _REACHED.to_pb, _REACHED.from_pb
capacity_to_pb, capacity_from_pb = CAPACITY.to_pb, CAPACITY.from_pb
estimates_to_pb, estimates_from_pb = ESTIMATES.to_pb, ESTIMATES.from_pb
peer_record_to_pb, peer_record_from_pb = PEER_RECORD.to_pb, PEER_RECORD.from_pb
plan_to_pb, plan_from_pb = PLAN.to_pb, PLAN.from_pb
rollback_to_pb, rollback_from_pb = _ROLLBACK.to_pb, _ROLLBACK.from_pb
pause_to_pb, pause_from_pb = PAUSE.to_pb, PAUSE.from_pb
place_to_pb = _RESERVED_ASSIGNMENT.to_pb
relay_to_pb = _RELAY.to_pb
relays_from_pb = several(_RELAY, MAX_RELAYS, key="peer").from_pb
source_to_pb = _MEMBER_SOURCE.to_pb
succession_to_pb, succession_from_pb = _SUCCESSION.to_pb, _SUCCESSION.from_pb
sources_from_pb = several(_MEMBER_SOURCE, MAX_SOURCES).from_pb
places_from_pb = several(_RESERVED_ASSIGNMENT, MAX_RESERVED, key="peer").from_pb


def answered(reply: pb.JoinReply | pb.UpdateAddressesReply, addresses: Addresses) -> Reached:
    """What answered at `addresses`; a coordinator that does not dial back believes them."""
    if reply.HasField("reached"):
        return reached_from_pb(reply.reached)
    has_any = addresses.endpoint or addresses.dht
    kind = Reachability.OPEN if has_any else Reachability.DIAL_ONLY
    return Reached(kind, bool(addresses.endpoint), bool(addresses.dht))
