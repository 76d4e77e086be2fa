"""How much more homes train in stage pools than in chains, where they come and go: no messages, only times.

    python -m benchmarks.pools              # homes of 4 : 2 : 1
    python -m benchmarks.pools --placement  # production chains against those of like speed
    python -m benchmarks.pools --goodput    # 16 equal replicas that fail every two hours

Homes have speeds 4 : 2 : 1 and uplinks of 20, 50 or 100 Mb/s, and each is on and off for times drawn as in
:mod:`benchmarks.simulation` (10 and 2 hours in the mean). Each takes as long for a microbatch of a stage as
the cost model says of a middle one: the longer of computing it and of sending its two messages. Who comes
chooses the weakest stage and loads its anchor; a home changes to a weaker stage where that helps, and loads
that one. Who goes takes along what its own stage has learned from it in this round. Percent are of what all
homes that are on at a moment could train together, if each were always busy.

    chains      of one home a stage and of like speed, made anew for each round. Where one goes, the others
                are idle for the rest of the round, in which their work counts. Who comes waits for the next
    replaced    the same, and a spare takes the seat after 20 s, if there is one: a home that is in no chain,
                comes, or is left of a chain without a spare. One that follows another stage loads this one
                first. A share of the homes is kept as spares, that of which most is trained
    moved       as replaced, and all homes load a stage anew at the start of each round, so that as many
                homes of like speed as there are form chains
    paused      pools, of which the slowest stage sets the pace; where a home goes, all paths wait for 20 s
    pools       the same, and no home waits: the step has other microbatches for these seconds

Pools lie between the last two; queues cost nothing in both. In the chains of the production placement fast
homes have several stages.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from benchmarks.simulation import Churn
from benchmarks.tables import Table, machine
from coordinator.placement.cost_model import Costs, Survey
from coordinator.placement.start import initial_plan
from coordinator.run.state.records import Peer
from node.cli.plan import capacity
from node.core.model.shapes import parameter_shapes
from protocol.math.flops import microbatch_flops
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Lifecycle, Member, PeerId, Plan, Role, StageRange

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
SPARES = (0.0, 0.05)
FAILING, FAILS_SECONDS = 16, 2 * 3600.0
"""Replicas, and the mean time to a failure of each."""
BACK_SECONDS, BACK_LOAD = 120.0, 90.0
"""Until a home that failed is on again, and until it has its stage then."""


@dataclass(frozen=True)
class Home:
    """When a home is on, as (from, to) in seconds, and how many microbatches of a stage it does in one."""

    rate: float
    sessions: tuple[tuple[float, float], ...]


class Moves(Enum):
    """For what homes change their stages: as many homes of each speed, or as much speed, for each stage."""

    NONE, BY_COUNT, BY_SUM = range(3)


@dataclass
class Stay:
    """A home that has the anchor of `stage` from `since` to `until`; then it goes, or `moves` to another."""

    home: int
    rate: float
    stage: int
    since: float
    until: float = math.inf
    moves: bool = False


@dataclass(frozen=True)
class Setting:
    """Homes over `rounds` rounds of `seconds`; `load` seconds until a home has the anchor of a stage."""

    homes: tuple[Home, ...]
    stages: int
    rounds: int
    seconds: float
    load: float

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


class Stages:
    """Which homes serve which stage.

    Chains of like speed train the sum over all speeds of what a speed has more than the next lower one, times
    the least number of homes that are at least as fast at a stage. `_counts` has these numbers by stage and
    speed.
    """

    def __init__(self, setting: Setting, moves: Moves) -> None:
        self.here, self.all = dict[int, Stay](), list[Stay]()
        self._load, self._homes, self._moves = setting.load, setting.homes, moves
        self._speeds = sorted({home.rate for home in setting.homes})
        self._counts = [[0] * len(self._speeds) for _ in range(setting.stages)]
        self._sums = [0.0] * setting.stages

    def put(self, number: int, since: float, stage: int | None = None) -> None:
        """A home that comes chooses the weakest stage."""
        rate = self._homes[number].rate
        if stage is None and self._moves is Moves.BY_SUM:
            stage = self._sums.index(min(self._sums))
        elif stage is None:
            speed = self._speeds.index(rate)
            stage = min(
                range(len(self._sums)), key=lambda each: (self._counts[each][speed], self._counts[each])
            )
        self.here[number] = Stay(number, rate, stage, since)
        self.all.append(self.here[number])
        self._add(stage, rate, 1)

    def take(self, number: int, at: float, moves: bool = False) -> None:
        stay = self.here.pop(number)
        stay.until, stay.moves = at, moves
        self._add(stay.stage, stay.rate, -1)

    def move(self, at: float) -> bool:
        """Whether a home that has its stage has begun to change it, since that helps."""
        found = self._for_sums(at) if self._moves is Moves.BY_SUM else self._for_counts(at)
        if found is not None:
            number, stage = found
            self.take(number, at, moves=True)
            self.put(number, at + self._load, stage)
        return found is not None

    def _add(self, stage: int, rate: float, sign: int) -> None:
        self._sums[stage] += sign * rate
        for speed, each in enumerate(self._speeds):
            self._counts[stage][speed] += sign * (rate >= each)

    def _for_sums(self, at: float) -> tuple[int, int] | None:
        """From the strongest to the weakest stage, if that one gains at least half of the home's rate."""
        weakest, strongest = (self._sums.index(each(self._sums)) for each in (min, max))
        gap = self._sums[strongest] - self._sums[weakest]
        fitting = [
            (each.rate, number)
            for number, each in self.here.items()
            if each.stage == strongest and each.since <= at and 1.5 * each.rate < gap
        ]
        return (min(fitting)[1], weakest) if fitting else None

    def _for_counts(self, at: float) -> tuple[int, int] | None:
        """A home without which chains train as much, to a stage that has the fewest which are as fast."""
        least = [min(each) for each in zip(*self._counts, strict=True)]
        for home, stay in self.here.items():
            mine = self._counts[stay.stage]
            slower = range(self._speeds.index(stay.rate) + 1)
            if stay.since > at or any(mine[speed] <= least[speed] for speed in slower):
                continue
            for speed in slower:
                if mine[speed] >= least[speed] + 2:
                    return home, next(s for s, c in enumerate(self._counts) if c[speed] == least[speed])
        return None


