"""What a round exchanges, to and from protobuf: descriptors, groups, decisions, checkpoint records."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from protocol.pb import hetnode_pb2 as pb
from protocol.types import (
    CommittedResult,
    Decision,
    ExchangeGroup,
    ManifestEntry,
    MemberLine,
    PayloadDescriptor,
    Rejection,
    ResultClaim,
    StateRecord,
)
from protocol.wire.convert.fields import (
    INT64,
    LEAST_POSITIVE,
    MAX_REPLICAS,
    MAX_SENTENCE,
    PEER,
    SENTENCE,
    SHA256,
    STAGE,
    Field,
    Record,
    between,
    counted,
    printable,
    several,
    shortened,
)
from protocol.wire.decisions import FlatDecision, decision_of, flat

MAX_HOLDERS = 10_000
MAX_GATHER_SECONDS = 1e7
_SIGNATURE_BYTES = 64

DESCRIPTOR = Record(
    PayloadDescriptor,
    pb.PayloadDescriptor,
    {
        "stage": STAGE,
        # Finite and above 0: the mean of a round divides by the sum of weights.
        "weight": between(LEAST_POSITIVE, sys.float_info.max),
        "nbytes": INT64,
        "sha256": SHA256,
        "signature": Field(lambda signature: counted(signature, _SIGNATURE_BYTES)),
    },
)
_DESCRIPTORS = several(DESCRIPTOR, MAX_REPLICAS, key="owner")

_REASON = Field(lambda value: printable(value, MAX_SENTENCE), shortened)
_REJECTION = Record(Rejection, pb.Rejection, {"descriptor": DESCRIPTOR, "reason": _REASON})
_HOLDERS = several(PEER, MAX_REPLICAS, least=1)
_MANIFEST_ENTRY = Record(ManifestEntry, pb.ManifestEntry, {"descriptor": DESCRIPTOR, "holders": _HOLDERS})


def _check_canonical(descriptors: Sequence[PayloadDescriptor]) -> None:
    """ValueError unless all are of one stage and round, and their owners strictly ascend."""
    owners = [descriptor.owner for descriptor in descriptors]
    if owners != sorted(set(owners)):
        raise ValueError("payloads out of canonical order, or two payloads of one owner")
    if len({(descriptor.stage, descriptor.round_number) for descriptor in descriptors}) > 1:
        raise ValueError("payloads of different stages or rounds")


def _check_decision(record: FlatDecision) -> None:
    """A commit of at least one payload of its stage and round, in canonical order; or none of any."""
    descriptors = [entry.descriptor for entry in record.entries]
    _check_canonical(descriptors)
    if any((d.stage, d.round_number) != (record.stage, record.round_number) for d in descriptors):
        raise ValueError("a decision over payloads of another stage or round")
    decision_of(record)


def _check_group(group: ExchangeGroup) -> None:
    _check_canonical(group.descriptors)
    if len(group.lines) not in (0, len(group.descriptors)):
        raise ValueError(f"{len(group.lines)} lines of {len(group.descriptors)} members")


_LINE = Record(MemberLine, pb.MemberLine, {"uplink": INT64, "downlink": INT64})
GROUP = Record(
    ExchangeGroup,
    pb.MatchReply,
    {
        "descriptors": _DESCRIPTORS,
        "seconds": between(0, MAX_GATHER_SECONDS),
        "lines": several(_LINE, MAX_REPLICAS),
    },
    _check_group,
)


def _check_claim(claim: ResultClaim) -> None:
    if list(claim.without) != sorted(set(claim.without)):
        raise ValueError("members that do not strictly ascend")


_RESULT_NBYTES = between(1, 2**63 - 1)
RESULT_CLAIM = Record(
    ResultClaim,
    pb.ResultClaim,
    {"sha256": SHA256, "nbytes": _RESULT_NBYTES, "without": several(PEER, MAX_REPLICAS)},
    _check_claim,
)
_COMMITTED_RESULT = Record(
    CommittedResult,
    pb.CommittedResult,
    {"sha256": SHA256, "nbytes": _RESULT_NBYTES, "holders": _HOLDERS},
)
_RESULT = Field(_COMMITTED_RESULT.read, _COMMITTED_RESULT.to_pb, optional=True)

_DECISION = Record(
    FlatDecision,
    pb.DecisionReply,
    {
        "stage": STAGE,
        "entries": several(_MANIFEST_ENTRY, MAX_REPLICAS),
        "reason": SENTENCE,
        "restore_round": Field(int, optional=True),
        "result": _RESULT,
    },
    _check_decision,
)


def decision_to_pb(decision: Decision) -> pb.DecisionReply:
    return _DECISION.to_pb(flat(decision))


def decision_from_pb(message: pb.DecisionReply) -> Decision:
    """The decision in a message, which says of a skipped stage that it is aborted."""
    return decision_of(_DECISION.from_pb(message))


_STATE_HOLDERS = several(PEER, MAX_HOLDERS)
STATE = Record(StateRecord, pb.StateRecord, {"stage": STAGE, "digest": SHA256, "holders": _STATE_HOLDERS})

descriptor_to_pb, descriptor_from_pb = DESCRIPTOR.to_pb, DESCRIPTOR.from_pb
rejection_to_pb = _REJECTION.to_pb
group_to_pb, group_from_pb = GROUP.to_pb, GROUP.from_pb
state_to_pb, state_from_pb = STATE.to_pb, STATE.from_pb
# Lists hold at most one descriptor or rejection of each owner.
descriptors_from_pb = _DESCRIPTORS.from_pb
rejections_from_pb = several(_REJECTION, MAX_REPLICAS, key="descriptor.owner").from_pb
result_claim_to_pb, result_claim_from_pb = RESULT_CLAIM.to_pb, RESULT_CLAIM.from_pb
