"""Translation between the wire messages (protocol/pb) and the frozen records (protocol/types).

Every ``*_from_pb`` treats its message as written by a stranger: it checks lengths, counts, enum names, ranges
and finiteness before it builds the record, and raises a HetnodeError, nothing else: BAD_REQUEST, or for the
parts of a frame FRAME_CORRUPT. Signatures are not checked here (see protocol.trust.envelope).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.types import (
    Capacity,
    Decision,
    Dialer,
    DType,
    Estimates,
    ExchangeGroup,
    FrameId,
    FrameKind,
    Link,
    LinkEstimate,
    ManifestEntry,
    Member,
    Part,
    PayloadDescriptor,
    PeerId,
    PeerRecord,
    Plan,
    Rejection,
    Replica,
    ReservedAssignment,
    Role,
    StageRange,
    StateRecord,
    TensorHeader,
)
from protocol.wire.framing import MAX_TENSORS

MAX_NAME = 128
"""Longest identifier: run, codec, device, digest, tensor name."""
MAX_SENTENCE = 1000
MAX_STAGES = 512
MAX_REPLICAS = 10_000
MAX_BANNED = 10_000
MAX_FOLLOWERS = 100_000
MAX_HOLDERS = 10_000
MAX_SECONDS = 1e7
MAX_DIMENSIONS = 4
MAX_WEIGHT = 1e6
MAX_MICROBATCHES = 2**20
MAX_ESTIMATES = 64
MAX_MEASURED = 1e21
LEAST_SECONDS, MAX_MEASURED_SECONDS = 1e-9, 1e6

P = ParamSpec("P")
T = TypeVar("T")


def _refusing(code: ErrorCode) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Turns the ValueError of a failed check into the HetnodeError that a peer is shown."""

    def decorate(convert: Callable[P, T]) -> Callable[P, T]:
        @wraps(convert)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return convert(*args, **kwargs)
            except ValueError as error:
                raise HetnodeError(
                    code,
                    f"A message from another peer is not valid: {str(error)[:200]}.",
                    "Run the same version of hetnode on every peer; if they already do, that peer is faulty.",
                ) from None

        return checked

    return decorate


_request = _refusing(ErrorCode.BAD_REQUEST)
_frame_part = _refusing(ErrorCode.FRAME_CORRUPT)


def _cut(sentence: str) -> str:
    """No longer than its receiver takes it."""
    return sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[: MAX_SENTENCE - 4]} ..."


def text(value: str, what: str, limit: int = MAX_NAME, empty: bool = False) -> str:
    """`value`, if it is printable and at most `limit` characters long; ValueError otherwise."""
    if len(value) > limit:
        raise ValueError(f"{what} has {len(value)} characters, more than {limit}")
    if not value and not empty:
        raise ValueError(f"{what} is empty")
    if not value.isprintable():
        raise ValueError(f"{what} holds characters that cannot be printed")
    return value


def _count(values: Sequence[object], what: str, limit: int, least: int = 0) -> None:
    if not least <= len(values) <= limit:
        raise ValueError(f"{len(values)} {what}, expected {least} to {limit}")


def _peer(value: str) -> PeerId:
    return PeerId(text(value, "the peer id", 64))


def _digest(value: str, what: str) -> str:
    if len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"{what} is not a sha-256 in lower-case hex")
    return value


def _endpoint(value: str) -> str:
    if not value:
        return value
    host, _, port = text(value, "the endpoint", 261).rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"the endpoint {value!r} is not host:port")
    return value


@_request
def name_from_pb(value: str, what: str) -> str:
    """`value` as a printable name of at most MAX_NAME characters; `what` names it in the error."""
    return text(value, what)


@_request
def sentence_from_pb(value: str, what: str) -> str:
    """`value` as a printable sentence for people, or ""."""
    return text(value, what, MAX_SENTENCE, empty=True)


@_request
def peer_from_pb(value: str) -> PeerId:
    """A name that may be a peer id; protocol.trust.envelope.public_key_of tells whether it is."""
    return _peer(value)


@_request
def endpoint_from_pb(value: str) -> str:
    """``host:port``, or "" for a peer that accepts no links."""
    return _endpoint(value)


@_request
def role_from_pb(value: str) -> Role:
    return Role(value)


@_request
def banned_from_pb(values: Sequence[str]) -> frozenset[PeerId]:
    _count(values, "banned peers", MAX_BANNED)
    return frozenset(map(_peer, values))


def stage_range_to_pb(stages: StageRange) -> pb.StageRange:
    return pb.StageRange(first=stages.first, stop=stages.stop)