@cache
def stays_of(setting: Setting, moves: Moves) -> list[Stay]:
    """The stages of all homes. At the first moment all that are on have theirs.

    Homes change them when another one goes (BY_SUM), or at the start of a round (BY_COUNT).
    """
    events = [
        (max(at, 0.0), comes, number)
        for number, home in enumerate(setting.homes)
        for begin, end in home.sessions
        for at, comes in ((begin, 1), (end, 0))
    ]
    if moves is Moves.BY_COUNT:
        events += [(number * setting.seconds, 2, -1) for number in range(setting.rounds)]
    # The fastest first: then stages are alike at the first moment.
    events.sort(key=lambda event: (event[0], event[1], -setting.homes[event[2]].rate))
    stages = Stages(setting, moves)
    for at, kind, number in events:
        if kind == 1:
            stages.put(number, at + setting.load * (at > 0))
        elif kind == 0:
            stages.take(number, at)
            if moves is Moves.BY_SUM:
                stages.move(at)
        else:
            while stages.move(at):
                pass
    return [each for each in stages.all if each.since < each.until]


@dataclass(frozen=True)
class Seat:
    """A home in a chain, and the microbatches from which it has learned in this round."""

    stay: Stay
    learned: float = 0.0


@dataclass(frozen=True)
class Chain:
    """A chain that trains from `since` on, until the first of its members goes."""

    since: float
    seats: tuple[Seat, ...]

    @property
    def rate(self) -> float:
        return min(each.stay.rate for each in self.seats)

    @property
    def breaks(self) -> float:
        return min(each.stay.until for each in self.seats)


def chains(setting: Setting, kept: float | None, moved: bool = False) -> float:
    """What chains train, in microbatches.

    Args:
        kept: the share of the chains whose homes are kept as spares; None without replacement.
        moved: all homes load a stage anew at the start of a round.
    """
    moves = Moves.NONE if moved else Moves.BY_COUNT
    to_come = sorted(stays_of(setting, moves), key=lambda stay: -stay.since)
    here, done, stages = list[Stay](), 0.0, range(setting.stages)
    for number in range(setting.rounds):
        start, end = number * setting.seconds, (number + 1) * setting.seconds
        while to_come and to_come[-1].since <= start:
            here.append(to_come.pop())
        here = sorted((stay for stay in here if stay.until > start), key=lambda stay: -stay.rate)
        begins = start + setting.load * (moved and number > 0)
        ready = (
            [replace(s, stage=i % len(stages), since=begins) for i, s in enumerate(here)] if moved else here
        )
        # At best: the fastest of each stage, the second of each stage, and so on.
        lines = list(zip(*([s for s in ready if s.stage == stage] for stage in stages), strict=False))
        lines = lines[: int(len(lines) * (1.0 - (kept or 0.0)))]
        begun = [Chain(begins, tuple(map(Seat, line))) for line in lines]
        spares = None
        if kept is not None:
            taken = {stay.home for line in lines for stay in line}
            spares = [stay for stay in ready if stay.home not in taken]
            spares += [stay for stay in to_come if stay.since < end]
        done += _work_of(setting, begun, spares, end)
    return done


