"""The cost of projecting activations onto a link's subspace, and of packing them, relative to training.

    python -m benchmarks.projection            # about 2 minutes
    python -m benchmarks.projection --quick    # below 30 s

A member in the middle of a chain has two links. For each microbatch it expands one activation and compresses
one, and the same for gradients in the backward pass (protocol.math.subspace); it unpacks two messages
and packs two (protocol.codec.activation). This is timed on one core, and so is the forward and
backward pass of one layer. The share is that of a member with as many layers as in the preset.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.codec import cpu_seconds, one_core
from benchmarks.tables import Table
from node.core.model.stage import Stage
from protocol.codec.activation import pack_activation, pack_ids, unpack_activation, unpack_ids
from protocol.math.subspace import (
    ReceivingEnd,
    SendingEnd,
    orthonormal_basis,
)
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

CONTEXT = 256
"""Tokens of a microbatch. Attention over the presets' own contexts would make the shares smaller."""

DTYPES: tuple[str, ...] = ("bf16", "dither5", "dither3")


@dataclass(frozen=True)
class Cost:
    """Seconds per microbatch of a member with two links of width `k` (0: uncompressed), the best of several.

    `layer` is the forward and backward pass of one layer, `packing` by element type.
    """

    k: int
    layer: float
    projection: float
    packing: dict[str, float]

    def share(self, layers: int, dtype: str) -> float:
        """Share of the time of a member with `layers` layers."""
        extra = self.projection + self.packing[dtype]
        return extra / (layers * self.layer + extra)


def measure(spec: RunSpec, ks: list[int], repeats: int) -> list[Cost]:
    """The cost of each k. All take turns, so that other work on the machine slows all of them."""
    model, generator = spec.model, torch.Generator().manual_seed(0)
    stage = Stage(spec, 1)
    ids_bl = torch.randint(model.vocabulary, (1, model.context + 1), generator=generator)
    x_bld, grad_bld = torch.randn((2, 1, model.context, model.width), generator=generator)
    basis_dd = orthonormal_basis(model.width, 0)
    table_vd = torch.randn((model.vocabulary, model.width), generator=generator)
    links = [(SendingEnd(k, basis_dd), ReceivingEnd(k, basis_dd, table_vd)) for k in ks]

    def layer() -> None:
        leaf = x_bld.detach().requires_grad_()
        stage(leaf).backward(grad_bld)

    work: list[Callable[[], object]] = [layer]
    for sender, receiver in links:
        work.append(partial(_project, sender, receiver, x_bld, grad_bld, ids_bl[:, :-1]))
        compressed_blk = receiver.compress_backward(grad_bld)
        work += [
            lambda dtype=dtype, x_blk=compressed_blk: _pack(x_blk, ids_bl, model.vocabulary, dtype)
            for dtype in DTYPES
        ]
    layer_seconds, *seconds = cpu_seconds(repeats, *work)
    per_link = 1 + len(DTYPES)
    return [
        Cost(k, layer_seconds, seconds[i], dict(zip(DTYPES, seconds[i + 1 : i + per_link], strict=True)))
        for i, k in zip(range(0, len(seconds), per_link), ks, strict=True)
    ]


def _project(
    sender: SendingEnd, receiver: ReceivingEnd, x_bld: Tensor, grad_bld: Tensor, ids_bl: Tensor
) -> None:
    """A microbatch at both links: received from upstream, sent downstream, and back."""
    x_blk = sender.compress_forward(x_bld)
    receiver.expand_forward(x_blk, ids_bl)
    grad_blk = receiver.compress_backward(grad_bld)
    sender.expand_backward(grad_blk)


def _pack(x_blk: Tensor, ids_bl: Tensor, vocabulary: int, dtype: str) -> None:
    """A microbatch's messages at both links: an activation with its ids and a gradient, each way."""
    activation, data = pack_activation("x", x_blk, dtype)
    ids, id_data = pack_ids("tokens", ids_bl, vocabulary)
    headers, payload = (*activation, *ids), data + id_data
    unpack_activation(headers, payload, "x", tuple(x_blk.shape), dtype)
    unpack_ids(headers, payload, "tokens", tuple(ids_bl.shape), vocabulary)
    unpack_activation(*pack_activation("x", x_blk, dtype), "x", tuple(x_blk.shape), dtype)


def table(quick: bool) -> Table:
    """The presets 178m and 512m, or only the former, at several k."""
    rows = []
    for preset in ("178m",) if quick else ("178m", "512m"):
        own = resolve(preset)
        layers, d = own.model.layers // own.swarm.stages, own.model.width
        shape = {"model.layers": 3, "swarm.stages": 3, "model.context": CONTEXT}  # stage 1: one layer
        with one_core():
            costs = measure(resolve(preset, overrides=shape), [0, d, d // 8, d // 32], 5 if quick else 9)
        rows += [
            (
                preset,
                f"1/{d // cost.k}" if 0 < cost.k < d else "1" if cost.k else "none",
                f"{1e3 * layers * cost.layer:.0f}",
                f"{1e3 * cost.projection:.2f}",
                *(f"{1e3 * cost.packing[dtype]:.2f}" for dtype in DTYPES),
                *(f"{cost.share(layers, dtype):.1%}" for dtype in DTYPES),
            )
            for cost in costs
        ]
    return Table(
        "What projection and packing cost a member",
        "python -m benchmarks.projection" + (" --quick" if quick else ""),
        (
            "preset",
            "k/d",
            "layers, ms",
            "projection, ms",
            *(f"packing {dtype}, ms" for dtype in DTYPES),
            *(f"share, {dtype}" for dtype in DTYPES),
        ),
        tuple(rows),
        (
            f"Per microbatch of {CONTEXT} tokens, float32 on one core, the best of several: forward and "
            "backward through the layers that the preset gives a member (one was timed); and at its two "
            "links compressing, expanding, packing and unpacking activations, ids and gradients.",
            "A longer context adds attention to the layers and nothing to the links, so the share falls.",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What projection costs beside training.")
    parser.add_argument("--quick", action="store_true", help="one preset, fewer repeats")
    print(table(parser.parse_args().quick).markdown)


if __name__ == "__main__":
    main()
