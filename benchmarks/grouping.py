"""How fast pipelines are formed, and how much faster their steps are: ``python -m benchmarks.grouping``.

Swarms of homes (uplinks of 5 to 500 Mb/s, 2 to 80 TFLOP/s, 12 to 48 GB, one in five without an endpoint) form
pipelines for the preset 178m. The output has the seconds of this search, and the predicted inner step of the
slowest pipeline: as formed, in order of arrival, and at random (the best of 5 draws). The last two ignore
memory, and are inf if the pipelines cannot be connected.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from math import inf

from coordinator.placement.cost_model import Costs, Survey
from coordinator.placement.start import form_pipelines, initial_plan
from coordinator.run.state.records import Peer
from coordinator.status.cause_text import cause_text
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.status import Cause
from protocol.types import Capacity, Lifecycle, Member, PeerId, Plan, Role

_SIZES = (
    (8, 2, 4),
    (60, 10, 12),
    (100, 25, 4),
    (500, 125, 4),
    (1000, 250, 4),
    (1000, 125, 8),
    (1000, 62, 16),
)
"""Peers, pipelines, stages."""
_DRAWS = 5


def homes(count: int, coin: random.Random) -> list[Peer]:
    """Peers whose speeds are spread evenly on a logarithmic scale."""

    def peer(arrival: int) -> Peer:
        capacity = Capacity(
            device="cuda",
            memory_bytes=int(coin.choice([12, 16, 24, 48]) * 1e9),
            threads=8,
            flops=2e12 * 40 ** coin.random(),
            uplink=5e6 / 8 * 100 ** coin.random(),
            downlink=20e6 / 8 * 50 ** coin.random(),
            round_trip=0.01 * 10 ** coin.random(),
        )
        endpoint = f"10.0.0.1:{arrival}" if coin.random() < 0.8 else ""
        return Peer(PeerId(f"peer-{arrival}"), Role.STAGE, capacity, endpoint, arrival, Lifecycle.READY)

    return [peer(arrival) for arrival in range(1, count + 1)]


def slowest(spec: RunSpec, survey: Survey, chains: Sequence[Sequence[Member]]) -> float:
    costs = Costs(spec, survey)
    return max(costs.step(chain, [spec.link.k] * (len(chain) - 1)).seconds for chain in chains)


def in_order_of_arrival(spec: RunSpec, survey: Survey, peers: Sequence[Peer]) -> float:
    """The placement of the coordinator without measurements."""
    blank = [
        Peer(each.peer, each.role, Capacity("cuda", 0, 8), each.endpoint, each.arrival, each.lifecycle)
        for each in peers
    ]
    plan = initial_plan(blank, spec)
    return slowest(spec, survey, [each.members for each in plan.replicas]) if isinstance(plan, Plan) else inf


def at_random(spec: RunSpec, survey: Survey, peers: Sequence[Peer], coin: random.Random) -> float:
    def drawn() -> float:
        shuffled = [
            Peer(each.peer, each.role, Capacity("cuda", 0, 8), each.endpoint, arrival, each.lifecycle)
            for arrival, each in enumerate(coin.sample(peers, len(peers)))
        ]
        return in_order_of_arrival(spec, survey, shuffled)

    return min(drawn() for _ in range(_DRAWS))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=1)
    seed = options.parse_args().seed
    print("peers  pipelines  stages  members  seconds     step  arrival   random")
    for count, pipelines, stages in _SIZES:
        coin = random.Random(seed)
        peers = homes(count, coin)
        spec = resolve(
            "178m",
            overrides={
                "model.layers": max(12, stages),
                "swarm.stages": stages,
                "swarm.pipelines": pipelines,
                "swarm.replicas": 0,
                "swarm.members": min(stages, count // pipelines),
            },
        )
        survey = Survey({each.peer: each.capacity for each in peers})
        began = time.perf_counter()
        chains = form_pipelines(spec, survey, peers, pipelines)
        seconds = time.perf_counter() - began
        if isinstance(chains, Cause):
            print(f"{count:5}{pipelines:11}{stages:8}{seconds:18.2f}  {cause_text(chains)}")
            continue
        members = sum(len(chain.members) for chain in chains)
        step = slowest(spec, survey, [chain.members for chain in chains])
        arrival = in_order_of_arrival(spec, survey, peers)
        chance = at_random(spec, survey, peers, coin)
        shape = f"{count:5}{pipelines:11}{stages:8}{members:9}"
        print(f"{shape}{seconds:9.2f}{step:7.1f} s{arrival:7.1f} s{chance:7.1f} s")


if __name__ == "__main__":
    main()