def _work_of(setting: Setting, begun: list[Chain], spares: list[Stay] | None, end: float) -> float:
    """Microbatches of chains to `end`. `spares`: None if seats stay empty."""
    done, numbers = 0.0, itertools.count()
    queue = [(chain.breaks, next(numbers), chain) for chain in begun]
    heapq.heapify(queue)
    while queue:
        breaks, _, chain = heapq.heappop(queue)
        work = chain.rate * max(0.0, min(breaks, end) - chain.since)
        done += work
        if breaks >= end:
            continue
        seats = [Seat(each.stay, each.learned + work) for each in chain.seats]
        gone = next(each for each in seats if each.stay.until == breaks)
        done -= gone.learned / setting.stages
        if spares is None:
            continue
        seats.remove(gone)
        until = min([end, *(each.stay.until for each in seats)])
        slowest = min((each.stay.rate for each in seats), default=math.inf)
        found, most, began = None, 0.0, 0.0
        for spare in spares:
            since = max(breaks + LINKED_SECONDS, spare.since)
            since += setting.load * (spare.stage != gone.stay.stage)
            work = min(spare.rate, slowest) * (min(until, spare.until) - since)
            if work > most:
                found, most, began = spare, work, since
        if found is None:
            spares += [each.stay for each in seats]
        else:
            spares.remove(found)
            taken = Seat(replace(found, stage=gone.stay.stage, since=began))
            repaired = Chain(began, (*seats, taken))
            heapq.heappush(queue, (repaired.breaks, next(numbers), repaired))
    return done


