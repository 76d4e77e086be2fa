"""What a round exchanges, to and from protobuf: descriptors, groups, decisions, checkpoint records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from protocol.pb import hetnode_pb2 as pb
from protocol.types import (
    Decision,
    ExchangeGroup,
    ManifestEntry,
    Part,
    PayloadDescriptor,
    Rejection,
    StateRecord,
)
from protocol.wire.convert.fields import (
    MAX_REPLICAS,
    MAX_SENTENCE,
    MAX_STAGES,
    check_count,
    peer_id,
    printable,
    raises_bad_request,
    sha256_hex,
    shortened,
)

MAX_HOLDERS = 10_000
MAX_GATHER_SECONDS = 1e7


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


@raises_bad_request
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
        run=printable(message.run, "the run"),
        stage=message.stage,
        round_number=message.round,
        owner=peer_id(message.owner),
        anchor_digest=printable(message.anchor_digest, "the anchor digest"),
        codec=printable(message.codec, "the codec"),
        weight=message.weight,
        nbytes=message.nbytes,
        sha256=sha256_hex(message.sha256, "the payload's hash"),
        signature=message.signature,
    )


@raises_bad_request
def descriptors_from_pb(messages: Sequence[pb.PayloadDescriptor]) -> tuple[PayloadDescriptor, ...]:
    """Descriptors of one list, at most one of each owner."""
    check_count(messages, "payloads", MAX_REPLICAS)
    descriptors = tuple(map(descriptor_from_pb, messages))
    if len({descriptor.owner for descriptor in descriptors}) != len(descriptors):
        raise ValueError("two payloads of one owner")
    return descriptors


def rejection_to_pb(rejection: Rejection) -> pb.Rejection:
    return pb.Rejection(descriptor=descriptor_to_pb(rejection.descriptor), reason=shortened(rejection.reason))


@raises_bad_request
def rejections_from_pb(messages: Sequence[pb.Rejection]) -> tuple[Rejection, ...]:
    """Rejections of one list, at most one of each owner."""
    descriptors = descriptors_from_pb([message.descriptor for message in messages])
    return tuple(
        Rejection(descriptor, printable(message.reason, "the reason", MAX_SENTENCE))
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


@raises_bad_request
def group_from_pb(message: pb.MatchReply) -> ExchangeGroup:
    descriptors = descriptors_from_pb(message.descriptors)
    _check_canonical(descriptors)
    if not 0 <= message.seconds <= MAX_GATHER_SECONDS:
        raise ValueError(f"a group that has {message.seconds} s to gather its payloads")
    return ExchangeGroup(printable(message.group_id, "the group id"), descriptors, message.seconds)


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
        reason=shortened(decision.reason),
    )


@raises_bad_request
def decision_from_pb(message: pb.DecisionReply) -> Decision:
    """A commit of at least one payload, in canonical order and each with a holder; or an abort of none."""
    check_count(message.entries, "payloads in a decision", MAX_REPLICAS)
    if message.committed != bool(message.entries):
        raise ValueError(f"committed is {message.committed} with {len(message.entries)} payloads")
    descriptors = descriptors_from_pb([entry.descriptor for entry in message.entries])
    _check_canonical(descriptors)
    if any((d.stage, d.round_number) != (message.stage, message.round) for d in descriptors):
        raise ValueError("a decision over payloads of another stage or round")
    entries = []
    for descriptor, entry in zip(descriptors, message.entries, strict=True):
        check_count(entry.holders, "holders of a payload", MAX_REPLICAS, least=1)
        entries.append(ManifestEntry(descriptor, tuple(map(peer_id, entry.holders))))
    if message.stage >= MAX_STAGES:
        raise ValueError(f"a decision of stage {message.stage}")
    return Decision(
        stage=message.stage,
        round_number=message.round,
        committed=message.committed,
        entries=tuple(entries),
        next_epoch=message.next_epoch,
        reason=printable(message.reason, "the reason", MAX_SENTENCE, empty=True),
    )


def state_to_pb(record: StateRecord) -> pb.StateRecord:
    return pb.StateRecord(
        run=record.run,
        stage=record.stage,
        part=record.part.value,
        round=record.round_number,
        digest=record.digest,
        holders=record.holders,
    )


@raises_bad_request
def state_from_pb(message: pb.StateRecord) -> StateRecord:
    check_count(message.holders, "holders of a checkpoint", MAX_HOLDERS)
    if message.stage >= MAX_STAGES:
        raise ValueError(f"a checkpoint of stage {message.stage}")
    return StateRecord(
        printable(message.run, "the run"),
        message.stage,
        Part(message.part),
        message.round,
        sha256_hex(message.digest, "the digest of an anchor"),
        tuple(map(peer_id, message.holders)),
    )
