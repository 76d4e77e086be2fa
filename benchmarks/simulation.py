"""Simulates swarms of `benchmarks.scaling` with the coordinator's production rules, and compares the two.

    python -m benchmarks.simulation                                # 100 and 1,000 nodes, without churn
    python -m benchmarks.simulation --nodes 1000 --rounds 200 --churn

80 % of the nodes are homes in pipelines, the others full replicas. :mod:`benchmarks.simulated_swarm` says
what is production code and what is replaced by its time. Efficiency is the tokens per second and node that
were committed, against those of `benchmarks.scaling` for 100 nodes.

With `--churn` homes are switched off without a word and come back later. How long they stay on is drawn from
a Weibull distribution whose shape is below 1, the form that studies of SETI@home's hosts found (Javadi,
Kondo, Vincent, Anderson, 2011), and how long they stay off from a lognormal one; the means are options.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.scaling import ScalingPoint, scaling
from benchmarks.simulated_swarm import Node, SimulatedSwarm
from benchmarks.tables import Table, machine
from node.cli.plan import capacity
from node.cli.spec import SpecOptions
from node.core.model.shapes import parameter_shapes
from node.views.plan import payload_bytes
from protocol.spec.run import RunSpec
from protocol.types import Capacity, Committed, Role, entries_of

HOME_SHARE = 0.8
HOME = capacity(50.0, 200.0, 40.0, math.inf, 40.0)
FULL = capacity(1000.0, 1000.0, 40.0, math.inf, 400.0)
WARMUP_ROUNDS = 3
"""Not counted: the first plan divides the work equally, and later ones by measured speed."""
_SHAPE = 0.4
"""Of the Weibull distribution: many short sessions, and a few very long ones."""
_OFF_SIGMA = 1.0
"""Of the logarithm of the time that a home is off."""


@dataclass(frozen=True)
class Churn:
    """Mean hours that a home is on and off. `seed` draws each of them."""

    on_hours: float
    off_hours: float
    seed: int = 0

    @property
    def _scale(self) -> float:
        return 3600 * self.on_hours / math.gamma(1 + 1 / _SHAPE)

    def seconds_on(self, chance: random.Random) -> float:
        """For how long a home stays on that was turned on now."""
        return chance.weibullvariate(self._scale, _SHAPE)

    def seconds_off(self, chance: random.Random) -> float:
        median = math.log(3600 * self.off_hours) - _OFF_SIGMA**2 / 2
        return chance.lognormvariate(median, _OFF_SIGMA)

    def apply(self, swarm: SimulatedSwarm, homes: Iterable[Node]) -> None:
        """Let `homes` go and come back for as long as the simulation runs."""
        chance = random.Random(self.seed)

        def stop(node: Node) -> None:
            swarm.stop(node)
            swarm.at(swarm.now + self.seconds_off(chance), partial(start, node))

        def start(node: Node) -> None:
            swarm.start(node)
            swarm.at(swarm.now + self.seconds_on(chance), partial(stop, node))

        for node in homes:
            # As at any instant of a long run: some are off, and the others are more likely in a long session.
            session = self._scale * chance.gammavariate(1 + 1 / _SHAPE, 1) ** (1 / _SHAPE)
            is_off = chance.random() * (self.on_hours + self.off_hours) < self.off_hours
            swarm.at(swarm.now + (0.0 if is_off else chance.random() * session), partial(stop, node))


@dataclass(frozen=True)
class Result:
    """What a simulated run did.

    Attributes:
        committed, aborted: decisions of a stage, after the warmup.
        round_seconds: the mean after the warmup.
        tokens_per_second: of the whole swarm, in committed payloads.
        lost: how often a peer was declared lost.
        plans: how many the coordinator has made.
        events: of all kinds.
        digest: of all events.
        cpu_seconds: that the simulation took.
    """

    nodes: int
    rounds: int
    committed: int
    aborted: int
    round_seconds: float
    tokens_per_second: float
    lost: int
    plans: int
    events: int
    digest: str
    cpu_seconds: float


def spec_of(nodes: int, rounds: int, preset: str = "1b", exchange: str = "gathered") -> RunSpec:
    """The run of `benchmarks.scaling`."""
    homes = round(HOME_SHARE * nodes)
    options = SpecOptions(preset, inner_steps=50, settings=["link.k=32"], rounds=rounds + 1)
    stages = options.spec().swarm.stages
    return options.spec(
        **{
            "inner.microbatches": 64,
            "outer.exchange": exchange,
            "swarm.replicas": nodes - homes,
            "swarm.pipelines": homes // stages,
        }
    )


def simulate(
    nodes: int, rounds: int, churn: Churn | None = None, preset: str = "1b", exchange: str = "gathered"
) -> Result:
    """Play `rounds` rounds after the warmup."""
    spec = spec_of(nodes, WARMUP_ROUNDS + rounds, preset, exchange)
    homes = spec.swarm.pipelines * spec.swarm.stages
    members: list[tuple[Role, Capacity]] = [(Role.REPLICA, FULL)] * spec.swarm.replicas
    members += [(Role.STAGE, HOME)] * homes
    parameters = [
        sum(math.prod(shape) for shape in parameter_shapes(spec, stage).values())
        for stage in range(spec.swarm.stages)
    ]
    began = time.process_time()
    swarm = SimulatedSwarm(spec, members, payload_bytes(spec), parameters)
    first = 0.0
    for decided in swarm.run(WARMUP_ROUNDS + rounds):
        if decided == WARMUP_ROUNDS:
            first = swarm.now
            if churn is not None:
                churn.apply(swarm, [each for each in swarm.nodes.values() if each.role is Role.STAGE])
    counted = [each for each in swarm.decisions if each.round_number > WARMUP_ROUNDS]
    # A weight of 1 is the work that the specification gives to each replica.
    payloads = [entry.descriptor for each in counted for entry in entries_of(each)]
    weight = sum(each.weight for each in payloads) / spec.swarm.stages
    tokens = weight * spec.samples_per_round(spec.inner.microbatches) * spec.model.context
    seconds = swarm.now - first
    return Result(
        nodes,
        rounds,
        committed=sum(isinstance(each, Committed) for each in counted),
        aborted=sum(not isinstance(each, Committed) for each in counted),
        round_seconds=seconds / rounds,
        tokens_per_second=tokens / seconds,
        lost=swarm.events["PeerLost"],
        plans=swarm.state.epoch,
        events=swarm.events.total(),
        digest=swarm.digest,
        cpu_seconds=time.process_time() - began,
    )


def forecasts(
    nodes: Sequence[int], preset: str = "1b", exchange: str = "gathered"
) -> dict[int, ScalingPoint]:
    """The weak scaling of `benchmarks.scaling`, by number of nodes; always with 100."""
    spec = spec_of(min(nodes), 1, preset, exchange)
    counts = sorted({100, *nodes})
    found = scaling(spec, payload_bytes(spec), HOME, FULL, HOME_SHARE, counts)
    return {point.nodes: point for point in found if point.kind == "weak"}


def row_of(result: Result, planned: ScalingPoint, base: ScalingPoint) -> tuple[str, ...]:
    each = base.tokens_per_second / base.nodes
    return (
        f"{result.nodes:,}",
        f"{result.rounds}",
        f"{result.committed} / {result.aborted}",
        f"{result.lost}",
        f"{result.round_seconds:.0f}",
        f"{planned.round_seconds:.0f}",
        f"{result.tokens_per_second / 1e6:.2f}",
        f"{planned.tokens_per_second / 1e6:.2f}",
        f"{result.tokens_per_second / result.nodes / each:.0%}",
        f"{planned.tokens_per_second / result.nodes / each:.0%}",
        f"{result.cpu_seconds / (WARMUP_ROUNDS + result.rounds):.1f}",
    )


def table(quick: bool) -> Table:
    nodes, rounds = ((50,), 3) if quick else ((100, 1000), 10)
    return table_of([simulate(each, rounds) for each in nodes], " --quick" * quick)


def table_of(results: Sequence[Result], options: str, exchange: str = "gathered") -> Table:
    planned = forecasts([each.nodes for each in results], exchange=exchange)
    return Table(
        "Simulated swarms",
        f"python -m benchmarks.simulation{options}",
        (
            *("nodes", "rounds", "committed / aborted", "peers lost", "round, s", "planned, s"),
            *("M tokens/s", "planned", "efficiency", "planned", "CPU of a round, s"),
        ),
        tuple(row_of(each, planned[each.nodes], planned[100]) for each in results),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="50 nodes and 3 rounds")
    parser.add_argument("--nodes", type=int, nargs="+", default=(100, 1000))
    parser.add_argument("--rounds", type=int, default=10, help=f"after {WARMUP_ROUNDS} that do not count")
    parser.add_argument("--exchange", choices=("gathered", "reduced"), default="gathered")
    parser.add_argument("--churn", action="store_true", help="homes go and come back")
    parser.add_argument("--on-hours", type=float, default=10.0, help="mean, with --churn")
    parser.add_argument("--off-hours", type=float, default=2.0, help="mean, with --churn")
    parser.add_argument("--seed", type=int, default=0, help="of the churn")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.rounds = (50,), 3
    churn = Churn(options.on_hours, options.off_hours, options.seed) if options.churn else None
    exchange = options.exchange
    results = [simulate(each, options.rounds, churn, exchange=exchange) for each in options.nodes]
    if options.json:
        print(json.dumps([asdict(each) for each in results], indent=2))
        return
    print(machine())
    print(table_of(results, "", exchange).markdown)


if __name__ == "__main__":
    main()
