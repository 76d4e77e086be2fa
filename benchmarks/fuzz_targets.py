"""The decoders of peers' bytes, each with valid inputs. See :mod:`benchmarks.fuzz`.

The entry points of the DHT, of a link and of the coordinator are in :mod:`benchmarks.fuzz_entry_points`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.message import DecodeError, Message

from benchmarks import fuzz_entry_points, fuzz_reduction
from benchmarks.fuzz_seeds import (
    AUTHORITY,
    CONTRIBUTION,
    GROUP,
    MEASUREMENT,
    PEER,
    PLACE,
    PLAN,
    SPEC,
    STATE,
    STATUS,
    TLS_KEY,
    Target,
    der,
    descriptor_of,
    sealed_record,
    sign,
)
from coordinator.store import event_codec
from node.checkpoint import snapshot_codec
from node.net.group_reports import GroupReports
from protocol.codec import activation as activation_codec
from protocol.codec import payload as payload_codec
from protocol.errors import HetnodeError
from protocol.math.clipping import clipping_scales, outliers, payload_norm
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import payload_pb2
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import LINK_QUANTIZERS
from protocol.spec.run import RunSpec
from protocol.trust import envelope, invite, receipt, tls
from protocol.types import DType, ExchangeGroup, PayloadDescriptor, TensorHeader, entries_of
from protocol.wire import records, rpc_errors
from protocol.wire.convert.fields import (
    banned_from_pb,
    endpoint_from_pb,
    name_from_pb,
    part_from_pb,
    peer_from_pb,
    public_name_from_pb,
    role_from_pb,
    sentence_from_pb,
    setting_from_pb,
)
from protocol.wire.convert.payloads import (
    decision_from_pb,
    descriptor_from_pb,
    descriptors_from_pb,
    group_from_pb,
    rejections_from_pb,
    result_claim_from_pb,
    state_from_pb,
)
from protocol.wire.convert.plans import (
    addresses_from_pb,
    capacity_from_pb,
    estimates_from_pb,
    pause_from_pb,
    peer_record_from_pb,
    places_from_pb,
    plan_from_pb,
    reached_from_pb,
    relays_from_pb,
    rollback_from_pb,
    sources_from_pb,
    succession_from_pb,
)
from protocol.wire.framing import frame_header_from_pb
from protocol.wire.groups import at_positions, pack, positions_of
from protocol.wire.status import (
    kept_from_pb,
    measurement_from_pb,
    status_from_pb,
    waits_from_pb,
)

_SHAPES = {"emb": (19, 16), "0.wq": (16, 16), "0.norm": (16,)}
_CODECS = {
    "default": OuterSpec(chunk=64, top_k=4),
    "float32": OuterSpec(chunk=64, top_k=4, quantizer="none"),
    "enumerative": OuterSpec(chunk=64, top_k=4, indices="enumerative"),
    "1 bit": OuterSpec(chunk=64, top_k=4, indices="enumerative", quantizer="1bit"),
    "dense": OuterSpec(chunk=64, top_k=0),
}


def _decode_payload(layout: payload_codec.PayloadLayout, data: bytes) -> None:
    """Decode `data`, and also with a valid header and length, so that it reaches the tensors."""
    body = data[: layout.nbytes - len(layout.header)].ljust(layout.nbytes - len(layout.header), b"\0")
    for candidate in (data, layout.header + body):
        try:
            norm = payload_norm(payload_codec.decode(layout, candidate))
        except HetnodeError:
            continue
        assert math.isfinite(norm), "an accepted payload has a finite norm"
        assert all(0 <= scale <= 1 for scale in clipping_scales([norm, 1.0], 1.0))
        assert not all(outliers([norm, 1.0])), "not all payloads are outliers"


def _payload(name: str) -> Target:
    layout = payload_codec.PayloadLayout(_SHAPES, _CODECS[name])
    return Target(f"payload, {name}", partial(_decode_payload, layout), (layout.header, b"\1" * 90))


def _activation(dtype: str) -> Target:
    shape = (2, 3, 4)
    headers, whole = activation_codec.pack_activation("x", activation_codec.torch.zeros(shape), dtype)

    def decode(data: bytes) -> None:
        body = data[: len(whole)].ljust(len(whole), b"\0")
        activation_codec.unpack_activation(headers, body, "x", shape, dtype)

    return Target(f"activation, {dtype}", decode, (bytes(whole), b"\x3f\x80" * 48))


def _decode_snapshot(data: bytes) -> None:
    """Decode `data`, and also with the length of a snapshot."""
    size = snapshot_codec.nbytes_of(4, 8)
    for candidate in (data, data[:size].ljust(size, b"\0")):
        try:
            snapshot_vd = snapshot_codec.decode(candidate, 4, 8)
        except HetnodeError:
            continue
        assert snapshot_codec.encode(snapshot_vd) == candidate, "a snapshot has one form"


def _decode_frame(data: bytes) -> None:
    """A header of a neighbour with its bytes, as the worker gets them."""
    try:
        message = pb.FrameHeader.FromString(data)
    except DecodeError:
        return
    _, headers, nbytes = frame_header_from_pb(message)
    activation_codec.unpack_activation(headers, bytes(min(nbytes, 4096)), "activation", (2, 3, 4), "bf16")


def _decode_ids(data: bytes) -> None:
    headers = (TensorHeader("tokens", DType.U16, (2, 4)),)
    activation_codec.unpack_ids(headers, data[:16].ljust(16, b"\0"), "tokens", (2, 4), 300)


def _decide_by_positions(descriptors: Sequence[PayloadDescriptor], reply: pb.DecisionReply) -> None:
    """A decision as a member of a group gets it, and the positions that it would report."""
    reports = GroupReports(descriptors[0].owner)
    reports.note(descriptors[0], ExchangeGroup("g", tuple(descriptors)))
    decision = reports.decision_of(reply, 1, descriptors[0].round_number)
    held = [entry.descriptor for entry in entries_of(decision)]
    positions = positions_of(descriptors, held)
    assert positions is None or list(at_positions(descriptors, positions)) == held


def _decode_event(data: bytes) -> None:
    kinds = [name for names in event_codec.STORED_KINDS.values() for name in names]
    if data:
        event_codec.decode(kinds[data[0] % len(kinds)], data[1:].decode(errors="replace"))


def _message(name: str, valid: Message, convert: Callable[[object], object]) -> Target:
    kind = type(valid)

    def decode(data: bytes) -> None:
        try:
            message = kind.FromString(data)
        except DecodeError:
            return
        convert(message)

    return Target(name, decode, (valid.SerializeToString(),), kind)


def _signed(name: str, valid: Message, message_of: Callable[[bytes], bytes], open_it: Callable) -> Target:
    """Any bytes with the signature of the peer that is asked for: they get past it."""

    def decode(data: bytes) -> None:
        open_it(data, sign(message_of(data)))

    return Target(name, decode, (valid.SerializeToString(),), type(valid))


class _Refused(Exception):
    """A call that the other end has ended with this metadata."""

    def __init__(self, metadata: list[tuple[str, str]]) -> None:
        super().__init__()
        self._metadata = metadata

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return self._metadata


def _decode_refusal(data: bytes) -> None:
    code, _, cause = data.decode("latin-1").partition("\n")
    rpc_errors.error_from_rpc(_Refused([("hetnode-code", code), ("hetnode-cause", cause)]))  # type: ignore[arg-type]


def _latin(decode: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: decode(data.decode("latin-1"))


def _messages() -> list[Target]:
    relay = pb.RelayAddress(peer=PEER, endpoint="h:1")
    source = pb.MemberSource(peer=PEER, source="2001:db8::/64")
    addresses = pb.Addresses(endpoint="h:1", dht="h:2", relayed=True)
    tried = pb.TryAddressesReply(
        reached=pb.Reached(reachability="open", endpoint=True, reason="r"), relays=[relay]
    )
    report = pb.ReportRequest(
        held=[descriptor_of(1)], rejected=[pb.Rejection(descriptor=descriptor_of(1), reason="r")]
    )
    decision = pb.DecisionReply(stage=1, round=1, committed=True, entries=[
        pb.ManifestEntry(descriptor=descriptor_of(1), holders=[PEER])
    ], result=pb.CommittedResult(sha256="a" * 64, nbytes=9, holders=[PEER]))  # fmt: skip
    claim = pb.ResultClaim(sha256="a" * 64, nbytes=9, without=[PEER])
    counted = pb.DecisionReply(stage=1, round=1, committed=True, counted=b"\1", packed=pack(decision))
    descriptors = group_from_pb(GROUP).descriptors
    estimates = pb.Estimates(
        capacity=CONTRIBUTION.capacity, links=[pb.LinkEstimate(peer=PEER, bandwidth=1e6)]
    )
    header = pb.FrameHeader(
        id=pb.FrameId(epoch=1, kind="forward"),
        nbytes=8,
        tensors=[pb.TensorHeader(name="x", dtype="f32", shape=[2])],
    )
    state_request = payload_pb2.StateRequest(stage=1, part="stage", round=2, index=3)
    return [
        _message("capacity", CONTRIBUTION.capacity, capacity_from_pb),
        _message("estimates", estimates, estimates_from_pb),
        _message("peer record", CONTRIBUTION, peer_record_from_pb),
        _message("plan", PLAN, plan_from_pb),
        _message("pause", pb.Pause(from_round=1, by="operator", reason="r"), pause_from_pb),
        _message("rollback", pb.Rollback(round=3, restore_round=1), rollback_from_pb),
        _message("succession", pb.Succession(term=b"t" * 72, others=["h:1"]), succession_from_pb),
        _message(
            "heartbeat",
            pb.HeartbeatRequest(waits=["group"], kept=[1, 10]),
            lambda message: (waits_from_pb(message.waits), kept_from_pb(message.kept)),
        ),
        _message(
            "update",
            pb.PlanUpdate(banned=[PEER], followers=[PLACE], relays=[relay], sources=[source]),
            lambda message: (
                banned_from_pb(message.banned),
                places_from_pb(message.followers),
                relays_from_pb(message.relays),
                sources_from_pb(message.sources),
            ),
        ),
        _message("descriptor", descriptor_of(1), descriptor_from_pb),
        _message("group", GROUP, group_from_pb),
        _message("packed group", pb.MatchReply(packed=pack(GROUP)), GroupReports.group_of),
        _message("decision", decision, decision_from_pb),
        _message("decision by positions", counted, partial(_decide_by_positions, descriptors)),
        _message(
            "report",
            report,
            lambda message: (descriptors_from_pb(message.held), rejections_from_pb(message.rejected)),
        ),
        _message("claim of a result", claim, result_claim_from_pb),
        _message("checkpoint", STATE, state_from_pb),
        _message("addresses", addresses, addresses_from_pb),
        _message(
            "reply to addresses",
            tried,
            lambda message: (reached_from_pb(message.reached), relays_from_pb(message.relays)),
        ),
        _message("frame header", header, frame_header_from_pb),
        _message("measurement", MEASUREMENT, measurement_from_pb),
        _message("status", STATUS, status_from_pb),
        _message("state request", state_request, lambda message: part_from_pb(message.part)),
    ]


def _decode_text(data: bytes) -> None:
    """A field of text, by the first byte."""
    readers = (
        *(name_from_pb, sentence_from_pb, peer_from_pb, endpoint_from_pb, role_from_pb, part_from_pb),
        *(public_name_from_pb, setting_from_pb),
    )
    readers[(data[0] if data else 0) % len(readers)](data[1:].decode(errors="replace"))


def _signed_receipt() -> bytes:
    hashes = {"spec_hash": SPEC.hash, "log_hash": "b" * 64}
    figures = {"stage_tokens": 5, "stage_rounds": 1, "payload_bytes": 9, "first_round": 1, "last_round": 1}
    unsigned = receipt.Receipt(
        run=SPEC.name, peer=PEER, name="José", log_row=7, time=1, coordinator=PEER, **hashes, **figures
    )
    return receipt.encode_receipt(receipt.sign_receipt(unsigned, sign))


def _others() -> list[Target]:
    record, run = sealed_record(), SPEC.name
    invitation = invite.Invite("h:1", "h:2", bytes(32), "0" * 12, bytes(16)).encode()
    key = TLS_KEY.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    frame = pb.FrameHeader(
        nbytes=48, tensors=[pb.TensorHeader(name="activation", dtype="bf16", shape=[2, 3, 4])]
    )
    frame.id.kind = "forward"
    return [
        Target("frame and activation", _decode_frame, (frame.SerializeToString(),), pb.FrameHeader),
        Target("snapshot of the embedding", _decode_snapshot, (b"\x80\x3f" * 32, b"\x80\x7f" * 32)),
        Target("token ids", _decode_ids, (bytes(16),)),
        Target("descriptor bytes", records.descriptor_from_bytes, (descriptor_of(1).SerializeToString(),)),
        Target("unsigned plan", lambda data: records.open_plan(data[64:], data[:64], run, PEER), (
            sign(envelope.plan_message(run, PLAN.SerializeToString())) + PLAN.SerializeToString(),
        )),
        _signed("signed plan", PLAN, partial(envelope.plan_message, run), lambda data, signature: (
            records.open_plan(data, signature, run, PEER)
        )),
        _signed("signed state", STATE, partial(envelope.state_message, run), lambda data, signature: (
            records.open_state(data, signature, run, PEER)
        )),
        Target(
            "DHT record",
            lambda data: records.open_record(data, run, PEER, AUTHORITY.certificate, time.time()),
            (record,),
            pb.SignedRecord,
        ),
        Target("peer id", _latin(envelope.public_key_of), (PEER.encode(),)),
        Target(
            "certificate",
            lambda data: tls.certified_peer.__wrapped__(data, AUTHORITY.certificate),
            (der(AUTHORITY.for_peer(PEER, TLS_KEY)),),
        ),
        Target(
            "coordinator's certificate",
            lambda data: tls.authority_of(data, AUTHORITY.pin),
            (der(AUTHORITY.for_coordinator(TLS_KEY)),),
        ),
        Target("TLS key", tls.tls_key_from_der, (key,)),
        Target("receipt", receipt.open_receipt, (_signed_receipt(),)),
        Target("invite", _latin(invite.decode), (invitation.encode(),)),
        Target("specification", _latin(RunSpec.from_json), (SPEC.canonical_json.encode(),)),
        Target("refusal", _decode_refusal, (b"bad-request\nwhy%20not",)),
        Target("text", _decode_text, (
            b"\0name", b"\2" + PEER.encode(), b"\3[::1]:7700", b"\4stage", "\6José".encode()
        )),
        Target("event", _decode_event, (b"\0{}", b'\0{"at":1.0}')),
    ]  # fmt: skip


def targets() -> list[Target]:
    """Every decoder."""
    return [
        *map(_payload, _CODECS),
        *map(_activation, LINK_QUANTIZERS),
        *_messages(),
        *_others(),
        *fuzz_reduction.targets(),
        *fuzz_entry_points.targets(),
    ]