@_request
def stage_range_from_pb(message: pb.StageRange) -> StageRange:
    if message.stop > MAX_STAGES:
        raise ValueError(f"stage range up to {message.stop}, more than {MAX_STAGES} stages")
    return StageRange(message.first, message.stop)


def capacity_to_pb(capacity: Capacity) -> pb.Capacity:
    return pb.Capacity(
        device=capacity.device,
        memory_bytes=capacity.memory_bytes,
        threads=capacity.threads,
        flops=_rate(capacity.flops),
        uplink=_rate(capacity.uplink),
        downlink=_rate(capacity.downlink),
        round_trip=_seconds(capacity.round_trip),
    )


@_request
def capacity_from_pb(message: pb.Capacity) -> Capacity:
    if message.memory_bytes >= 2**63:
        raise ValueError(f"a memory of {message.memory_bytes} bytes")
    return Capacity(
        text(message.device, "the device", empty=True),
        message.memory_bytes,
        message.threads,
        flops=_measured(message.flops, "flops"),
        uplink=_measured(message.uplink, "the uplink"),
        downlink=_measured(message.downlink, "the downlink"),
        round_trip=_duration(message.round_trip, "the round trip"),
    )


def estimates_to_pb(estimates: Estimates) -> pb.Estimates:
    return pb.Estimates(
        capacity=capacity_to_pb(estimates.capacity),
        microbatch_seconds=_seconds(estimates.microbatch_seconds),
        links=[
            pb.LinkEstimate(
                peer=link.peer,
                round_trip=_seconds(link.round_trip),
                bandwidth=_rate(link.bandwidth),
                incoming=_rate(link.incoming),
            )
            for link in estimates.links
        ],
    )


@_request
def estimates_from_pb(message: pb.Estimates) -> Estimates:
    """What a peer has measured; each other peer is named once."""
    _count(message.links, "link estimates", MAX_ESTIMATES)
    links = tuple(
        LinkEstimate(
            _peer(link.peer),
            _duration(link.round_trip, "a round trip"),
            _measured(link.bandwidth, "a bandwidth"),
            _measured(link.incoming, "an incoming bandwidth"),
        )
        for link in message.links
    )
    if len({link.peer for link in links}) != len(links):
        raise ValueError("a peer is estimated twice")
    seconds = _duration(message.microbatch_seconds, "the seconds of a microbatch")
    return Estimates(capacity_from_pb(message.capacity), seconds, links)


def _measured(value: float, name: str) -> float:
    if value != _rate(value):
        raise ValueError(f"{name} of {value} per second")
    return value


def _duration(value: float, name: str) -> float:
    if value != _seconds(value):
        raise ValueError(f"{name} of {value} s")
    return value


def _rate(value: float) -> float:
    """Bytes or operations per second; 0, not measured, for what nothing that takes part can have."""
    return value if 1 <= value <= MAX_MEASURED else 0.0


def _seconds(value: float) -> float:
    return value if LEAST_SECONDS <= value <= MAX_MEASURED_SECONDS else 0.0


def peer_record_to_pb(record: PeerRecord) -> pb.PeerRecord:
    return pb.PeerRecord(
        peer=record.peer,
        protocol_version=record.protocol_version,
        role=record.role.value,
        capacity=capacity_to_pb(record.capacity),
        endpoint=record.endpoint,
        stages=None if record.stages is None else stage_range_to_pb(record.stages),
    )


@_request
def peer_record_from_pb(message: pb.PeerRecord) -> PeerRecord:
    return PeerRecord(
        peer=_peer(message.peer),
        protocol_version=message.protocol_version,
        role=Role(message.role),
        capacity=capacity_from_pb(message.capacity),
        endpoint=_endpoint(message.endpoint),
        stages=stage_range_from_pb(message.stages) if message.HasField("stages") else None,
    )


def member_to_pb(member: Member) -> pb.Member:
    return pb.Member(peer=member.peer, stages=stage_range_to_pb(member.stages), endpoint=member.endpoint)


@_request
def member_from_pb(message: pb.Member) -> Member:
    return Member(_peer(message.peer), stage_range_from_pb(message.stages), _endpoint(message.endpoint))


def link_to_pb(link: Link) -> pb.Link:
    return pb.Link(k=link.k, dialer=link.dialer.value)


@_request
def link_from_pb(message: pb.Link) -> Link:
    if message.k > 2**15:
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


@_request
def replica_from_pb(message: pb.Replica) -> Replica:
    """A replica whose members cover contiguous stages from 0 on, with one link between neighbours."""
    _count(message.members, "members of a replica", MAX_STAGES, least=1)
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


