"""Random bytes at every decoder of peers' bytes, guided by coverage (atheris).

    pip install atheris
    python -m benchmarks.fuzz -runs=1000000

Each input goes to one decoder, chosen by its first byte; valid inputs of every decoder are where it begins. A
decoder may refuse with a HetnodeError, or with the ValueError that its room documents; anything else, or too
much memory, is a bug: libFuzzer then stops and writes the input to a file. Options are libFuzzer's, such as
``-max_total_time=600`` or ``-rss_limit_mb=2048``; a folder among them keeps what was found for the next time.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

with atheris.instrument_imports(include=["protocol", "coordinator"]):
    from coordinator.authority import open_authority
    from coordinator.state import event_codec
    from protocol.algorithm.clipping import clipping_scales, outliers, payload_norm
    from protocol.errors import HetnodeError
    from protocol.pb import hetnode_pb2 as pb
    from protocol.spec.quantizers import LINK_QUANTIZERS
    from protocol.spec.run import RunSpec
    from protocol.spec.sections import OuterSpec
    from protocol.trust import envelope, invite, tls
    from protocol.types import DType, PeerId, TensorHeader
    from protocol.wire import activation_codec, framing, payload_codec, records
    from protocol.wire.convert.frames import frame_header_from_pb
    from protocol.wire.convert.measurements import capacity_from_pb
    from protocol.wire.convert.payloads import (
        decision_from_pb,
        descriptor_from_pb,
        group_from_pb,
        rejections_from_pb,
    )
    from protocol.wire.convert.plans import peer_record_from_pb, plan_from_pb
    from protocol.wire.link_message import LinkMessage

from cryptography import x509
from google.protobuf.message import DecodeError, Message

Target = Callable[[bytes], object]

_SHAPES = {"emb": (19, 16), "0.wq": (16, 16), "0.norm": (16,)}
_LAYOUTS = [
    payload_codec.PayloadLayout(_SHAPES, OuterSpec(chunk=64, top_k=top_k, **options))
    for top_k, options in (
        (4, {}),
        (4, {"quantizer": "none"}),
        (4, {"indices": "enumerative"}),
        (4, {"indices": "enumerative", "quantizer": "1bit", "codebook": "chunk"}),
        (4, {"codebook": "chunk"}),
        (4, {"layout": "tiles", "short_chunk": "clip"}),
        (0, {}),
    )
]


def _payload(layout: payload_codec.PayloadLayout) -> Target:
    """Any bytes; and the same behind the right header, in the right length: they get to the tensors."""

    def decode(data: bytes) -> None:
        body = data[: layout.nbytes - len(layout.header)].ljust(layout.nbytes - len(layout.header), b"\0")
        for candidate in (data, layout.header + body):
            try:
                norm = payload_norm(payload_codec.decode(layout, candidate))
            except HetnodeError:
                continue
            assert math.isfinite(norm), "a payload that was let in has a finite norm"
            assert all(0 <= scale <= 1 for scale in clipping_scales([norm, 1.0]))
            assert not all(outliers([norm, 1.0])), "not everybody is an outlier"

    return decode


def _message(kind: type, convert_it: Callable[[object], object]) -> Target:
    def decode(data: bytes) -> None:
        try:
            message = kind.FromString(data)  # type: ignore[attr-defined]
        except DecodeError:
            return
        convert_it(message)

    return decode


def _frames(data: bytes) -> None:
    """A stream of link messages, each as long as its first byte says."""
    assembler = framing.FrameAssembler(max_bytes=4096)
    while data:
        size, data = data[0], data[1:]
        try:
            message = LinkMessage.from_bytes(data[:size])
        except DecodeError:
            return
        data = data[size:]
        if message.header is not None:
            assembler.header(*frame_header_from_pb(message.header))
        if message.chunk is not None:
            assembler.chunk(message.chunk)


def _activation(dtype: str) -> Target:
    shape = (2, 3, 4)
    headers, whole = activation_codec.pack_activation("x", activation_codec.torch.zeros(shape), dtype)

    def decode(data: bytes) -> None:
        activation_codec.unpack_activation(
            headers, data[: len(whole)].ljust(len(whole), b"\0"), "x", shape, dtype
        )

    return decode


def _ids(data: bytes) -> None:
    headers = (TensorHeader("tokens", DType.U16, (2, 4)),)
    activation_codec.unpack_ids(headers, data[:16].ljust(16, b"\0"), "tokens", (2, 4), 300)


def _event(data: bytes) -> None:
    kinds = event_codec.STORED_KINDS
    if data:
        event_codec.decode(kinds[data[0] % len(kinds)].__name__, data[1:].decode(errors="replace"))


with tempfile.TemporaryDirectory() as folder:
    _AUTHORITY = open_authority(Path(folder), "run")
_KEY = generate_private_key(SECP256R1()).public_key()
_PEER = PeerId("12D3KooWAJjbRkp8FPF5MKgMU53aUTxWkqvDrs4zc1VMbwRwfsbE")


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


_DESCRIPTOR = pb.PayloadDescriptor(
    run="run", stage=1, round=2, owner=_PEER, anchor_digest="a", codec="c", weight=1.0, nbytes=9,
    sha256="0" * 64, signature=bytes(64),
)  # fmt: skip
_MEMBER = pb.Member(peer=_PEER, stages=pb.StageRange(first=0, stop=2), endpoint="h:1")
_PLAN = pb.Plan(
    epoch=1, from_round=1, reason="r", replicas=[pb.Replica(index=0, members=[_MEMBER], weight=1.0)]
)
_ENTRY = pb.ManifestEntry(descriptor=_DESCRIPTOR, holders=[_PEER])
_HEADER = pb.FrameHeader(
    id=pb.FrameId(epoch=1, kind="forward"),
    nbytes=8,
    tensors=[pb.TensorHeader(name="x", dtype="f32", shape=[2])],
)
_STREAM = b"".join(
    bytes([len(message)]) + message
    for message in (
        LinkMessage(header=_HEADER, chunk=bytes(8)).to_bytes(),
        LinkMessage(header=_HEADER).to_bytes(),
        LinkMessage(chunk=bytes(8)).to_bytes(),
    )
)
_INVITE = invite.Invite("h:1", "h:2", bytes(32), "0" * 12, bytes(16)).encode()

TARGETS: Sequence[tuple[Target, bytes | Message]] = (
    *((_payload(layout), b"") for layout in _LAYOUTS),
    (_message(pb.Capacity, capacity_from_pb), pb.Capacity(device="cpu", threads=1)),
    (_message(pb.PeerRecord, peer_record_from_pb), pb.PeerRecord(peer=_PEER, role="stage")),
    (_message(pb.Plan, plan_from_pb), _PLAN),
    (_message(pb.PayloadDescriptor, descriptor_from_pb), _DESCRIPTOR),
    (_message(pb.MatchReply, group_from_pb), pb.MatchReply(group_id="g", descriptors=[_DESCRIPTOR])),
    (
        _message(pb.DecisionReply, decision_from_pb),
        pb.DecisionReply(stage=1, round=2, committed=True, entries=[_ENTRY]),
    ),
    (
        _message(pb.ReportRequest, lambda message: rejections_from_pb(message.rejected)),
        pb.ReportRequest(rejected=[pb.Rejection(descriptor=_DESCRIPTOR, reason="r")]),
    ),
    (_message(pb.FrameHeader, frame_header_from_pb), _HEADER),
    (_frames, _STREAM),
    *((_activation(dtype), bytes(96)) for dtype in LINK_QUANTIZERS),
    (_ids, bytes(16)),
    (records.descriptor_from_bytes, _DESCRIPTOR),
    (lambda data: records.open_plan(data[64:], data[:64], "run", _PEER), bytes(64)),
    (lambda data: records.open_record(data, _PEER, _AUTHORITY.certificate, 0.0), pb.SignedRecord()),
    (lambda data: envelope.public_key_of(data.decode("latin-1")), _PEER.encode()),
    (lambda data: tls.certified_peer(data, _AUTHORITY.certificate), _der(_AUTHORITY.for_peer(_PEER, _KEY))),
    (lambda data: tls.authority_of(data, bytes(32)), _der(_AUTHORITY.for_coordinator(_KEY))),
    (tls.tls_key_from_der, _KEY.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)),
    (lambda data: invite.decode(data.decode("latin-1")), _INVITE.encode()),
    (lambda data: RunSpec.from_json(data.decode("latin-1")), RunSpec().canonical_json.encode()),
    (_event, b"\0{}"),
)
"""Every decoder, and an input that it takes."""


def test_one_input(data: bytes) -> None:
    if not data:
        return
    try:
        TARGETS[data[0] % len(TARGETS)][0](data[1:])
    except (HetnodeError, ValueError):
        return


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for index, (_, seed) in enumerate(TARGETS):
            data = seed if isinstance(seed, bytes) else seed.SerializeToString()
            (Path(folder) / f"{index}").write_bytes(bytes([index]) + data)
        atheris.Setup([*sys.argv, folder], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
