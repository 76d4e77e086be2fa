"""Bytes that one replica sends in a round, with this codec and with others.

    python -m benchmarks.accounting

Nothing runs: the sizes of payloads follow from the spec. The notes have the assumptions about other methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.tables import Table
from node.core.model.shapes import payload_layout
from protocol.math.payload_layout import PayloadLayout
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

PRESET = "178m"
_INDEX_BITS_PAPER, _INDEX_BITS_RELEASED = 12, 64
_VALUE_BITS_PAPER, _VALUE_BITS_RELEASED = 2, 8

_VARIANTS = (
    ("elias-fano", "2bit"),
    ("enumerative", "2bit"),
    ("enumerative", "1bit"),
)
"""Of outer.indices and outer.quantizer."""

Bits = Callable[[PayloadLayout], float]


@dataclass(frozen=True)
class Scheme:
    """A method of exchange. `bits` gives the size of a round's messages for the parameters of a layout."""

    name: str
    bits: Bits


def dense(bits: int, times: int = 1) -> Bits:
    """Every parameter is sent with `bits` bits, `times` times per round."""
    return lambda layout: float(times * bits * sum(tensor.numel for tensor in layout.tensors.values()))


def chosen(index_bits: int, value_bits: int) -> Bits:
    """Index and value of every chosen entry, each with a fixed number of bits."""
    return lambda layout: float(
        (index_bits + value_bits) * sum(tensor.sent for tensor in layout.tensors.values())
    )


def entropy_bound(layout: PayloadLayout) -> float:
    """log2 C(n, k) for the indices of every chunk, and 2 bits for every value."""
    return sum(
        group.count * (math.log2(math.comb(group.size, group.k)) + 2 * group.k)
        for tensor in layout.tensors.values()
        for group in tensor.groups
    )


def coded(**options: str) -> Bits:
    """The whole payload of this codec, with `options` of the outer section."""

    def bits(layout: PayloadLayout) -> float:
        return 8.0 * PayloadLayout(layout.shapes, layout.outer.model_copy(update=options)).nbytes

    return bits


def _own(indices: str, quantizer: str) -> Scheme:
    return Scheme(f"hetnode, {indices}, {quantizer}", coded(indices=indices, quantizer=quantizer))


def schemes(steps: int) -> tuple[Scheme, ...]:
    """All schemes, for `steps` inner steps in a round."""
    return (
        Scheme(f"data parallel, float32 gradients in each of {steps} steps", dense(32, steps)),
        Scheme(f"data parallel, bf16 gradients in each of {steps} steps", dense(16, steps)),
        Scheme("DiLoCo, float32 pseudo-gradient", dense(32)),
        Scheme("DiLoCo, bf16 pseudo-gradient", dense(16)),
        Scheme(
            "SparseLoCo, as released: int64 index, uint8 code",
            chosen(_INDEX_BITS_RELEASED, _VALUE_BITS_RELEASED),
        ),
        Scheme(
            "SparseLoCo, as accounted: 12-bit index, 2-bit value",
            chosen(_INDEX_BITS_PAPER, _VALUE_BITS_PAPER),
        ),
        *(_own(*variant) for variant in _VARIANTS),
        Scheme("entropy bound of 2-bit values", entropy_bound),
    )


def rows_of(layouts: Mapping[int, PayloadLayout], steps: int) -> Iterator[tuple[str, ...]]:
    """The cells of the table, row by row."""
    # Many chunks make the header and the codebooks negligible.
    outer = next(iter(layouts.values())).outer
    chunks = 1 << 16
    many = PayloadLayout({"matrix": (chunks, outer.chunk)}, outer)
    pseudo_gradient = sum(dense(32)(layout) for layout in layouts.values())
    for scheme in schemes(steps):
        stages = [scheme.bits(layout) / 8 for layout in layouts.values()]
        per_chunk = scheme.bits(many) / 8 / chunks
        yield (
            scheme.name,
            f"{per_chunk:,.2f}" if per_chunk < 1000 else f"{per_chunk:,.0f}",
            f"{max(stages) / 1e6:,.3f}",
            f"{sum(stages) / 1e6:,.3f}",
            f"{pseudo_gradient / 8 / sum(stages):,.3g}x",
        )


def layouts_of(spec: RunSpec) -> dict[int, PayloadLayout]:
    """Payload layouts by stage."""
    return {stage: payload_layout(spec, stage) for stage in range(spec.swarm.stages)}


def table(quick: bool = False) -> Table:
    """The table. `quick` changes nothing."""
    spec = resolve(PRESET)
    layouts = layouts_of(spec)
    outer = spec.outer
    return Table(
        f"Bytes that one replica sends in a round: preset {PRESET}",
        "python -m benchmarks.accounting",
        (
            "scheme",
            f"bytes per chunk of {outer.chunk}",
            "largest stage MB",
            "model MB",
            "less than DiLoCo float32",
        ),
        tuple(rows_of(layouts, spec.inner.steps)),
        _notes(spec, sum(tensor.numel for layout in layouts.values() for tensor in layout.tensors.values())),
    )


def _notes(spec: RunSpec, parameters: int) -> tuple[str, ...]:
    return (
        f"{parameters:,} parameters in {spec.swarm.stages} stages, H {spec.inner.steps}, the "
        f"{spec.outer.top_k} largest of every {spec.outer.chunk} values; MB are 10^6 bytes. A message is "
        "counted once, as its replica makes it. How often it is carried depends on the exchange: here once "
        "to each of the other replicas, in a ring all-reduce among R replicas 2 (R - 1) / R times.",
        "Data parallel: every gradient once in every inner step, without compression. DiLoCo: all of the "
        "pseudo-gradient once a round.",
        "SparseLoCo as accounted: 12 bits for an index and 2 for a value, without codebooks, headers or "
        "padding. As released: int64 indices as torch.topk makes them, and quantized values as one uint8 "
        "each, gathered as they are; the codebook of each tensor (a mean, and a float for every bin) is not "
        "counted. Both get the entries that hetnode chooses: of a shorter chunk, as many in proportion.",
        "hetnode: the whole payload with header and codebooks, exactly as long as it is sent. Its signed "
        "descriptor, and what the sockets add, are measured under rounds. The preset has "
        f"{spec.outer.indices}, {spec.outer.quantizer}.",
        "Entropy bound: log2 C(n, k) bits for the indices of a chunk, any k of n being as likely as any "
        "other, and 2 bits for each value. Values of 1 bit can be below it, and lose more.",
    )


def main() -> None:
    print(table().markdown)


if __name__ == "__main__":
    main()
