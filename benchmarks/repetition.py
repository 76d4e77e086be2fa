"""How close a repetition of a replica's inner phase comes to it, for spot checks.

    python -m benchmarks.repetition                              # a minute on two cores
    python -m benchmarks.repetition --device cuda --preset 178m --steps 10

Two full replicas train some rounds. Then one repeats the inner phase of the other: from the same anchor, on
the same samples, with its own moments of AdamW, because moments stay with their replica. The distance of two
pseudo-gradients a and b is |a - b| / |a|.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from torch import Tensor

from benchmarks.tables import Table, machine
from node.core.worker.compute import Compute
from node.experiment.in_process_replica import LocalReplica
from node.experiment.in_process_swarm import LocalSwarm
from node.ipc.worker_calls import Precision
from protocol.math.sampling import sample_range
from protocol.run_files.resolve import resolve

Learned = Mapping[tuple[int, str], Tensor]


def learned(replica: LocalReplica) -> dict[tuple[int, str], Tensor]:
    """anchor - local of all parameters, float32 on the CPU."""
    found = {}
    for member in replica.members:
        for stage, outer in member.outer.items():
            for name, local in member.modules[stage].canonical_parameters().items():
                found[stage, name] = outer.anchor[name] - local.detach().float().cpu()
    return found


def distance(one: Learned, other: Learned) -> float:
    """|one - other| / |one|."""
    squares = sum(float((one[key] - other[key]).double().square().sum()) for key in one)
    return float((squares / sum(float(each.double().square().sum()) for each in one.values())) ** 0.5)


def phase(swarm: LocalSwarm, replica: int, samples_of: int) -> Learned:
    """What a replica learns in the next round on the samples of another one, from the anchor."""
    number, trainer = swarm.position + 1, swarm.replicas[replica]
    planned = swarm.plan.replicas[samples_of].index
    trainer.begin_round(number, sample_range(swarm.plan, swarm.spec, number, planned))
    trainer.train(range(swarm.spec.inner.steps))
    return learned(trainer)


def measured(preset: str, device: str, precision: str, steps: int, rounds: int) -> dict[str, float]:
    """The distances of one round, by what is compared."""
    size = {"swarm.stages": 1, "swarm.pipelines": 0, "inner.steps": steps, "inner.microbatches": 1}
    warm = {"inner.warmup_steps": 2 * steps, "rounds": rounds + 2, "data.validation_batches": 1}
    spec = resolve(preset, overrides={"swarm.replicas": 2, **size, **warm})

    def trained() -> LocalSwarm:
        swarm = LocalSwarm(spec, Compute(device, precision=Precision(precision)))
        for _ in range(rounds):
            swarm.train_round()
        return swarm

    first, second = trained(), trained()
    own = phase(first, 0, 0)
    return {
        "the same machine, with its own moments": distance(own, phase(second, 0, 0)),
        "another replica's moments": distance(own, phase(first, 1, 0)),
        "another replica's moments and samples": distance(own, phase(second, 1, 1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    found = measured(args.preset, args.device, args.precision, args.steps, args.rounds)
    command = f"python -m benchmarks.repetition --preset {args.preset} --device {args.device}"
    rows = tuple((what, f"{value:.4f}") for what, value in found.items())
    print(Table(f"Repeated inner phases, {machine()}", command, ("what repeats", "distance"), rows).markdown)


if __name__ == "__main__":
    main()
