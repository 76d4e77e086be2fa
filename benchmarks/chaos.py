"""Random faults on whole swarms, from a seed; at the end the invariants are checked.

    python -m benchmarks.chaos --seed 7 --minutes 5
    python -m benchmarks.chaos --seed 7 --rounds 20
    python -m benchmarks.chaos --seed 7 --rounds 2000 --virtual

Real processes: two full replicas and two pipelines of two members. In half of the rounds a node or the
coordinator is killed at a random time; it is started again. Nodes are also stopped for a while. ``--virtual``
does the same on a virtual clock in this process, where hundreds of rounds take minutes, and adds partitions.

Only a run on the virtual clock is reproducible from its seed. With real processes the seed determines the
faults, and the speed of the machine their effect.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.views.run_history import read_events
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Role
from tests.support.processes import COORDINATOR, ProcessSwarm

MEMBERS = {
    "full-0": Role.REPLICA,
    "full-1": Role.REPLICA,
    "stage-0": Role.STAGE,
    "stage-1": Role.STAGE,
    "stage-2": Role.STAGE,
    "stage-3": Role.STAGE,
}
KILLS_PER_ROUND = 0.5
STOPS_PER_ROUND = 0.1
OUTAGES_PER_ROUND = 0.05
_LOOK_SECONDS = 0.1
_TOO_LATE = "The run has finished."
"""The answer to a node that comes back after the end."""


@dataclass
class Strikes:
    """The faults so far, by kind."""

    kills: int = 0
    stops: int = 0
    outages: int = 0
    cuts: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills of nodes, {self.outages} of the coordinator, {self.stops} stops, "
            f"{self.cuts} partitions"
        )


@dataclass
class Tokens:
    """The tokens that plans have assigned. Each is in one of the three other counters.

    `late`: the replica survived, but its payload was not in the commit of the round. A later payload contains
    the progress, unless the node was killed before. `lost`: a member died in the inner phase.
    """

    assigned: int = 0
    in_time: int = 0
    late: int = 0
    lost: int = 0

    @classmethod
    def of_run(cls, events: Sequence[Mapping[str, Any]], spec: RunSpec) -> Tokens:
        """From the lines of the coordinator's metrics."""
        plans = [each for each in events if each["event"] == "plan"]
        owners: dict[int, list[set[str]]] = {}
        for each in events:
            if each["event"] == "decision":
                owners.setdefault(each["round"], []).append(set(each["owners"]))
        trained = {
            (each["round"], f"replica-{each['replica']}")
            for each in events
            if each["event"] == "measurement" and each["complete"]
        }
        whole = spec.samples_per_round() * spec.model.context
        tokens = cls()
        for round_number, stages in owners.items():
            plan = [each for each in plans if each["from_round"] <= round_number][-1]
            for name, members in plan["replicas"].items():
                tokens.assigned += whole
                if all(found & set(members) for found in stages):
                    tokens.in_time += whole
                elif (round_number, name) in trained:
                    tokens.late += whole
                else:
                    tokens.lost += whole
        return tokens


def spec_of(rounds: int, seed: int, steps: int, **overrides: Any) -> RunSpec:
    stages = sum(role is Role.STAGE for role in MEMBERS.values())
    return resolve(
        "nano",
        overrides={
            "rounds": rounds,
            "seed": seed,
            "inner.steps": steps,
            "swarm.stages": 2,
            "swarm.replicas": len(MEMBERS) - stages,
            "swarm.pipelines": stages // 2,
            "recovery.checkpoint_every": 2,
            "recovery.keep_rounds": 20,
            "timing.heartbeat": 1.0,
            "timing.lost_after": 6.0,
            **overrides,
        },
    )


