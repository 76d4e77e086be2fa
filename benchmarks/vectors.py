"""Test vectors of docs/protocol, made by the production code: ``python -m benchmarks.vectors``.

Each file in docs/protocol/vectors fixes one piece of the protocol for a second implementation, and names the
page that describes the piece. Arrays that must agree in every bit are hexadecimal: little-endian float32,
row-major. Other numbers are decimal, with the relative tolerance `tol` of the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from node.checkpoint import snapshot_codec
from node.core.model.init import initial_parameters
from node.core.model.shapes import parameter_shapes
from node.core.model.stage import Stage
from node.core.optimizer.inner import StageOptimizer
from node.core.optimizer.outer_stage import OuterStage
from node.core.optimizer.schedule import learning_rate
from node.data.mixture import begun, place_of
from node.data.permutation import window_of
from node.data.sources import open_source
from node.data.stream import open_stream
from node.data.streamed import order_of, turns_of
from node.generate import WholeModel, next_token_loss
from protocol.codec.activation import pack_activation, unpack_activation
from protocol.codec.payload import decode, encode
from protocol.math.clipping import clipping_scales, payload_norm
from protocol.math.frame_shift import shift_of
from protocol.math.microbatch_order import one_forward_one_backward
from protocol.math.outer_optimizer import initial_state
from protocol.math.outer_step import anchor_digest, apply_update
from protocol.math.output_subspace import exactly_projected, output_basis
from protocol.math.payload_layout import PayloadLayout, TensorLayout
from protocol.math.sampling import sample_range
from protocol.math.subspace import orthonormal_basis, perpendicular_table
from protocol.math.topk import sparsify
from protocol.run_files.resolve import resolve
from protocol.spec.change import changed, settings_text
from protocol.spec.fixed import PLAIN_CLIP
from protocol.spec.outer import OuterSpec
from protocol.spec.run import RunSpec
from protocol.trust import envelope
from protocol.trust.invite import Invite
from protocol.trust.names import tls_name
from protocol.trust.run_id import run_id_of
from protocol.types import Member, PayloadDescriptor, PeerId, Plan, Replica, RunChange, StageRange

FOLDER = Path(__file__).parents[1] / "docs" / "protocol" / "vectors"
_TINY = {"vocabulary": 11, "width": 8, "layers": 2, "heads": 2, "feed_forward": 12, "context": 6}
_NBYTES = [1, 2**28, 0, 2**27 + 1]
_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "grouped heads of another width": {"heads": 4, "key_value_heads": 2, "head_width": 4},
    "biases": {"qkv_bias": True},
    "normed queries and keys": {"qk_norm": True},
    "linear RoPE": {"rope_scaling": "linear", "rope_factor": 4.0},
    "llama3 RoPE": {
        "rope_scaling": "llama3",
        "rope_factor": 8.0,
        "rope_context": 16,
        "head_width": 8,
        "rope_base": 100.0,
    },
    "tied head": {"tied_head": True},
    "RoPE in three of four layers": {"rope_scaling": "smollm3", "layers": 4},
    "norms of outputs": {"norms": "outputs", "heads": 4, "key_value_heads": 2, "head_width": 4},
    "documents apart": {"heads": 4, "key_value_heads": 2, "head_width": 4},
}
_APART = {"data.tokenizer": "tokenizer.json", "data.pack": "documents", "data.separator": 1}


def _hex(values: Tensor) -> str:
    return values.detach().to(torch.float32).contiguous().numpy().astype("<f4").tobytes().hex()


def _named(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: _hex(tensor) for name, tensor in tensors.items()}


def _eighths(count: int, seed: int, scale: float = 1.0) -> Tensor:
    """Multiples of 1/8 without a pattern: sums of a few of them are exact."""
    raw = hashlib.shake_128(f"vectors {seed}".encode()).digest(count)
    return torch.from_numpy((np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 8 * scale)


def _spec(**sections: Any) -> RunSpec:
    return resolve(
        "nano",
        overrides={"model": dict(_TINY), "swarm.stages": 1, "swarm.pipelines": 0, "link.k": 0, **sections},
    )


def identities() -> dict[str, Any]:
    """Peer id, names, an invite, and the bytes under each signature."""
    seed, pin = bytes(range(32)), hashlib.sha256(b"an authority").digest()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    peer = envelope.peer_id_of(key.public_key().public_bytes_raw())
    invite = Invite("host.example:7700", "host.example:7701", pin, "0123456789ab", bytes(16))
    spec = resolve("nano")
    run = run_id_of(spec, pin)
    descriptor = PayloadDescriptor(
        run, 0, 1, peer, "0" * 64, "ef2bit-v1:4096/32", 1.0, 100, "1" * 64, epoch=1
    )
    signed = {
        "enrollment": envelope.enrollment_message(pin, b"tls key", invite.id),
        "renewal": envelope.renewal_message(pin, b"tls key"),
        "specification": envelope.spec_message(run, spec.canonical_json),
        "plan": envelope.plan_message(run, b"plan"),
        "checkpoint": envelope.state_message(run, b"record"),
        "descriptor": envelope.descriptor_message(descriptor),
        "DHT record": envelope.record_message(run, b"record", 1.5),
    }
    return {
        "page": "minimum-peer.md, sections 1 to 3",
        "seed": seed.hex(),
        "peer": peer,
        "tls_name": tls_name(peer),
        "invite": {
            "text": invite.encode(),
            "api": invite.api,
            "enrollment": invite.enrollment,
            "pin": pin.hex(),
            "id": invite.id,
        },
        "spec_json": spec.canonical_json,
        "run": run,
        "descriptor": {
            "run": run,
            "epoch": 1,
            "stage": 0,
            "round": 1,
            "owner": peer,
            "anchor_digest": "0" * 64,
            "codec": "ef2bit-v1:4096/32",
            "weight": 1.0,
            "nbytes": 100,
            "sha256": "1" * 64,
        },
        "other_inputs": "the ASCII texts 'tls key', 'plan' and 'record'; the DHT record expires at 1.5",
        "signatures": {what: key.sign(data).hex() for what, data in signed.items()},
    }


def parameters() -> dict[str, Any]:
    """The parameters before round 1, and digests of anchors."""
    cases = []
    for name, model, stages, seed in (
        ("one stage", {}, 1, 0),
        ("two stages", {}, 2, 7),
        (
            "biases and grouped heads",
            {**_VARIANTS["grouped heads of another width"], "qkv_bias": True},
            1,
            2**62,
        ),
    ):
        spec = _spec(model={**_TINY, **model}, seed=seed, **{"swarm.stages": stages})
        for stage in range(stages):
            found = initial_parameters(spec, stage)
            tensors = [
                [name, list(value.shape), _hex(value.flatten()[:3]), _sha256(value)]
                for name, value in found.items()
            ]
            cases.append(
                {
                    "name": name,
                    "model": {**_TINY, **model},
                    "seed": seed,
                    "stages": stages,
                    "stage": stage,
                    "tensors": tensors,
                    "digest": anchor_digest(found),
                }
            )
    large = {"b": torch.full((1_048_577,), 0.5), "a/momentum": torch.zeros(2, 3), "a": torch.ones(2, 3)}
    return {
        "page": "training.md, sections 2 and 7",
        "tensors": "name, shape, first three values, sha256 of all values",
        "cases": cases,
        "digest_of_two_chunks": {
            "tensors": {"a": [[2, 3], 1.0], "a/momentum": [[2, 3], 0.0], "b": [[1_048_577], 0.5]},
            "digest": anchor_digest(large),
        },
    }


def _sha256(value: Tensor) -> str:
    return hashlib.sha256(bytes.fromhex(_hex(value))).hexdigest()


def forward() -> dict[str, Any]:
    """Logits, loss and gradients of the model's variants."""
    ids, cases = [3, 1, 4, 1, 5, 9], []
    targets = [1, 4, 1, 5, 9, 2]
    for name, fields in _VARIANTS.items():
        data = _APART if name == "documents apart" else {}
        spec = _spec(model={**_TINY, **fields}, seed=1, **data)
        values = {key: value.double() * 8 for key, value in initial_parameters(spec, 0).items()}
        for position, (key, value) in enumerate(values.items()):
            if value.dim() == 1:  # norms of ones and biases of zeros would hide mistakes
                values[key] = _eighths(len(value), position).double() / 16 + (0 if ".b" in key else 1)
        whole = WholeModel([Stage(spec, 0, values)])
        logits = whole(torch.tensor([ids]))
        loss = next_token_loss(logits, torch.tensor([targets]))
        loss.backward()
        cases.append(
            {
                "name": name,
                "model": {**_TINY, **fields},
                **({"separator": spec.data.separator} if data else {}),
                "vectors": {key: _hex(value) for key, value in values.items() if value.dim() == 1},
                "logits": _rounded(logits[0, -1]),
                "loss": _rounded(loss),
                "gradient_norms": {
                    key: _rounded(value.grad.norm())
                    for key, value in whole.stages[0].canonical_parameters().items()
                },
            }
        )
    return {
        "page": "training.md, section 3",
        "parameters": "matrices: 8 times the initial ones of seed 1, one stage; vectors as given",
        "ids": ids,
        "targets": targets,
        "tol": 1e-5,
        "logits": "of the last position",
        "cases": cases,
    }