@_request
def places_from_pb(messages: Sequence[pb.Place]) -> tuple[ReservedAssignment, ...]:
    """Places kept for peers, each named once."""
    _count(messages, "places of followers", MAX_FOLLOWERS)
    places = tuple(
        ReservedAssignment(_peer(each.peer), each.replica, each.position, stage_range_from_pb(each.stages))
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
        reason=_cut(plan.reason),
    )


@_request
def plan_from_pb(message: pb.Plan) -> Plan:
    """A plan that names each peer and each replica once, and whose replicas cover the same stages."""
    _count(message.replicas, "replicas in a plan", MAX_REPLICAS, least=1)
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
    reason = text(message.reason, "the reason", MAX_SENTENCE, empty=True)
    return Plan(message.epoch, message.from_round, message.first_sample, replicas, reason)


def descriptor_to_pb(descriptor: PayloadDescriptor) -> pb.PayloadDescriptor:
    return pb.PayloadDescriptor(
        run=descriptor.run,
        stage=descriptor.stage,
        round=descriptor.round_number,
        owner=descriptor.owner,
        anchor_digest=descriptor.anchor_digest,
        codec=descriptor.codec,
        weight=descriptor.weight,
        nbytes=descriptor.nbytes,
        sha256=descriptor.sha256,
        signature=descriptor.signature,
    )


@_request
def descriptor_from_pb(message: pb.PayloadDescriptor) -> PayloadDescriptor:
    """A descriptor with a finite, positive weight. Its signature is not verified here."""
    if message.stage >= MAX_STAGES:
        raise ValueError(f"a payload of stage {message.stage}")
    if not (math.isfinite(message.weight) and message.weight > 0):
        raise ValueError(f"a payload of weight {message.weight}")
    if message.nbytes >= 2**63:
        raise ValueError(f"a payload of {message.nbytes} bytes")
    if len(message.signature) > 64:
        raise ValueError(f"a signature of {len(message.signature)} bytes")
    return PayloadDescriptor(
        run=text(message.run, "the run"),
        stage=message.stage,
        round_number=message.round,
        owner=_peer(message.owner),
        anchor_digest=text(message.anchor_digest, "the anchor digest"),
        codec=text(message.codec, "the codec"),
        weight=message.weight,
        nbytes=message.nbytes,
        sha256=_digest(message.sha256, "the payload's hash"),
        signature=message.signature,
    )


@_request
def descriptors_from_pb(messages: Sequence[pb.PayloadDescriptor]) -> tuple[PayloadDescriptor, ...]:
    """Descriptors of one list, at most one of each owner."""
    _count(messages, "payloads", MAX_REPLICAS)
    descriptors = tuple(map(descriptor_from_pb, messages))
    if len({descriptor.owner for descriptor in descriptors}) != len(descriptors):
        raise ValueError("two payloads of one owner")
    return descriptors


def rejection_to_pb(rejection: Rejection) -> pb.Rejection:
    return pb.Rejection(descriptor=descriptor_to_pb(rejection.descriptor), reason=_cut(rejection.reason))


@_request
def rejections_from_pb(messages: Sequence[pb.Rejection]) -> tuple[Rejection, ...]:
    """Rejections of one list, at most one of each owner."""
    descriptors = descriptors_from_pb([message.descriptor for message in messages])
    return tuple(
        Rejection(descriptor, text(message.reason, "the reason", MAX_SENTENCE))
        for descriptor, message in zip(descriptors, messages, strict=True)
    )


def _check_canonical(descriptors: Sequence[PayloadDescriptor]) -> None:
    """All of one (stage, round), in ascending order of their owners."""
    owners = [descriptor.owner for descriptor in descriptors]
    if owners != sorted(owners):
        raise ValueError("payloads out of canonical order")
    if len({(descriptor.stage, descriptor.round_number) for descriptor in descriptors}) > 1:
        raise ValueError("payloads of different stages or rounds")


def group_to_pb(group: ExchangeGroup) -> pb.MatchReply:
    return pb.MatchReply(
        group_id=group.group_id,
        descriptors=map(descriptor_to_pb, group.descriptors),
        seconds=group.seconds,
    )


@_request
def group_from_pb(message: pb.MatchReply) -> ExchangeGroup:
    descriptors = descriptors_from_pb(message.descriptors)
    _check_canonical(descriptors)
    if not 0 <= message.seconds <= MAX_SECONDS:
        raise ValueError(f"a group that has {message.seconds} s to gather its payloads")
    return ExchangeGroup(text(message.group_id, "the group id"), descriptors, message.seconds)


