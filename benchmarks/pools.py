"""How much more homes train in stage pools than in chains, where they come and go: no messages, only times.

    python -m benchmarks.pools

Homes have speeds 4 : 2 : 1 and uplinks of 20, 50 or 100 Mb/s, and each is on and off for times drawn as in
:mod:`benchmarks.simulation` (10 and 2 hours in the mean). Each takes as long for a microbatch of a stage as
the cost model says of a middle one: the longer of computing it and of sending its two messages. Percent are
of what all homes that are on at a moment could train together, if each were always busy.

    chains      groups of S homes of like speed, made anew for each round. Where one goes, the others have
                finished some steps, which count; the rest of the round they are idle. Who comes waits for it
    replaced    the same, and a spare takes the seat after 20 s, if there is one: homes that are no part of a
                chain, or came back meanwhile and have loaded the stage. A share of the homes is kept as
                spares, that of which most is trained
    pools       each home serves one stage, and the slowest stage sets the pace. Who comes serves the slowest
                stage as soon as it has loaded the stage; nobody waits for anybody. An upper bound: paths and
                queues cost nothing

Chains are as good as they can be here, too: they form from all homes in each round without moving any state.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.simulation import Churn
from benchmarks.tables import Table, machine
from coordinator.placement.cost_model import Costs, Survey
from coordinator.run.state.records import Peer
from node.cli.plan import capacity
from node.core.model.shapes import parameter_shapes
from protocol.math.flops import microbatch_flops
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Lifecycle, PeerId, Role, StageRange

SHAPES = {
    "1b, 4 stages": ("1b", {"swarm.stages": 4, "link.k": 96}),
    "8b, 10 stages": (
        "70b",
        {
            "model.vocabulary": 128_256,
            "model.width": 4096,
            "model.layers": 32,
            "model.heads": 32,
            "model.key_value_heads": 8,
            "model.feed_forward": 14_336,
            "model.context": 2048,
            "swarm.stages": 10,
            "link.k": 192,
        },
    ),
    "70b, 40 stages": ("70b", {"swarm.stages": 40, "link.k": 384}),
}
SPEEDS, UPLINKS, DOWNLINK = (40.0, 20.0, 10.0), (20.0, 50.0, 100.0), 200.0
"""TFLOP/s, Mb/s."""
LINKED_SECONDS = 20.0
"""Until a loss is noticed and a spare is linked in."""
STATE_BYTES = 8
"""Of a parameter, for a home that comes: anchor and momentum."""
SPARES = (0.0, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Home:
    """When a home is on, as (from, to) in seconds, and how many microbatches of a stage it does in one."""

    rate: float
    sessions: tuple[tuple[float, float], ...]

    def leaves(self, now: float) -> float | None:
        """When the session at `now` ends; None if the home is off then."""
        return next((end for begin, end in self.sessions if begin <= now < end), None)


@dataclass(frozen=True)
class Setting:
    """Homes over `rounds` rounds of `seconds`; `load` seconds until who comes has the state of a stage."""

    homes: tuple[Home, ...]
    stages: int
    rounds: int
    seconds: float
    load: float

    def ready(self, start: float) -> list[tuple[Home, float]]:
        """The homes that are on at `start` and have their stage, fastest first, and when each leaves."""
        found = []
        for home in self.homes:
            begin = next((begin for begin, end in home.sessions if begin <= start < end), None)
            leaves = home.leaves(start)
            if begin is not None and leaves is not None and (begin + self.load <= start or begin < 0):
                found.append((home, leaves))
        return sorted(found, key=lambda each: -each[0].rate)

    def comes(self, start: float) -> list[tuple[float, Home, float]]:
        """Those that come in the round from `start` on: when they have their stage, and when they leave."""
        found = []
        for home in self.homes:
            for begin, end in home.sessions:
                if start < begin + self.load < min(end, start + self.seconds):
                    found.append((begin + self.load, home, end))
        return sorted(found, key=lambda each: each[0])

    @property
    def most(self) -> float:
        """What all homes that are on could train, in microbatches through all stages."""
        last = self.rounds * self.seconds
        on = sum(
            home.rate * max(0.0, min(end, last) - max(begin, 0.0))
            for home in self.homes
            for begin, end in home.sessions
        )
        return on / self.stages


def chains(setting: Setting, spares: float | None) -> float:
    """The share of :attr:`Setting.most` that chains train. `spares`: None without replacement."""
    done, size = 0.0, setting.stages
    for number in range(setting.rounds):
        start = number * setting.seconds
        ready = setting.ready(start)
        count = int(len(ready) * (1.0 - (spares or 0.0))) // size
        # The slowest homes are the spares; chains are of like speed.
        members, left = ready[: count * size], ready[count * size :]
        waiting = [(start, *each) for each in left] + setting.comes(start) if spares is not None else []
        begun = []
        for index in range(count):
            chain = members[index * size : (index + 1) * size]
            begun.append(_Chain(start, min(home.rate for home, _ in chain), [leaves for _, leaves in chain]))
        done += _work_of(begun, waiting, start + setting.seconds)
    return done / setting.most


@dataclass(frozen=True)
class _Chain:
    """A chain that trains from `since` on, until the first of its members leaves."""

    since: float
    rate: float
    leaving: list[float]

    @property
    def breaks(self) -> float:
        return min(self.leaving)


def _work_of(chains: list[_Chain], waiting: list[tuple[float, Home, float]], end: float) -> float:
    """Microbatches of `chains` to `end`. `waiting`: when each spare has its stage, and when it leaves."""
    done = 0.0
    while chains:
        broken = min(chains, key=lambda each: each.breaks)
        chains.remove(broken)
        done += broken.rate * max(0.0, min(broken.breaks, end) - broken.since)
        others = [each for each in broken.leaving if each > broken.breaks]
        found, most = None, 0.0
        for spare in waiting:
            since, until = max(broken.breaks + LINKED_SECONDS, spare[0]), min([*others, spare[2], end])
            work = min(spare[1].rate, broken.rate) * (until - since)
            found, most = (spare, work) if work > most else (found, most)
        if found is not None:
            waiting.remove(found)
            since = max(broken.breaks + LINKED_SECONDS, found[0])
            chains.append(_Chain(since, min(broken.rate, found[1].rate), [*others, found[2]]))
    return done


def pools(setting: Setting) -> float:
    """The share of :attr:`Setting.most` that pools train."""
    done = 0.0
    for number in range(setting.rounds):
        start = number * setting.seconds
        sums, changes = [0.0] * setting.stages, list[tuple[float, int, float]]()
        for home, leaves in setting.ready(start):  # fastest first: the sums become alike
            stage = min(range(setting.stages), key=lambda each: sums[each])
            sums[stage] += home.rate
            changes.append((leaves, stage, -home.rate))
        coming = [(at, -1, 0.0, home, leaves) for at, home, leaves in setting.comes(start)]
        queue = sorted([(*each, None, 0.0) for each in changes] + coming, key=lambda each: each[0])
        now = start
        while queue and queue[0][0] < start + setting.seconds:
            at, stage, change, home, leaves = queue.pop(0)
            done += min(sums) * (at - now)
            now = at
            if home is not None:
                stage, change = min(range(setting.stages), key=lambda each: sums[each]), home.rate
                queue.append((leaves, stage, -home.rate, None, 0.0))
                queue.sort(key=lambda each: each[0])
            sums[stage] += change
        done += min(sums) * (start + setting.seconds - now)
    return done / setting.most


def spec_of(shape: str, nodes: int) -> RunSpec:
    preset, overrides = SHAPES[shape]
    swarm = {"swarm.replicas": 0, "swarm.pipelines": nodes // int(str(overrides["swarm.stages"]))}
    links = {"link.dtype": "dither5", "link.gradient_dtype": "dither3"}
    inner = {"inner.steps": 30, "inner.microbatches": 64}
    return resolve(preset, overrides={**overrides, **swarm, **links, **inner})


def peers_of(nodes: int, seed: int) -> list[Peer]:
    chance = random.Random(seed)
    drawn = [(chance.choice(SPEEDS), chance.choice(UPLINKS)) for _ in range(nodes)]
    return [
        Peer(
            PeerId(f"home-{i:04}"), Role.STAGE, capacity(uplink, DOWNLINK, 30.0, math.inf, speed), "here", i,
            Lifecycle.READY,
        )
        for i, (speed, uplink) in enumerate(drawn)
    ]  # fmt: skip


def rate_of(spec: RunSpec, peer: Peer) -> float:
    """Microbatches of one middle stage in a second: computed and sent beside each other."""
    middle = spec.swarm.stages // 2
    compute = microbatch_flops(spec, StageRange(middle, middle + 1)) / peer.capacity.flops
    sizes = Costs(spec, Survey({peer.peer: peer.capacity})).sizes(spec.link.k)
    return 1.0 / max(compute, sum(sizes) / peer.capacity.uplink)


def setting_of(shape: str, nodes: int, hours: float, rounds: int, seed: int) -> Setting:
    spec, churn = spec_of(shape, nodes), Churn(10.0, 2.0)
    chance, seconds = random.Random(1000 + seed), 3600 * hours
    parameters = sum(math.prod(each) for each in parameter_shapes(spec, spec.swarm.stages // 2).values())
    homes = []
    for peer in peers_of(nodes, seed):
        # The runs-in before 0 brings the sessions to their steady state.
        now, sessions = -3600 * 200.0, []
        while now < rounds * seconds:
            end = now + churn.seconds_on(chance)
            sessions.append((now, end))
            now = end + churn.seconds_off(chance)
        homes.append(Home(rate_of(spec, peer), tuple(each for each in sessions if each[1] > 0)))
    load = STATE_BYTES * parameters / (DOWNLINK / 8 * 1e6)
    return Setting(tuple(homes), spec.swarm.stages, rounds, seconds, load)


def table(shapes: Sequence[str], nodes: Sequence[int], hours: Sequence[float], seeds: int) -> Table:
    rows = []
    for shape, count, each in product(shapes, nodes, hours):
        if count < 2 * spec_of(shape, count).swarm.stages:
            continue
        rounds = max(4, round(48 / each))
        drawn = [setting_of(shape, count, each, rounds, seed) for seed in range(seeds)]
        without = sum(chains(one, None) for one in drawn) / seeds
        shares = {share: sum(chains(one, share) for one in drawn) / seeds for share in SPARES}
        best = max(shares, key=lambda share: shares[share])
        pooled = sum(map(pools, drawn)) / seeds
        gain = f"{pooled / shares[best] - 1:+.0%}"
        figures = f"{without:.0%}", f"{shares[best]:.0%} ({best:.0%})", f"{pooled:.0%}", gain
        rows.append((shape, f"{count}", f"{each:g}", *figures))
    return Table(
        "Chains and pools of homes that come and go",
        "python -m benchmarks.pools",
        ("model", "homes", "round, h", "chains", "replaced (spares)", "pools", "pools against replaced"),
        tuple(rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=(40, 200, 1000))
    parser.add_argument("--hours", type=float, nargs="+", default=(0.25, 1.0, 4.0))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    print(table(list(SHAPES), options.nodes, options.hours, options.seeds).markdown)


if __name__ == "__main__":
    main()
