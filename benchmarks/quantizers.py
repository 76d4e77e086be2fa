"""The error of the quantizers on real pseudo-gradients.

    python -m benchmarks.quantizers                  # 32 of 4096, as the codec's default: 5 minutes
    python -m benchmarks.quantizers --top-k 128      # as in the small experiment
    python -m benchmarks.quantizers --quick          # the first rounds only, a minute

A small experiment is trained. In some of its rounds the pseudo-gradient of the first replica with error
feedback, e' = beta e + (anchor - local), is encoded by the production codec with every quantizer. Error
feedback keeps the error for later rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables import Table, machine
from node.core.optimizer.outer_stage import OuterStage
from node.experiment.in_process_replica import LocalReplica
from node.experiment.in_process_swarm import LocalSwarm
from protocol.math.payload_layout import PayloadLayout, TensorLayout
from protocol.math.topk import sparsify
from protocol.run_files.resolve import resolve
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import PAYLOAD_QUANTIZERS

_ROUNDS = (2, 10, 25)
_QUICK_ROUNDS = (1, 2, 3)
SETTINGS: Mapping[str, Any] = {
    "swarm.stages": 4,
    "swarm.replicas": 2,
    "swarm.pipelines": 2,
    "inner.microbatches": 1,
    "inner.microbatch_size": 8,
    "link.k": 16,
}
"""The "tiny" preset (d 128, 4 layers, context 128, H 10, learning rate 3e-3) in four replicas."""


@dataclass(frozen=True)
class Squares:
    """Sums of squares over all tensors of a replica: all values, the chosen values, and their errors."""

    whole: float
    kept: float
    lost: float

    def __add__(self, other: Squares) -> Squares:
        return Squares(self.whole + other.whole, self.kept + other.kept, self.lost + other.lost)


def accumulated(outer: OuterStage, local: Mapping[str, Tensor], error_decay: float) -> dict[str, Tensor]:
    """e' of a stage, from which its next proposal is made, by name. The stage is unchanged."""
    return {
        name: error_decay * outer.error[name] + (anchor - local[name].detach().cpu().float())
        for name, anchor in outer.anchor.items()
    }


def everything_to_send(replica: LocalReplica, outer: OuterSpec) -> Iterator[Tensor]:
    """e' of all stages of `replica`, tensor by tensor."""
    for member in replica.members:
        for stage, state in member.outer.items():
            local = member.modules[stage].canonical_parameters()
            yield from accumulated(state, local, outer.error_decay).values()


def squares_of(tensor: Tensor, outer: OuterSpec) -> Squares:
    """The squares for the codec `outer` on `tensor`."""
    sparse = sparsify(tensor, TensorLayout(tuple(tensor.shape), outer))
    every_s = tensor.reshape(-1)
    chosen_s = (every_s if sparse.indices_s is None else every_s[sparse.indices_s]).double()
    lost_s = chosen_s - sparse.values_s.double()
    return Squares(*(float(each.double().square().sum()) for each in (tensor, chosen_s, lost_s)))


def measure(
    swarm: LocalSwarm, own: OuterSpec, codecs: Sequence[OuterSpec], rounds: Sequence[int]
) -> list[list[Squares]]:
    """Squares by codec, then by round. The swarm itself trains with its `own` codec."""
    found = []
    for round_number in range(1, rounds[-1] + 1):
        swarm.train()
        if round_number in rounds:
            tensors = list(everything_to_send(swarm.replicas[0], own))
            found.append(
                [sum((squares_of(each, codec) for each in tensors), Squares(0, 0, 0)) for codec in codecs]
            )
            print(f"round {round_number}", flush=True)
        swarm.exchange()
    return [list(of_codec) for of_codec in zip(*found, strict=True)]


def bytes_per_chunk(replica: LocalReplica, outer: OuterSpec) -> float:
    """Bytes of all payloads with codec `outer` for each `outer.chunk` parameters, with overhead."""
    shapes = [state.layout.shapes for member in replica.members for state in member.outer.values()]
    layouts = [PayloadLayout(each, outer) for each in shapes]
    numel = sum(tensor.numel for layout in layouts for tensor in layout.tensors.values())
    return sum(layout.nbytes for layout in layouts) * outer.chunk / numel


def table(quick: bool, top_k: int = 32) -> Table:
    """One row per quantizer: the share of the kept values' squares that is lost, by round."""
    spec = resolve("tiny", overrides={**SETTINGS, "outer.top_k": top_k})
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    codecs = [spec.outer.model_copy(update={"quantizer": each}) for each in PAYLOAD_QUANTIZERS]
    swarm = LocalSwarm(spec)
    replica, squares = swarm.replicas[0], measure(swarm, spec.outer, codecs, rounds)

    def row(codec: OuterSpec, of_rounds: Sequence[Squares]) -> tuple[str, ...]:
        shorter = codec.model_copy(update={"indices": "enumerative"})
        return (
            codec.quantizer,
            *(f"{100 * each.lost / each.kept:.2f} %" for each in of_rounds),
            f"{bytes_per_chunk(replica, codec):.1f}",
            f"{bytes_per_chunk(replica, shorter):.1f}",
        )

    kept = ", ".join(f"{100 * each.kept / each.whole:.0f} %" for each in squares[0])
    return Table(
        "Squared error of the quantizers on real pseudo-gradients",
        f"python -m benchmarks.quantizers --top-k {top_k}" + " --quick" * quick,
        (
            "quantizer",
            *(f"lost in round {round_number}" for round_number in rounds),
            "bytes per chunk, Elias-Fano",
            "bytes per chunk, enumerative",
        ),
        tuple(row(codec, of_rounds) for codec, of_rounds in zip(codecs, squares, strict=True)),
        (
            f"Of the squares of the values that are kept, {top_k} of {spec.outer.chunk}; these are {kept} of "
            "the squares of e' in these rounds. Before error feedback, which takes up the rest.",
            "Bytes of whole payloads of this small model, headers and magnitudes of its many small tensors "
            "included.",
            f"Measured {machine()}.",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--top-k", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(table(arguments.quick, arguments.top_k).markdown)


if __name__ == "__main__":
    main()