def _rounded(value: Tensor) -> Any:
    return json.loads(json.dumps(value.tolist()), parse_float=lambda text: float(f"{float(text):.7g}"))


def samples() -> dict[str, Any]:
    """Which text is sample n."""
    orders = [
        {"size": size, "seed": seed, "windows": [window_of(n, size, seed) for n in range(count)]}
        for size, seed, count in ((1, 0, 3), (10, 0, 20), (100, 5, 8), (1_000_003, 2**40, 4))
    ]
    texts = [f"document {n}: {'abcdefgh' * (n % 3)}\n" for n in range(45)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "texts.jsonl")
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        held_out = [
            n for n, each in enumerate(open_source(f"jsonl:{path}", "text").documents()) if each.held_out
        ]
        spec = _spec(model={**_TINY, "vocabulary": 256}, seed=3, **{"data.source": f"jsonl:{path}"})
        stream = open_stream(spec)
        windows = [bytes(row).decode() for row in stream.read([0, 1, 2, 500]).astype(np.uint8)]
        validation = [bytes(row).decode() for row in stream.validation(3).astype(np.uint8)]
        block_path = Path(folder, "blocks.txt")
        block_path.write_text("".join(f"line {n}\n" for n in range(1000)))
        blocks = [len(each.text) for each in open_source(f"text:{block_path}", "text").documents()]
    replicas = tuple(
        Replica(
            index,
            members=(Member(PeerId(f"peer {index}"), StageRange(0, 1), ""),),
            links=(),
            weight=1.0,
            microbatches=m,
        )
        for index, m in ((4, 0), (1, 3), (2, 1))
    )
    plan = Plan(epoch=3, from_round=5, first_sample=1000, replicas=replicas, reason="")
    inner = spec.inner
    return {
        "page": "training.md, section 4",
        "orders": orders,
        "jsonl": {
            "documents": "45, document n is 'document {n}: ' + 'abcdefgh' repeated n mod 3 times + newline",
            "context": spec.model.context,
            "seed": spec.seed,
            "tokenizer": "byte",
            "held_out": held_out,
            "samples": {"0": windows[0], "1": windows[1], "2": windows[2], "500": windows[3]},
            "validation": validation,
        },
        "text": {"content": "'line {n}' and a newline, n = 0..999", "block_lengths": blocks},
        "streamed": {
            "nbytes": _NBYTES,
            "seed": 3,
            "turns": [order_of(turns_of(_NBYTES), 3, number) for number in range(2)],
        },
        "mixture": _mixture(),
        "plan": {
            "from_round": 5,
            "first_sample": 1000,
            "steps": inner.steps,
            "microbatches": inner.microbatches,
            "microbatch_size": inner.microbatch_size,
            "replicas": [[4, 0], [1, 3], [2, 1]],
            "ranges": [
                [number, index, each.start, each.stop]
                for number in (5, 6)
                for index in (4, 1, 2)
                for each in [sample_range(plan, spec, number, index)]
            ],
        },
    }


