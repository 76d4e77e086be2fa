"""Values that no change of the code may alter: bytes that peers hash, specifications, what a log leads to.

Each function returns what :mod:`tests.frozen.write` keeps in ``golden.json``. A function names the classes
and fields of the program; the golden file does not, so it stays when they are renamed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from coordinator.run.state.apply import replay
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.status.document import document
from coordinator.status.run_status import run_status
from coordinator.store.event_chain import first_hash, next_hash
from coordinator.store.event_codec import decode, encode
from node.experiment.matrix import read_matrix_file
from protocol.codec.activation import pack_activation, pack_ids
from protocol.codec.payload import encode as encode_payload
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import sparsify
from protocol.run_files.presets import PRESETS
from protocol.run_files.resolve import resolve
from protocol.spec.outer import OuterSpec
from protocol.spec.run import RunSpec
from protocol.status import Measurement
from protocol.types import Committed, Frame, FrameId, FrameKind, entries_of
from protocol.wire.framing import chunks, frame_header_to_pb
from protocol.wire.link_message import LinkMessage
from tests.builders import former_log, spec_of
from tests.support.incident_file import from_bytes
from tests.support.paths import ROOT

Values = Mapping[str, Any]

SHAPES = {"0.wq": (96, 96), "emb": (40, 96), "0.norm1": (96,)}
PAYLOADS: Mapping[str, Mapping[str, Any]] = {
    f"{quantizer}, {indices}, {top_k} of {chunk}": {
        "quantizer": quantizer,
        "indices": indices,
        "chunk": chunk,
        "top_k": top_k,
    }
    for quantizer in ("2bit", "1bit", "none")
    for indices in ("elias-fano", "enumerative")
    for chunk, top_k in ((4096, 32), (64, 5))
} | {"all values": {"top_k": 0}}
LINK_DTYPES = ("bf16", "dither5", "dither3")

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "llama3 scaling": {
        "model.key_value_heads": 1,
        "model.head_width": 24,
        "model.rope_scaling": "llama3",
        "model.rope_factor": 8.0,
        "model.rope_context": 64,
    },
    "qwen2": {"model.qkv_bias": True, "model.rope_base": 1e6, "model.norm_epsilon": 1e-6},
    "qwen3": {"model.qk_norm": True, "model.rope_scaling": "linear", "model.rope_factor": 2.0},
    "data": {"data.source": "text:some.txt", "data.text_field": "body", "data.validation_batches": 3},
    "inner": {"inner.final_ratio": 0.2, "inner.clip_norm": 0.5, "inner.weight_decay": 0.0, "seed": 7},
    "payloads": {"outer.quantizer": "1bit", "outer.indices": "enumerative", "outer.error_decay": 1.0},
    "all values": {"outer.top_k": 0},
    "radial": {"outer.merge": "radial"},
    "nesterov": {"outer.optimizer": "nesterov", "outer.momentum": 0.8, "outer.learning_rate": 0.7},
    "adaptive links": {"link.least_k": 4, "link.most_k": 24, "link.uncompressed": True},
    "dithered links": {"link.dtype": "dither5", "link.gradient_dtype": "dither3"},
    "tables": {"link.dtype": "dither5", "link.table": True, "link.table_rows": 64},
    "snapshots": {"link.embedding_every": 5},
    "swarm": {"swarm.stages": 4, "swarm.members": 2, "swarm.pipelines": 3},
    "constant batch": {"grouping.batch": "constant", "grouping.global_batch": 24, "grouping.spares": 2},
    "timing": {"timing.heartbeat": 1.0, "timing.lost_after": 9.0, "timing.link": 9.0},
    "recovery": {"recovery.checkpoint_every": 2, "recovery.keep_rounds": 8},
}
"""Settings that stay, each with a value that is not the default."""


def payloads() -> Values:
    """Length and sha256 of a payload of each codec."""

    def payload(options: Mapping[str, Any]) -> str:
        layout = PayloadLayout(SHAPES, OuterSpec(**options))
        content = {name: sparsify(exact(shape), layout.tensors[name]) for name, shape in SHAPES.items()}
        return _hash(encode_payload(layout, content))

    return {name: payload(options) for name, options in PAYLOADS.items()}


def frames() -> Values:
    """Length and sha256 of the messages of a link that carry one frame: activations, token ids."""
    packed = {dtype: pack_activation("x", exact((2, 9, 13)), dtype) for dtype in LINK_DTYPES}
    ids = torch.arange(18).view(2, 9)
    packed |= {f"ids of {most}": pack_ids("ids", ids, most) for most in (256, 257, 2**16 + 1)}

    def messages(headers: Any, payload: bytes) -> bytes:
        frame_id = FrameId(1, 2, 3, 4, FrameKind.FORWARD)
        first = LinkMessage(header=frame_header_to_pb(frame_id, headers)).to_bytes()
        return first + b"".join(
            LinkMessage(chunk=each).to_bytes() for each in chunks(Frame(frame_id, headers, payload))
        )

    return {name: _hash(messages(*each)) for name, each in packed.items()}


def specifications() -> Values:
    """Canonical JSON of the presets; hashes of them, of settings, and of the matrices' base specs."""
    found: dict[str, Any] = {}
    for preset in PRESETS:
        spec = resolve(preset)
        found[preset] = {"hash": spec.hash, "json": spec.canonical_json}
    found |= {f"nano, {name}": resolve("nano", overrides=each).hash for name, each in SETTINGS.items()}
    for file in sorted((ROOT / "benchmarks" / "reproduction").glob("*.toml")):
        matrix = read_matrix_file(file)
        found[file.name] = resolve(matrix.preset, overrides=_dotted(matrix.spec)).hash
    return found