def real(seed: int, rounds: int, steps: int, minutes: float, folder: Path) -> None:
    """The campaign on real processes: `rounds` rounds, with faults during the first `minutes`."""
    chance, strikes = random.Random(seed), Strikes()
    spec = spec_of(rounds, seed, steps)
    # A node that is killed in one of the last two rounds could not come back before the end.
    kill_in = frozenset(chance.sample(range(1, rounds - 1), round(rounds * KILLS_PER_ROUND)))
    with ProcessSwarm(spec, folder, MEMBERS) as swarm:
        swarm.start()
        campaign = Campaign(swarm, chance, strikes)
        swarm.wait_until(lambda: bool(swarm.events("plan")), 120, "the first plan")
        began, seen, opened, seconds = time.monotonic(), 0, time.monotonic(), 1.0
        while any(map(swarm.is_running, MEMBERS)) or campaign.back:
            now = time.monotonic()
            if (open_round := swarm.round_number + 1) > seen:
                if seen:
                    seconds = (now - opened) / (open_round - seen)
                if now - began < 60 * minutes:
                    campaign.plan(open_round, len(kill_in & set(range(seen + 1, open_round + 1))), seconds)
                seen, opened = open_round, now
            campaign.act()
            time.sleep(_LOOK_SECONDS)
        in_time = [name for name in MEMBERS if swarm.status(name) == 0]
        swarm.assert_all_agree(*in_time)
    _show(folder / "run" / "metrics.jsonl", spec, strikes, in_time)


class Campaign:
    """Faults on real processes, each at a random time of its round, and the restart of their processes.

    Attributes:
        back: when the absent processes come back.
    """

    def __init__(self, swarm: ProcessSwarm, chance: random.Random, strikes: Strikes) -> None:
        self._swarm, self._chance, self._strikes = swarm, chance, strikes
        self._kills: list[float] = []
        self._stops: list[float] = []
        self.back: dict[str, float] = {}

    def plan(self, round_number: int, kills: int, seconds: float) -> None:
        """Draw the faults of `round_number`, which is open now; the previous round took `seconds`."""
        now, chance = time.monotonic(), self._chance
        self._kills += [now + chance.uniform(0, seconds) for _ in range(kills)]
        if chance.random() < STOPS_PER_ROUND and round_number < self._swarm.spec.rounds - 1:
            self._stops.append(now + chance.uniform(0, seconds))

    def act(self) -> None:
        """Execute the faults and restarts that are due."""
        now, swarm = time.monotonic(), self._swarm
        for name, when in list(self.back.items()):
            if when <= now:
                del self.back[name]
                if swarm.is_running(name):
                    swarm.resume(name)
                elif name == COORDINATOR:
                    swarm.start_coordinator()
                else:
                    swarm.start_node(name)
        for name in MEMBERS:
            if name not in self.back and swarm.has_crashed(name, _TOO_LATE):
                swarm.start_node(name)
        while self._kills and min(self._kills) <= now:
            self._kills.remove(min(self._kills))
            self._kill()
        while self._stops and min(self._stops) <= now:
            self._stops.remove(min(self._stops))
            self._stop()

    def _kill(self) -> None:
        name = self._draw([*MEMBERS, COORDINATOR])
        if name is None:
            return
        pause = self._chance.uniform(0.5, 4.0)
        self._say(f"kill {name}, back after {pause:.1f} s")
        self._swarm.kill(name)
        self.back[name] = time.monotonic() + pause
        if name == COORDINATOR:
            self._strikes.outages += 1
        else:
            self._strikes.kills += 1

    def _stop(self) -> None:
        name = self._draw(MEMBERS)
        if name is None:
            return
        pause = self._chance.uniform(1.0, 12.0)
        self._say(f"stop {name} for {pause:.1f} s")
        self._swarm.stop(name)
        self.back[name] = time.monotonic() + pause
        self._strikes.stops += 1

    def _draw(self, names: Iterable[str]) -> str | None:
        """A random one of the running processes."""
        there = sorted(name for name in names if self._swarm.is_running(name) and name not in self.back)
        return self._chance.choice(there) if there else None

    def _say(self, what: str) -> None:
        print(f"round {self._swarm.round_number + 1}: {what}", flush=True)