def _mixture() -> dict[str, Any]:
    """From which source the samples of a run come that changes its mixture."""
    mixtures = [[("c", 1), ("a", 3)], [("a", 5), ("b", 2), ("c", 1)]]
    told = [settings_text({"data.source": [_source(*each) for each in mixture]}) for mixture in mixtures]
    changes = [RunChange(2, told[0], "", 11), RunChange(3, told[1], "", 41)]
    spec = changed(_spec(seed=9, **{"data.source": "text:b"}), changes)
    data, counts = spec.data, tuple(weight for _, weight in mixtures[-1])
    first, begins = begun(data.sources, data, spec.seed)
    places = [place_of(n - first, counts, spec.seed) for n in range(first, first + 20)]
    return {
        "seed": spec.seed,
        "source": spec.tree["data"]["source"],
        "past": spec.tree["data"]["past"],
        "first": first,
        "samples": [[data.sources[s].source, begins[s] + ordinal] for s, ordinal in places],
    }


def _source(name: str, weight: int) -> dict[str, Any]:
    return {"name": name, "source": f"text:{name}", "weight": weight}


def inner_step() -> dict[str, Any]:
    """The learning rate, clipping, and AdamW."""
    spec = _spec(rounds=4, **{"inner.steps": 5, "inner.warmup_steps": 4, "inner.learning_rate": 0.01})
    values = {"a.wq": _eighths(6, 1).view(2, 3), "a.norm1": _eighths(3, 2), "emb": _eighths(4, 3).view(2, 2)}
    live = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    adamw, steps = StageOptimizer(spec, live, ["emb"]), []
    for step in range(2):
        for position, parameter in enumerate(live.values()):
            parameter.grad = _eighths(parameter.numel(), 10 * step + position).view_as(parameter) / 16
        rate = learning_rate(spec.inner, step, spec.total_steps)
        gradients = {name: _hex(each.grad) for name, each in live.items() if each.grad is not None}
        adamw.step(rate)
        steps.append(
            {
                "rate": rate,
                "gradients": gradients,
                "after": {name: _rounded(each) for name, each in live.items()},
            }
        )
    return {
        "page": "training.md, section 5",
        "tol": 1e-5,
        "inner": spec.tree["inner"],
        "total_steps": spec.total_steps,
        "rates": [learning_rate(spec.inner, step, spec.total_steps) for step in range(spec.total_steps)],
        "parameters": _named(values),
        "shapes": {name: list(value.shape) for name, value in values.items()},
        "steps": steps,
    }