def logs() -> Values:
    """The last hash of a recorded log, and the state to which it leads."""
    incident = from_bytes((ROOT / "tests" / "incidents" / "killed-stopped-and-slow.jsonl.xz").read_bytes())
    return {
        "first release": _log(spec_of(2, 2, 1, 4), [decode(*each) for each in former_log()]),
        "killed, stopped and slow": _log(incident.spec, list(incident.events)),
    }


def status() -> Values:
    """The document of ``status --json`` in the middle of the first release's log, without the settings."""
    spec = spec_of(2, 2, 1, 4)
    events = [decode(*each) for each in former_log()]
    state = replay(State(spec, spec.name), events[: len(events) // 2])
    figures = [
        Measurement(peer, 1, position, 0, 3.5 + position, math.inf, 640, 12.5, 0.5, complete=True)
        for position, peer in enumerate(list(state.peers)[:2])
    ]
    found = document(run_status(state, figures, state.latest_at + 1.0, 1.7e9))
    return {**found, "spec": found["spec"]["hash"]}


def exact(shape: tuple[int, ...]) -> Tensor:
    """Values whose magnitudes all differ and whose sums have no rounding error: equal on every machine."""
    count = math.prod(shape)
    place = torch.arange(count)
    magnitude = (place * 7919 % count + 1).float() / 1024
    sign = 1 - 2 * (place * 104729 // 64 % 2)
    return (magnitude * sign).view(shape)


def _log(spec: RunSpec, events: list[Event]) -> Values:
    row_hash = first_hash(spec.canonical_json)
    for event in events:
        row_hash = next_hash(row_hash, *encode(event))
    state = replay(State(spec, "a run"), events)
    plans = [
        [
            plan.from_round,
            plan.first_sample,
            [
                [
                    replica.index,
                    replica.weight,
                    replica.microbatches,
                    [[member.peer, *member.stages] for member in replica.members],
                    [[link.k, link.dialer.value] for link in replica.links],
                ]
                for replica in plan.replicas
            ],
        ]
        for plan in state.plans
    ]
    decisions = {
        f"{stage} {number}": [
            isinstance(decision, Committed),
            [entry.descriptor.sha256 for entry in entries_of(decision)],
        ]
        for (stage, number), decision in state.decisions.items()
    }
    digests = {
        " ".join(map(str, key)): dict(sorted(of_peers.items())) for key, of_peers in state.digests.items()
    }
    return {
        "last hash": row_hash.hex(),
        "phase": state.phase.value,
        "rounds decided": state.rounds_decided,
        "committed, aborted, skipped": [state.committed, state.aborted, state.skipped],
        "tokens": state.tokens,
        "latest": state.latest_at,
        "peers": {
            peer.peer: [peer.role.value, peer.lifecycle.value, peer.arrival, peer.finished]
            for peer in state.peers.values()
        },
        "strikes": {peer: list(rounds) for peer, rounds in state.strikes.items()},
        "quarantined": sorted(state.quarantined),
        "plans": _hash_of(plans),
        "decisions": _hash_of(decisions),
        "digests": _hash_of(digests),
    }


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _hash(data: bytes) -> str:
    return f"{len(data)} bytes, {hashlib.sha256(data).hexdigest()}"


def _hash_of(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


SECTIONS: Mapping[str, Callable[[], Values]] = {
    "payloads": payloads,
    "frames": frames,
    "specifications": specifications,
    "logs": logs,
    "status": status,
}