def _show(metrics: Path, spec: RunSpec, strikes: Strikes, in_time: Sequence[str]) -> None:
    """Args: in_time: the nodes that were there at the end of the run."""
    events = read_events(metrics)
    decisions = [each for each in events if each["event"] == "decision"]
    committed = Counter(each["round"] for each in decisions if each["committed"])
    whole = sum(stages == spec.swarm.stages for stages in committed.values())
    tokens = Tokens.of_run(events, spec)
    print(f"faults: {strikes}")
    print(
        f"rounds: {whole} committed at all stages, {len(committed) - whole} at some, "
        f"{spec.rounds - len(committed)} aborted"
    )
    print(f"stage rounds: {committed.total()} committed, {len(decisions) - committed.total()} aborted")
    print(
        f"tokens: {tokens.assigned} assigned, {tokens.in_time} in the commit of their round, "
        f"{tokens.late} in a later one, {tokens.lost} lost"
    )
    print(
        f"final anchors bit-equal on {len(in_time)} nodes; {len(MEMBERS) - len(in_time)} came back too late"
    )


def virtual(seed: int, rounds: int, folder: Path) -> None:
    """The campaign on a virtual clock."""
    from tests.virtual.loop import BEGINNING  # noqa: PLC0415
    from tests.virtual.swarm import VirtualSwarm, play  # noqa: PLC0415  it brings torch and hivemind

    chance, strikes = random.Random(seed), Strikes()
    spec = spec_of(rounds, seed, steps=2, **{"timing.lost_after": 15.0, "timing.heartbeat": 2.0})

    async def campaign(swarm: VirtualSwarm) -> list[str]:
        swarm.is_supervised = True
        swarm.start()
        for number in range(2, rounds):
            await swarm.until_round(number, seconds=3600)
            if chance.random() < KILLS_PER_ROUND:
                await asyncio.sleep(chance.uniform(0, 3))
                there = [name for name in sorted(MEMBERS) if swarm.nodes[name].is_running]
                if there:
                    name = chance.choice(there)
                    swarm.kill(name)
                    swarm.start_later(name, chance.uniform(1, 60))
                    strikes.kills += 1
            if chance.random() < STOPS_PER_ROUND:
                there = [name for name in sorted(MEMBERS) if swarm.nodes[name].is_running]
                if there:
                    name = chance.choice(there)
                    swarm.suspend(name, chance.uniform(1, 90))
                    strikes.stops += 1
            if chance.random() < OUTAGES_PER_ROUND:
                swarm.coordinator.kill()
                await asyncio.sleep(chance.uniform(0, 60))
                await swarm.coordinator.start()
                strikes.outages += 1
            if chance.random() < OUTAGES_PER_ROUND:
                swarm.network.isolate(chance.choice(sorted(MEMBERS)))
                await asyncio.sleep(chance.uniform(1, 90))
                swarm.network.heal()
                strikes.cuts += 1
            if number % 20 == 0:
                print(f"round {number} at {swarm.loop.time() - BEGINNING:.0f} s", flush=True)
        await swarm.until_all_over(_TOO_LATE)
        in_time = [node.name for node in swarm.nodes.values() if node.has_finished]
        swarm.assert_all_agree(*in_time)
        return in_time

    in_time = play(campaign, spec, folder, MEMBERS, seed=seed, horizon=1e9)
    _show(folder / "coordinator" / "metrics.jsonl", spec, strikes, in_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults happen")
    parser.add_argument("--rounds", type=int, default=None, help="default: as many as fit into the minutes")
    parser.add_argument("--steps", type=int, default=60, help="H on real processes: how long a round takes")
    parser.add_argument("--virtual", action="store_true", help="in this process, on a virtual clock")
    parser.add_argument("--verbose", action="store_true", help="show what the virtual nodes log")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    if options.virtual and os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings are walked in an order that differs from process to process.
        command = [sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:], "--seed", str(seed)]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    if not options.verbose:
        logging.disable(logging.WARNING)
    else:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        if options.virtual:
            virtual(seed, options.rounds or 500, Path(folder))
        else:
            rounds = options.rounds or round(options.minutes * 10)
            real(seed, rounds, options.steps, options.minutes, Path(folder))
    print(f"all rounds decided, each once; no process left; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
