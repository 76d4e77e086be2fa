"""The loss of stage pools against that of chains: validation loss of the anchor, in one process.

    python -m benchmarks.paths --out FILE --seeds 0 1 2      # a stop continues where FILE ends
    python -m benchmarks.paths --out FILE --seeds            # the table of FILE
    python -m benchmarks.paths --out FILE --warm 500 --total 300

Four holders of each of four stages train a small model through dithered links. Each holder is a participant
of its stage's round: own local weights, moments and error feedback, and a payload with the weight of the
samples that it has processed. Each microbatch takes a path through one holder of every stage, forward and
back. All rows train the same microbatches in the same steps, from a cold start; the paths are the row:

    chains          holder i of each stage with holder i of the next; clipped by the norm of all stages
    kept            drawn for each round, and kept in it; clipped by the norm of the own stage, as all pools
    random          drawn for each step
    chains 4:2:1:1  as chains, which take these shares of the microbatches
    pools 4:2:1:1   as kept: the holders of each stage take these shares
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.tables import Table, machine
from node.checkpoint.node_checkpoint import Restored
from node.core.optimizer.outcome import WeightedPayload
from node.core.optimizer.outer_state import embedding_of
from node.core.worker.compute import Compute
from node.core.worker.trainer import Trainer
from node.data.stream import SampleStream, open_stream
from node.experiment.comparison import interval_of
from node.experiment.in_process_replica import LocalReplica, plan_of
from node.ipc.worker_calls import Message
from protocol.math.sampling import sample_range
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

STAGES = HOLDERS = 4
SLOTS = 8
"""Microbatches of a step."""
EQUAL, UNEQUAL = (2, 2, 2, 2), (4, 2, 1, 1)


@dataclass(frozen=True)
class Row:
    """Microbatches of a step for each holder of a stage; how often paths are drawn, None: never."""

    name: str
    shares: tuple[int, ...]
    drawn: str | None

    def paths(self, seed: int, round_number: int, step: int) -> np.ndarray:
        """The holder [SLOTS, STAGES] of each microbatch at each stage."""
        holders = np.repeat(np.arange(HOLDERS), self.shares)
        if self.drawn is None:
            return np.tile(holders[:, None], (1, STAGES))
        key = [seed, round_number << 16 | (step if self.drawn == "step" else 0)]
        chance = np.random.Generator(np.random.Philox(key=key))
        return np.stack([chance.permutation(holders) for _ in range(STAGES)], axis=1)


ROWS = (
    Row("chains", EQUAL, None),
    Row("kept", EQUAL, "round"),
    Row("random", EQUAL, "step"),
    Row("chains 4:2:1:1", UNEQUAL, None),
    Row("pools 4:2:1:1", UNEQUAL, "round"),
)
PAIRS = (
    ("kept", "chains"),
    ("random", "chains"),
    ("pools 4:2:1:1", "chains 4:2:1:1"),
    ("pools 4:2:1:1", "chains"),
)


def spec_of(seed: int, steps: int, total: int) -> RunSpec:
    """0.2 million parameters. Links with k/d = 1/8, five bits for activations and three for gradients."""
    shape = {"model.layers": STAGES, "model.width": 64, "model.feed_forward": 176, "model.context": 64}
    swarm = {"swarm.stages": STAGES, "swarm.replicas": 0, "swarm.pipelines": HOLDERS}
    links = {"link.k": 8, "link.dtype": "dither5", "link.gradient_dtype": "dither3"}
    inner = {"inner.steps": steps, "inner.microbatches": SLOTS // HOLDERS, "inner.microbatch_size": 2}
    schedule = {"inner.warmup_steps": 20, "data.validation_batches": 128, "rounds": total // steps}
    return resolve("nano", overrides={"seed": seed, **shape, **swarm, **links, **inner, **schedule})


@dataclass(frozen=True)
class Swarm:
    """The holders of all stages: `replicas[h]` has holder h of each stage."""

    spec: RunSpec
    row: Row
    stream: SampleStream
    replicas: Sequence[LocalReplica]

    def member(self, holder: int, stage: int) -> Trainer:
        return self.replicas[holder].members[stage]

    def step(self, round_number: int, step: int, first: int) -> Counter[tuple[int, int]]:
        """An inner step on the samples from ordinal `first` on. Microbatches by holder and stage."""
        paths = self.row.paths(self.spec.seed, round_number, step)
        size = self.spec.inner.microbatch_size
        for slot, path in enumerate(paths):
            members = [self.member(int(holder), stage) for stage, holder in enumerate(path)]
            ordinals = range(first + slot * size, first + (slot + 1) * size)
            message: Message | None = None
            for stage, member in enumerate(members):
                tokens = None if stage else self.stream.read(ordinals)
                message = member.hosted.forward((round_number, step, slot), message, tokens)
            message = None
            for member in reversed(members):
                message = member.hosted.backward(slot, message, SLOTS)
        counts = Counter((int(holder), stage) for path in paths for stage, holder in enumerate(path))
        for (holder, stage), count in counts.items():
            # The mean over the microbatches of this holder.
            for parameter in self.member(holder, stage).parameters(stage).values():
                if parameter.grad is not None:
                    parameter.grad.mul_(SLOTS / count)
        for holder in range(HOLDERS):
            norms = [member.squared_gradient_norm() for member in self.replicas[holder].members]
            for stage, squares in enumerate(norms):
                norm = math.sqrt(squares if self.row.drawn else math.fsum(norms))
                self.member(holder, stage).apply(step, norm)
        return counts

    def round(self, round_number: int, samples: Sequence[range]) -> None:
        """A round on `samples`, which are in one piece."""
        steps, processed = self.spec.inner.steps, Counter[tuple[int, int]]()
        for replica, each in zip(self.replicas, samples, strict=True):
            replica.begin_round(round_number, each)
        for step in range(steps):
            first = samples[0].start + step * SLOTS * self.spec.inner.microbatch_size
            processed += self.step(round_number, step, first)
        usual = steps * self.spec.inner.microbatches
        offered = list[dict[int, WeightedPayload]]()
        for holder, replica in enumerate(self.replicas):
            replica.end_inner_phase()
            payloads = replica.propose(range(STAGES))
            weighted = {
                stage: (payload, processed[holder, stage] / usual) for stage, payload in payloads.items()
            }
            offered.append(weighted)
        sums = [[each[stage] for each in offered if stage in each] for stage in range(STAGES)]
        for replica, own in zip(self.replicas, offered, strict=True):
            replica.settle(round_number, [(sums[stage], stage in own) for stage in range(STAGES)])


Anchors = dict[int, dict[str, Tensor]]
"""The committed state of each stage."""


def trained(
    spec: RunSpec, stream: SampleStream, row: Row, start: Anchors | None = None, first_sample: int = 0
) -> LocalReplica:
    """A replica with the anchor after the last round, and nothing else. It begins from `start`."""
    plan = replace(plan_of(spec), first_sample=first_sample)
    # One index for all: the dithers of a link follow from it and from the microbatch, on all paths.
    replicas = [LocalReplica(spec, replace(each, index=0), Compute(), stream) for each in plan.replicas]
    for member in (member for replica in replicas for member in replica.members if start is not None):
        assert start is not None
        embedding = None if 0 in member.stages else embedding_of(start[0])
        held = {stage: start[stage] for stage in member.stages}
        member.load_checkpoint(Restored(0, held, embedding, None))
    swarm = Swarm(spec, row, stream, replicas)
    for number in range(1, spec.rounds + 1):
        swarm.round(number, [sample_range(plan, spec, number, each.index) for each in plan.replicas])
    replicas[0].load_anchor(spec.rounds)
    return replicas[0]


def losses(replica: LocalReplica) -> tuple[float, float]:
    """The validation loss, in nats a byte: through links, and of the plain model."""
    through_links = replica.validate()
    replica.connect([0] * (STAGES - 1))
    return through_links, replica.validate()


def base(seed: int, steps: int) -> Anchors:
    """What chains of H = 10 learn from a cold start in `steps`."""
    spec = spec_of(seed, 10, steps)
    replica = trained(spec, open_stream(spec), ROWS[0])
    return {stage: dict(replica.host_of(stage).outer[stage].committed) for stage in range(STAGES)}


def read(file: Path, warm: int) -> dict[tuple[str, int, int], dict[str, float]]:
    """What is in `file` with these steps before, by row, H and seed."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [each for each in map(json.loads, lines) if each["warm"] == warm]
    return {(each["row"], each["steps"], each["seed"]): each for each in found}