_SHAPES = {"emb": (4, 5), "norm": (7,), "head": (3, 11)}


def _payload_case(outer: Mapping[str, Any]) -> dict[str, Any]:
    section = OuterSpec.model_validate({"clip": PLAIN_CLIP, **outer})
    layout = PayloadLayout(_SHAPES, section)
    tensors = {name: _eighths(int(np.prod(shape)), 31 + i) for i, (name, shape) in enumerate(_SHAPES.items())}
    sparse = {name: sparsify(value, TensorLayout(_SHAPES[name], section)) for name, value in tensors.items()}
    data = encode(layout, sparse)
    decoded = {}
    for name, content in decode(layout, data).items():
        decoded[name] = torch.zeros(int(np.prod(_SHAPES[name])))
        content.add_to(decoded[name], 1.0)
    return {
        "outer": dict(outer),
        "codec": layout.codec,
        "nbytes": layout.nbytes,
        "payload": data.hex(),
        "tensors": _named(tensors),
        "decoded": _named(decoded),
    }


def payload() -> dict[str, Any]:
    """The bytes of payloads."""
    sparse = {"chunk": 16, "top_k": 3}
    return {
        "page": "training.md, section 6",
        "shapes": {name: list(shape) for name, shape in _SHAPES.items()},
        "cases": [
            _payload_case({**sparse, "indices": indices, "quantizer": quantizer})
            for indices in ("elias-fano", "enumerative")
            for quantizer in ("2bit", "1bit", "none")
        ]
        + [_payload_case({"chunk": 16, "top_k": 0})],
    }


def outer_step() -> dict[str, Any]:
    """Committed rounds: clipping, weights, the sum, and both outer optimizers."""
    return {
        "page": "training.md, section 8",
        "shapes": {name: list(shape) for name, shape in _SHAPES.items()},
        "cases": [
            _outer_case("two payloads of different weight", {"learning_rate": 0.7}, (1.0, 0.3), (1.0, 1.0)),
            _outer_case("the last payload is clipped", {}, (1.0, 0.5, 0.75), (1.0, 1.1, 200.0)),
            _outer_case("all are clipped to the median", {"clip": 1.0}, (1.0, 0.5, 0.75), (1.5, 1.1, 200.0)),
            _outer_case("float32 values", {"quantizer": "none"}, (1.0, 0.9), (0.3, 0.7)),
            _outer_case("radial, float32", {"merge": "radial", "quantizer": "none"}, (1.0, 0.9), (0.3, 0.7)),
            _outer_case("radial, opposed", {"merge": "radial"}, (1.0, 0.9, 0.5), (1.0, -0.8, 0.0), True),
            _outer_case(
                "Nesterov",
                {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.9},
                (1.0, 0.3),
                (1.0, 1.0),
            ),
        ],
        "projections": [_projection(4, 2), _projection(12, 5)],
    }


