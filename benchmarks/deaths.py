"""What deaths of members cost: validation loss of the anchor when seats die in each round, in one process.

    python -m benchmarks.deaths --seeds 0 1

Pipelines of four members train a small model. In each round each seat dies with a probability, at a uniform
step: it loses what it has learned in the round, and comes back with the next one as from its checkpoint. What
happens to the others of its replica is the row:

    none    nobody dies
    loses   what they have learned in this round is lost, too
    waits   they offer nothing in this round, and the next payload has what they have learned
    counts  they offer it in this round, with the weight of their finished steps
    next    as counts; a spare, which has no moments and no error feedback, takes the seat in the next round
    seat    that spare takes the seat at once; what it learns in this round is in its next payload
    sends   as seat; it sends in this round what it has, with the weight of its steps
    moments as sends; the spare has the moments of the same stage from another replica

Pairs of rows have the same deaths and samples.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from benchmarks.tables import Table, machine
from node.core.optimizer.outcome import WeightedPayload
from node.core.worker.compute import Compute
from node.data.stream import SampleStream, open_stream
from node.experiment.in_process_replica import LocalReplica, plan_of
from protocol.math.sampling import sample_range
from protocol.run_files.resolve import resolve
from protocol.spec.fixed import LEAST_SHARE
from protocol.spec.run import RunSpec

ROWS = ("none", "loses", "waits", "counts", "next", "seat", "sends", "moments")
SEATED = ("seat", "sends", "moments")
STAGES = 4


def spec_of(seed: int, rounds: int, replicas: int) -> RunSpec:
    """0.1 million parameters, links without compression."""
    shape = {"model.layers": STAGES, "model.width": 48, "model.feed_forward": 128, "model.context": 64}
    swarm = {"swarm.stages": STAGES, "swarm.replicas": 0, "swarm.pipelines": replicas, "link.k": 0}
    inner = {"inner.steps": 10, "inner.microbatches": 1, "inner.microbatch_size": 8}
    schedule = {"inner.warmup_steps": 20, "data.validation_batches": 32}
    return resolve("nano", overrides={"seed": seed, "rounds": rounds, **shape, **swarm, **inner, **schedule})


def deaths_of(seed: int, round_number: int, replicas: int, share: float, steps: int) -> list[dict[int, int]]:
    """By replica: the position and the step of each death."""
    drawn = np.random.Generator(np.random.Philox(key=[seed, round_number]))
    dies, when = drawn.random((replicas, STAGES)) < share, drawn.integers(0, steps, (replicas, STAGES))
    return [
        {position: int(when[i, position]) for position in range(STAGES) if dies[i, position]}
        for i in range(replicas)
    ]


def offered(
    spec: RunSpec, replica: LocalReplica, dead: Mapping[int, int], row: str, done: int
) -> dict[int, WeightedPayload]:
    """The payloads of the stages of a replica that count, after `done` steps of all its members."""
    steps = spec.inner.steps
    if row in SEATED:
        shares = {stage: 1 - dead.get(stage, 0) / steps for stage in range(STAGES)}
        least = 1.0 if row == "seat" else LEAST_SHARE
        able = [(stage, share) for stage, share in shares.items() if share >= least]
        return {stage: (replica.propose([stage], share)[stage], share) for stage, share in able}
    share = done / steps
    if dead and (row not in ("counts", "next") or share < LEAST_SHARE):
        return {}
    alive = [stage for stage in range(STAGES) if stage not in dead]
    return {stage: (payload, share) for stage, payload in replica.propose(alive, share).items()}


def lose(replica: LocalReplica, position: int) -> None:
    """What the member has learned in this round."""
    member = replica.members[position]
    for stage in member.stages:
        member.outer.load_local(stage, member.outer[stage].anchor)


def take_seat(replica: LocalReplica, position: int, number: int, donor: LocalReplica | None) -> None:
    """Let a spare take a seat in round `number`, with the moments of `donor`, if there is one."""
    member = replica.members[position]
    for stage in member.stages:
        member.outer[stage].reset(member.parameters(stage))
        member.outer.load_local(stage, member.outer[stage].anchor)
        member.inner.reset(stage)
        if donor is not None:
            member.inner.load_state_dict({stage: donor.host_of(stage).inner.state_dict()[stage]})
    member.inner.begin_round(number)


def train_phase(
    replica: LocalReplica, dead: Mapping[int, int], number: int, steps: int, donor: LocalReplica | None
) -> None:
    """The `steps` of a round, in which spares take the seats of `dead` at the steps of their deaths."""
    began = 0
    for position, step in sorted(dead.items(), key=lambda each: each[1]):
        replica.train(range(began, step))
        take_seat(replica, position, number, donor)
        began = step
    replica.train(range(began, steps))


def trained(spec: RunSpec, stream: SampleStream, row: str, share: float, warm: int) -> tuple[float, float]:
    """The validation loss after the last round, and the share of all steps behind committed payloads.

    Nobody dies in the first `warm` rounds.
    """
    plan = plan_of(spec)
    replicas = [LocalReplica(spec, each, Compute(), stream) for each in plan.replicas]
    counted = 0.0
    for number in range(1, spec.rounds + 1):
        drawn = deaths_of(spec.seed, number, len(replicas), share, spec.inner.steps)
        deaths: Sequence[Mapping[int, int]] = (
            drawn if row != "none" and number > warm else [{}] * len(replicas)
        )
        payloads, leaving = [], list[tuple[LocalReplica, int]]()
        for replica, planned, dead in zip(replicas, plan.replicas, deaths, strict=True):
            replica.begin_round(number, sample_range(plan, spec, number, planned.index))
            done = min((spec.inner.steps, *dead.values()))
            if row in SEATED:
                other = replicas[(planned.index + 1) % len(replicas)]
                train_phase(replica, dead, number, spec.inner.steps, other if row == "moments" else None)
            else:
                replica.train(range(done))
            replica.end_inner_phase()
            payloads.append(offered(spec, replica, dead, row, done))
            counted += sum(weight for _, weight in payloads[-1].values())
            for position in range(STAGES) if dead and row == "loses" else dead:
                if row == "next":
                    leaving.append((replica, position))
                elif row not in SEATED:
                    lose(replica, position)
        sums = [[each[stage] for each in payloads if stage in each] for stage in range(STAGES)]
        for replica, own in zip(replicas, payloads, strict=True):
            replica.settle(number, [(sums[stage], stage in own) for stage in range(STAGES)])
        for replica, position in leaving:
            take_seat(replica, position, number, None)
    replicas[0].load_anchor(spec.rounds)  # without what is not sent
    return replicas[0].validate(), counted / (spec.rounds * len(replicas) * STAGES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warm", type=int, default=0, help="rounds before the first in which seats die")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--share", type=float, default=0.1, help="of the seats, that die in a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[tuple[str, ...]]()
    for seed in arguments.seeds:
        spec = spec_of(seed, arguments.rounds, arguments.replicas)
        stream = open_stream(spec)
        for row in arguments.rows:
            began = time.perf_counter()
            loss, counted = trained(spec, stream, row, arguments.share, arguments.warm)
            seconds = time.perf_counter() - began
            rows.append((str(seed), row, f"{loss:.4f}", f"{counted:.1%}", f"{seconds:.0f}"))
            print(*rows[-1], flush=True)
    columns = "seed", "others of a replica", "loss", "steps that count", "seconds"
    title, notes = f"{arguments.share:.0%} of the seats die in a round", (machine(),)
    print(Table(title, "python -m benchmarks.deaths", columns, tuple(rows), notes).markdown)


if __name__ == "__main__":
    main()