def pools(setting: Setting, pause: float = 0.0) -> float:
    """What pools train, in microbatches; where a home goes, all wait for a `pause` in seconds."""
    changes = list[tuple[float, int, Stay]]()
    for stay in stays_of(setting, Moves.BY_SUM):
        changes += [(stay.since, 1, stay), (stay.until, -1, stay)]
    changes.sort(key=lambda change: change[0])
    last, now, done = setting.rounds * setting.seconds, 0.0, 0.0
    sums = [0.0] * setting.stages
    for at, sign, stay in changes:
        if at >= last:
            break
        pace = max(0.0, min(sums))
        done += pace * max(0.0, at - now)
        now = max(now, at)
        if sign < 0 and not stay.moves:
            # Who goes was as busy as its stage.
            since = max(stay.since, at // setting.seconds * setting.seconds)
            done -= pace / sums[stay.stage] * stay.rate * (at - since) / setting.stages
            now = max(now, at + pause)
        sums[stay.stage] += sign * stay.rate
    return done + max(0.0, min(sums)) * max(0.0, last - now)


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


def replaced(drawn: Sequence[Setting], moved: bool = False) -> float:
    """What chains with replacement train in all of `drawn`, with the best share of spares."""
    return max(sum(chains(one, share, moved) for one in drawn) for share in SPARES)


def table(shapes: Sequence[str], nodes: Sequence[int], hours: Sequence[float], seeds: int) -> Table:
    rows = []
    for shape, number, each in itertools.product(shapes, nodes, hours):
        if number < 2 * spec_of(shape, number).swarm.stages:
            continue
        rounds = max(4, round(48 / each))
        drawn = [setting_of(shape, number, each, rounds, seed) for seed in range(seeds)]
        most = sum(one.most for one in drawn)
        found = [sum(chains(one, None) for one in drawn), replaced(drawn), replaced(drawn, moved=True)]
        pooled = [sum(pools(one, pause) for one in drawn) for pause in (LINKED_SECONDS, 0.0)]
        figures = [f"{one / most:.0%}" for one in (*found, *pooled)]
        gains = [f"{one / max(found) - 1:+.0%}" for one in pooled]
        rows.append((shape, f"{number}", f"{each:g}", *figures, *gains))
    return Table(
        "Chains and pools of homes that come and go",
        "python -m benchmarks.pools",
        (
            *("model", "homes", "round, h", "chains", "replaced", "moved", "paused", "pools"),
            *("paused against the best chains", "pools against them"),
        ),
        tuple(rows),
    )


def placed(shape: str, nodes: int, seed: int) -> tuple[float, float]:
    """Microbatches in a second by the cost model, with fill and drain: production chains; of like speed."""
    spec, peers = spec_of(shape, nodes), peers_of(nodes, seed)
    costs = Costs(spec, Survey({peer.peer: peer.capacity for peer in peers}))
    plan, count = initial_plan(peers, spec), spec.inner.microbatches
    assert isinstance(plan, Plan), plan
    peers.sort(key=lambda peer: -rate_of(spec, peer))
    size, links = spec.swarm.stages, [spec.link.k] * (spec.swarm.stages - 1)
    alike = [
        [
            Member(peer.peer, StageRange(i, i + 1), "here")
            for i, peer in enumerate(peers[first : first + size])
        ]
        for first in range(0, nodes // size * size, size)
    ]
    return (
        sum(
            count / costs.step(r.members, [link.k for link in r.links], count).seconds for r in plan.replicas
        ),
        sum(count / costs.step(members, links, count).seconds for members in alike),
    )


def placement(shapes: Sequence[str], nodes: Sequence[int], seeds: int) -> Table:
    rows = []
    for shape, number in itertools.product(shapes, nodes):
        if number < 2 * spec_of(shape, number).swarm.stages:
            continue
        found, alike = map(sum, zip(*(placed(shape, number, seed) for seed in range(seeds)), strict=True))
        rows.append(
            (shape, f"{number}", f"{found / seeds:.2f}", f"{alike / seeds:.2f}", f"{found / alike:.2f}")
        )
    return Table(
        "Chains of the production placement, where nobody goes",
        "python -m benchmarks.pools --placement",
        ("model", "homes", "microbatches/s", "chains of like speed", "ratio"),
        tuple(rows),
    )


def failing(stages: int, minutes: float, hours: float, seed: int) -> Setting:
    """16 equal replicas without spares, each of which fails every two hours in the mean: one home of it.

    It is back after BACK_SECONDS.
    """
    chance, seconds, homes = random.Random(seed), 60 * minutes, []
    for _ in range(FAILING * stages):
        now, sessions = 0.0, []
        while now < 3600 * hours:
            end = now + chance.expovariate(1 / (FAILS_SECONDS * stages))
            sessions.append((now, end))
            now = end + BACK_SECONDS
        homes.append(Home(1.0, tuple(sessions)))
    return Setting(tuple(homes), stages, round(60 * hours / minutes), seconds, BACK_LOAD)


def goodput(minutes: Sequence[float], seeds: int) -> Table:
    rows, hours = [], 240.0
    for stages, each in itertools.product((1, 4), minutes):
        drawn = [failing(stages, each, hours, seed) for seed in range(seeds)]
        pooled = [sum(pools(one, pause) for one in drawn) for pause in (LINKED_SECONDS, 0.0)]
        found = sum(chains(one, None) for one in drawn), replaced(drawn), *pooled
        all_of = FAILING * 3600 * hours * seeds
        rows.append((f"{stages}", f"{each:g}", *(f"{one / all_of:.0%}" for one in found)))
    return Table(
        "16 replicas with a failure each per two hours",
        "python -m benchmarks.pools --goodput",
        ("stages", "round, min", "chains", "replaced", "paused", "pools"),
        tuple(rows),
        ("of what 16 replicas train that never fail; an asynchronous method: 93 %",),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=(40, 200, 1000))
    parser.add_argument("--hours", type=float, nargs="+", default=(0.25, 1.0, 4.0))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--goodput", action="store_true", help="of 16 replicas, by the minutes of a round")
    parser.add_argument("--placement", action="store_true", help="what the first plan makes of the homes")
    options = parser.parse_args()
    print(machine())
    if options.goodput:
        found = goodput((5, 10, 20, 60), options.seeds)
    elif options.placement:
        found = placement(list(SHAPES), options.nodes, options.seeds)
    else:
        found = table(list(SHAPES), options.nodes, options.hours, options.seeds)
    print(found.markdown)


if __name__ == "__main__":
    main()