def _projection(width: int, k: int) -> dict[str, Any]:
    spec = _spec(
        model={**_TINY, "width": width, "heads": 2, "layers": 2},
        inner={"optimizer": "muon"},
        swarm={"replicas": 0, "pipelines": 1, "stages": 2},
        link={"k": k},
    )
    weight = _eighths(3 * width, 90 + k).view(width, 3) / 3
    basis = output_basis(spec, 0)
    assert basis is not None, "these stages are bound"
    shown = {"width": width, "k": k, "seed": spec.seed, "basis": basis.tolist()}
    return {
        **shown,
        "weight": _hex(weight),
        "projected": _hex(exactly_projected({"0.wo": weight}, basis)["0.wo"]),
    }


def _outer_case(
    name: str,
    fields: Mapping[str, Any],
    weights: Sequence[float],
    scales: Sequence[float],
    alike: bool = False,
) -> dict[str, Any]:
    """Two rounds; with `alike` the payloads differ in their scales alone."""
    outer = {"chunk": 16, "top_k": 3, **fields}
    section = OuterSpec.model_validate({"clip": PLAIN_CLIP, **outer})
    layout = PayloadLayout(_SHAPES, section)
    anchor = {
        name: _eighths(int(np.prod(shape)), 50 + i).view(shape) / 3
        for i, (name, shape) in enumerate(_SHAPES.items())
    }
    committed, rounds = anchor | initial_state(anchor, section.slots), []
    for number in range(2):
        payloads = []
        for owner, scale in enumerate(scales):
            sparse = {
                name: sparsify(
                    _eighths(int(np.prod(shape)), 100 * number + (0 if alike else 10 * owner) + i)
                    * scale
                    / 7,
                    TensorLayout(shape, section),
                )
                for i, (name, shape) in enumerate(_SHAPES.items())
            }
            payloads.append(encode(layout, sparse))
        contents = [decode(layout, data) for data in payloads]
        norms = [payload_norm(each) for each in contents]
        committed = apply_update(committed, contents, weights, section)
        rounds.append(
            {
                "payloads": [data.hex() for data in payloads],
                "norms": norms,
                "scales": clipping_scales(norms, section.clip),
                "after": _named(committed),
                "digest": anchor_digest(committed),
            }
        )
    return {
        "name": name,
        "outer": outer,
        "weights": list(weights),
        "anchor": _named(anchor),
        "rounds": rounds,
    }


def error_feedback() -> dict[str, Any]:
    """What a replica keeps after a commit, an abort, a commit without its payload, and a clipped commit."""
    spec = _spec(
        model={**_TINY, "vocabulary": 2, "width": 2, "heads": 1, "layers": 1, "feed_forward": 1},
        **{
            "outer.chunk": 4,
            "outer.top_k": 1,
            "outer.error_decay": 0.5,
            "outer.quantizer": "none",
            "outer.clip": PLAIN_CLIP,
        },
    )
    anchor = {name: torch.zeros(shape) for name, shape in parameter_shapes(spec, 0).items()}
    stage = OuterStage(spec, 0, anchor)
    local = {name: value.clone() for name, value in anchor.items()}
    small = [_others(spec, 0.25, seed) for seed in (1, 2)]
    steps = []
    for number, (what, progress) in enumerate(
        (("commit", 1.0), ("abort", 1.0), ("commit without it", 1.0), ("commit", 64.0), ("commit", 1.0))
    ):
        for i, value in enumerate(local.values()):
            value.sub_(_eighths(value.numel(), 7 * number + i, progress / 16).view_as(value))
        trained, error_before = _named(local), _named(stage.error)
        own = stage.propose(local)
        assert own is not None, "all values are finite"
        payloads = [own, *small] if what == "commit" else small
        if what == "abort":
            stage.abort()
        else:
            stage.commit([(data, 1.0) for data in payloads], what == "commit", local)
        steps.append(
            {
                "what": what,
                "local_before": trained,
                "error_before": error_before,
                "payload": own.hex(),
                "others": [] if what == "abort" else [data.hex() for data in small],
                "anchor": _named(stage.anchor),
                "local": _named(local),
                "error": _named(stage.error),
            }
        )
    return {
        "page": "training.md, section 9",
        "model": spec.model.model_dump(),
        "outer": {"chunk": 4, "top_k": 1, "error_decay": 0.5, "quantizer": "none"},
        "weights": "all 1; the own payload is the first of the manifest",
        "steps": steps,
    }