@_request
def part_from_pb(value: str) -> Part:
    return Part(value)


def state_to_pb(record: StateRecord) -> pb.StateRecord:
    return pb.StateRecord(
        run=record.run,
        stage=record.stage,
        part=record.part.value,
        round=record.round_number,
        digest=record.digest,
        holders=record.holders,
    )


@_request
def state_from_pb(message: pb.StateRecord) -> StateRecord:
    _count(message.holders, "holders of a checkpoint", MAX_HOLDERS)
    if message.stage >= MAX_STAGES:
        raise ValueError(f"a checkpoint of stage {message.stage}")
    return StateRecord(
        text(message.run, "the run"),
        message.stage,
        Part(message.part),
        message.round,
        _digest(message.digest, "the digest of an anchor"),
        tuple(map(_peer, message.holders)),
    )


def decision_to_pb(decision: Decision) -> pb.DecisionReply:
    return pb.DecisionReply(
        stage=decision.stage,
        round=decision.round_number,
        committed=decision.committed,
        entries=[
            pb.ManifestEntry(descriptor=descriptor_to_pb(entry.descriptor), holders=entry.holders)
            for entry in decision.entries
        ],
        next_epoch=decision.next_epoch,
        reason=_cut(decision.reason),
    )


@_request
def decision_from_pb(message: pb.DecisionReply) -> Decision:
    """A commit of at least one payload, in canonical order and each with a holder; or an abort of none."""
    _count(message.entries, "payloads in a decision", MAX_REPLICAS)
    if message.committed != bool(message.entries):
        raise ValueError(f"committed is {message.committed} with {len(message.entries)} payloads")
    descriptors = descriptors_from_pb([entry.descriptor for entry in message.entries])
    _check_canonical(descriptors)
    if any((d.stage, d.round_number) != (message.stage, message.round) for d in descriptors):
        raise ValueError("a decision over payloads of another stage or round")
    entries = []
    for descriptor, entry in zip(descriptors, message.entries, strict=True):
        _count(entry.holders, "holders of a payload", MAX_REPLICAS, least=1)
        entries.append(ManifestEntry(descriptor, tuple(map(_peer, entry.holders))))
    if message.stage >= MAX_STAGES:
        raise ValueError(f"a decision of stage {message.stage}")
    return Decision(
        stage=message.stage,
        round_number=message.round,
        committed=message.committed,
        entries=tuple(entries),
        next_epoch=message.next_epoch,
        reason=text(message.reason, "the reason", MAX_SENTENCE, empty=True),
    )


def frame_id_to_pb(id: FrameId) -> pb.FrameId:
    return pb.FrameId(
        epoch=id.epoch,
        round=id.round_number,
        step=id.step,
        microbatch=id.microbatch,
        attempt=id.attempt,
        kind=id.kind.value,
    )


@_frame_part
def frame_id_from_pb(message: pb.FrameId) -> FrameId:
    return FrameId(
        epoch=message.epoch,
        round_number=message.round,
        step=message.step,
        microbatch=message.microbatch,
        attempt=message.attempt,
        kind=FrameKind(message.kind),
    )


def tensor_header_to_pb(header: TensorHeader) -> pb.TensorHeader:
    return pb.TensorHeader(name=header.name, dtype=header.dtype.value, shape=header.shape)


@_frame_part
def tensor_header_from_pb(message: pb.TensorHeader) -> TensorHeader:
    """A tensor of at most 4 dimensions of at least 1 each; () is a scalar."""
    _count(message.shape, "dimensions", MAX_DIMENSIONS)
    if any(not 1 <= n < 2**31 for n in message.shape):
        raise ValueError(f"a tensor of shape {tuple(message.shape)}")
    return TensorHeader(text(message.name, "the tensor's name"), DType(message.dtype), tuple(message.shape))


def frame_header_to_pb(id: FrameId, tensors: Sequence[TensorHeader]) -> pb.FrameHeader:
    return pb.FrameHeader(
        id=frame_id_to_pb(id),
        tensors=map(tensor_header_to_pb, tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
    )


@_frame_part
def frame_header_from_pb(message: pb.FrameHeader) -> tuple[FrameId, tuple[TensorHeader, ...], int]:
    """The arguments of protocol.wire.framing.FrameAssembler.header, which checks the sum and the size."""
    _count(message.tensors, "tensors in a frame", MAX_TENSORS)
    return frame_id_from_pb(message.id), tuple(map(tensor_header_from_pb, message.tensors)), message.nbytes