def table(found: dict[tuple[str, int, int], dict[str, float]], lengths: Iterable[int]) -> Table:
    rows = list[tuple[str, ...]]()
    for steps, (mine, other) in product(lengths, PAIRS):
        seeds = sorted(
            {seed for _, _, seed in found if {(mine, steps, seed), (other, steps, seed)} <= found.keys()}
        )
        if not seeds:
            continue
        cells = []
        for loss in ("loss", "plain"):
            deltas = [
                100 * (found[mine, steps, seed][loss] / found[other, steps, seed][loss] - 1) for seed in seeds
            ]
            interval = interval_of(deltas)
            cells.append(f"{sum(deltas) / len(deltas):+.2f} %")
            cells.append("" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}")
        mean = sum(found[other, steps, seed]["loss"] for seed in seeds) / len(seeds)
        rows.append((str(steps), mine, other, f"{mean:.3f}", str(len(seeds)), *cells))
    columns = "H", "paths", "against", "its loss", "seeds", "difference", "95 %", "plain model", "95 %"
    title = "Loss of stage pools against chains, paired by seed"
    return Table(title, "python -m benchmarks.paths", columns, tuple(rows), (machine(),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each trial")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 30, 50], help="of a round, H")
    parser.add_argument("--rows", nargs="+", default=[row.name for row in ROWS], metavar="ROW")
    parser.add_argument("--total", type=int, default=450, help="inner steps")
    parser.add_argument("--warm", type=int, default=0, help="inner steps of chains before, with H = 10")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bases = dict[int, Anchors]()
    for seed, steps, row in product(arguments.seeds, arguments.steps, ROWS):
        if row.name not in arguments.rows or (row.name, steps, seed) in read(arguments.out, arguments.warm):
            continue
        if arguments.warm and seed not in bases:
            bases = {seed: base(seed, arguments.warm)}
        spec, began = spec_of(seed, steps, arguments.total), time.perf_counter()
        first = arguments.warm * SLOTS * spec.inner.microbatch_size
        loss, plain = losses(trained(spec, open_stream(spec), row, bases.get(seed), first))
        line = {"row": row.name, "steps": steps, "seed": seed, "loss": loss, "plain": plain}
        line |= {"total": arguments.total, "warm": arguments.warm}
        line |= {"seconds": round(time.perf_counter() - began)}
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
    print(table(read(arguments.out, arguments.warm), arguments.steps).markdown)


if __name__ == "__main__":
    main()
