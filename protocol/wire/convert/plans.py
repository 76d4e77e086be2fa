"""Peer records, replicas and plans, to and from protobuf."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.pb import hetnode_pb2 as pb
from protocol.types import (
    Dialer,
    Link,
    Member,
    PeerRecord,
    Plan,
    Replica,
    ReservedAssignment,
    Role,
    StageRange,
)
from protocol.wire.convert.fields import (
    MAX_REPLICAS,
    MAX_SENTENCE,
    MAX_STAGES,
    check_count,
    host_and_port,
    peer_id,
    printable,
    raises_bad_request,
    shortened,
)
from protocol.wire.convert.measurements import capacity_from_pb, capacity_to_pb

MAX_RESERVED = 100_000
"""Reserved assignments in one update."""
MAX_WEIGHT = 1e6
MAX_MICROBATCHES = 2**20
MAX_K = 2**15


def stage_range_to_pb(stages: StageRange) -> pb.StageRange:
    return pb.StageRange(first=stages.first, stop=stages.stop)


@raises_bad_request
def stage_range_from_pb(message: pb.StageRange) -> StageRange:
    if message.stop > MAX_STAGES:
        raise ValueError(f"stage range up to {message.stop}, more than {MAX_STAGES} stages")
    return StageRange(message.first, message.stop)


def peer_record_to_pb(record: PeerRecord) -> pb.PeerRecord:
    return pb.PeerRecord(
        peer=record.peer,
        protocol_version=record.protocol_version,
        role=record.role.value,
        capacity=capacity_to_pb(record.capacity),
        endpoint=record.endpoint,
        stages=None if record.stages is None else stage_range_to_pb(record.stages),
    )


@raises_bad_request
def peer_record_from_pb(message: pb.PeerRecord) -> PeerRecord:
    return PeerRecord(
        peer=peer_id(message.peer),
        protocol_version=message.protocol_version,
        role=Role(message.role),
        capacity=capacity_from_pb(message.capacity),
        endpoint=host_and_port(message.endpoint),
        stages=stage_range_from_pb(message.stages) if message.HasField("stages") else None,
    )


def member_to_pb(member: Member) -> pb.Member:
    return pb.Member(peer=member.peer, stages=stage_range_to_pb(member.stages), endpoint=member.endpoint)


@raises_bad_request
def member_from_pb(message: pb.Member) -> Member:
    return Member(peer_id(message.peer), stage_range_from_pb(message.stages), host_and_port(message.endpoint))


def link_to_pb(link: Link) -> pb.Link:
    return pb.Link(k=link.k, dialer=link.dialer.value)


@raises_bad_request
def link_from_pb(message: pb.Link) -> Link:
    if message.k > MAX_K:
        raise ValueError(f"a link of k {message.k}")
    return Link(message.k, Dialer(message.dialer))


def replica_to_pb(replica: Replica) -> pb.Replica:
    return pb.Replica(
        index=replica.index,
        members=[member_to_pb(member) for member in replica.members],
        links=[link_to_pb(link) for link in replica.links],
        weight=replica.weight,
        microbatches=replica.microbatches,
    )


@raises_bad_request
def replica_from_pb(message: pb.Replica) -> Replica:
    """A replica whose members cover contiguous stages from 0 on, with one link between neighbours."""
    check_count(message.members, "members of a replica", MAX_STAGES, least=1)
    members = tuple(map(member_from_pb, message.members))
    if len(message.links) != len(members) - 1:
        raise ValueError(f"{len(message.links)} links between {len(members)} members")
    stops = (0, *(member.stages.stop for member in members))
    if any(member.stages.first != stop for member, stop in zip(members, stops, strict=False)):
        raise ValueError(f"the members of replica {message.index} do not cover contiguous stages from 0 on")
    if not 0 < message.weight <= MAX_WEIGHT:
        raise ValueError(f"a replica of weight {message.weight}, not above 0 and at most {MAX_WEIGHT:g}")
    if message.microbatches > MAX_MICROBATCHES:
        raise ValueError(f"a replica with {message.microbatches} microbatches in a step")
    links = tuple(map(link_from_pb, message.links))
    return Replica(message.index, members, links, message.weight, message.microbatches)


def place_to_pb(place: ReservedAssignment) -> pb.Place:
    return pb.Place(
        peer=place.peer,
        replica=place.replica,
        position=place.position,
        stages=stage_range_to_pb(place.stages),
    )


@raises_bad_request
def places_from_pb(messages: Sequence[pb.Place]) -> tuple[ReservedAssignment, ...]:
    """Places kept for peers, each named once."""
    check_count(messages, "places of followers", MAX_RESERVED)
    places = tuple(
        ReservedAssignment(peer_id(each.peer), each.replica, each.position, stage_range_from_pb(each.stages))
        for each in messages
    )
    if len({place.peer for place in places}) != len(places):
        raise ValueError("a follower is named twice")
    return places


def plan_to_pb(plan: Plan) -> pb.Plan:
    return pb.Plan(
        epoch=plan.epoch,
        from_round=plan.from_round,
        first_sample=plan.first_sample,
        replicas=[replica_to_pb(replica) for replica in plan.replicas],
        reason=shortened(plan.reason),
    )


@raises_bad_request
def plan_from_pb(message: pb.Plan) -> Plan:
    """A plan that names each peer and each replica once, and whose replicas cover the same stages."""
    check_count(message.replicas, "replicas in a plan", MAX_REPLICAS, least=1)
    replicas = tuple(map(replica_from_pb, message.replicas))
    peers = [member.peer for replica in replicas for member in replica.members]
    if len(set(peers)) != len(peers):
        raise ValueError("the plan names a peer twice")
    if len({replica.index for replica in replicas}) != len(replicas):
        raise ValueError("the plan names a replica twice")
    if len({replica.members[-1].stages.stop for replica in replicas}) != 1:
        raise ValueError("the replicas of the plan cover different stages")
    if message.epoch < 1 or message.from_round < 1 or message.first_sample >= 2**63:
        raise ValueError(
            f"a plan of epoch {message.epoch} from round {message.from_round}, sample {message.first_sample}"
        )
    reason = printable(message.reason, "the reason", MAX_SENTENCE, empty=True)
    return Plan(message.epoch, message.from_round, message.first_sample, replicas, reason)