def _others(spec: RunSpec, scale: float, seed: int) -> bytes:
    layout = PayloadLayout(parameter_shapes(spec, 0), spec.outer)
    return encode(
        layout,
        {
            name: sparsify(_eighths(each.numel, 900 + seed + i, scale), each)
            for i, (name, each) in enumerate(layout.tensors.items())
        },
    )


_FRAME = (7, 4, 2, 1, 0, 5)
_FRAMES = (
    _FRAME,
    (0, 0, 0, 0, 0, 0),
    (7, 3, 2, 1, 1, 5),
    (0, 0, 2, 1, 2, 5),
    (7, 3, 2, 1, 0, 5),
    (8, 3, 2, 1, 0, 5),
)
"""Round, step, microbatch, boundary, direction and replica of frames."""


def links() -> dict[str, Any]:
    """What pipelines send: basis, perpendicular table, number formats, snapshots; and the order of work."""
    width, k, vocabulary = 4, 2, 3
    basis, table = orthonormal_basis(width, 1), _eighths(vocabulary * width, 70).view(vocabulary, width)
    values = torch.cat((_eighths(9, 71, 0.3), torch.zeros(3), torch.tensor([1e30, 0.0, 1.0]))).view(1, 5, 3)
    formats = []
    for dtype in ("bf16", "dither5", "dither3"):
        shift = shift_of(*_FRAME)
        headers, data = pack_activation("activation", values, dtype, shift)
        found = unpack_activation(headers, data, "activation", (1, 5, 3), dtype, shift)
        tensors = [[each.name, each.dtype.value, list(each.shape)] for each in headers]
        formats.append(
            {"dtype": dtype, "tensors": tensors, "bytes": data.hex(), "decoded": _finite(found.flatten())}
        )
    snapshot = snapshot_codec.encode(snapshot_codec.snapshot(table / 3))
    return {
        "page": "pipeline.md",
        "tol": 1e-6,
        "basis": {"width": width, "seed": 1, "columns": _rounded(basis)},
        "table": {
            "k": k,
            "table": _hex(table),
            "perpendicular": _rounded(perpendicular_table(table, basis[:, :k])),
        },
        "values": _hex(values),
        "shape": [1, 5, 3],
        "frame": list(_FRAME),
        "shifts": [[*each, shift_of(*each)] for each in _FRAMES],
        "formats": formats,
        "snapshot": {
            "table": _hex(table / 3),
            "shape": [vocabulary, width],
            "bytes": snapshot.hex(),
            "digest": snapshot_codec.snapshot_digest(snapshot, vocabulary, width),
        },
        "orders": [
            {
                "position": position,
                "members": 3,
                "microbatches": 4,
                "order": " ".join(
                    f"{each.kind[0].upper()}{each.microbatch}"
                    for each in one_forward_one_backward(position, 3, 4)
                ),
            }
            for position in range(3)
        ],
    }


def _finite(values: Tensor) -> list[float | None]:
    """JSON has no numbers that are not finite: null stands for them."""
    return [None if math.isnan(value) else value for value in _rounded(values)]


FILES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "identities": identities,
    "parameters": parameters,
    "forward": forward,
    "samples": samples,
    "inner_step": inner_step,
    "payload": payload,
    "outer_step": outer_step,
    "error_feedback": error_feedback,
    "links": links,
}


def text_of(name: str) -> str:
    """The content of a file: one line for each entry of its lists."""
    lines = []
    for key, value in FILES[name]().items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inner = ",\n  ".join(json.dumps(each) for each in value)
            lines.append(f"{json.dumps(key)}: [\n  {inner}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (FOLDER / f"{name}.json").write_text(text_of(name))


if __name__ == "__main__":
    main()
