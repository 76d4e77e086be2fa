"""What the coordinator's rules cost in a round of a large swarm: no calls, no log, no clock.

    python -m benchmarks.rules                       # 300 and 1,000 peers
    python -m benchmarks.rules --peers 1000 --profile

A fifth of the peers are full replicas, the others pipelines of 4. Each offers, reports and attests as a node
does, and sends heartbeats as often as the coordinator asks a node to; the coordinator ticks every second.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.coordinator import STAGES, spec_of
from benchmarks.tables import Table, machine
from coordinator.placement.phases import earliest
from coordinator.run.decide import decide
from coordinator.run.state import commands
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from protocol.spec.run import RunSpec
from protocol.types import Capacity, Part, PayloadDescriptor, Role
from tests.builders import Keyed, anchor_of, keyed

SHAPES = (300, 1000)
_ROUND_SECONDS = 30
"""Ticks and heartbeats of a round."""
_HEARTBEATS_PER_SECOND = 100.0
_CAPACITY = Capacity("cuda", 2**36, 8, 1e8, 1e8, 1e8, 0.001)


@dataclass
class Rules:
    """A run whose time moves only when it is told to.

    Attributes:
        seconds: of CPU by kind of command.
        counts: of commands by kind.
        on_event: gets each event.
    """

    state: State
    now: float = 1000.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    on_event: Callable[[Event], object] = lambda _: None

    def send(self, command: commands.Command) -> None:
        began = time.process_time()
        outcome = decide(self.state, command, self.now)
        self.seconds[type(command).__name__] += time.process_time() - began
        self.counts[type(command).__name__] += 1
        if outcome.refusal is not None:
            raise outcome.refusal
        self.state = outcome.state
        for event in outcome.events:
            self.on_event(event)


class Swarm:
    """The peers of a run, and what they send in a round."""

    def __init__(self, peers: int, rounds: int = 10) -> None:
        self.spec: RunSpec = spec_of(peers, rounds)
        self.rules = Rules(State(self.spec, self.spec.name))
        self.peers: dict[str, Keyed] = {}

    def join(self) -> None:
        """Start the coordinator, and let all peers join."""
        self.rules.send(commands.Start())
        full = self.spec.swarm.replicas
        for number in range(full + self.spec.swarm.pipelines * STAGES):
            each = keyed(number)
            role = Role.REPLICA if number < full else Role.STAGE
            join = replace(each.join(self.spec, role), capacity=_CAPACITY)
            self.peers[join.peer] = each
            self.rules.send(join)

    def start(self) -> None:
        """Wait until the run begins."""
        while not self.rules.state.plans:
            self.rules.now += 1
            self.rules.send(commands.Tick())

    def play_round(self) -> None:
        """Inner phase with heartbeats, then offers, reports and attestations of all stages."""
        rules = self.rules
        number = rules.state.current_round
        self._rest()
        assignments = dict(rules.state.assignments[rules.state.plan_for(number).epoch])
        for stage in range(STAGES):
            hosts = [peer for peer, each in assignments.items() if stage in each.member.stages]
            payloads = tuple(self._payload(peer, stage, number) for peer in hosts)
            rules.now = max(rules.now, *(earliest(rules.state, payload) for payload in payloads))
            for peer, payload in zip(hosts, payloads, strict=True):
                rules.send(commands.Offer(peer, payload))
            for peer in hosts:
                rules.send(commands.Report(peer, stage, number, payloads))
            for peer in hosts:
                rules.send(commands.Attest(peer, stage, number, Part.STAGE, anchor_of(stage, number)))
        for peer, each in assignments.items():
            if each.member.stages.first:  # whoever hosts stage 0 attests the embedding with it
                rules.send(commands.Attest(peer, 0, number, Part.EMBEDDING, anchor_of(0, number)))
        assert rules.state.current_round == number + 1

    def _rest(self) -> None:
        rules, peers = self.rules, list(self.peers)
        each_second = min(len(peers), round(_HEARTBEATS_PER_SECOND))
        for second in range(_ROUND_SECONDS):
            rules.now += 1
            rules.send(commands.Tick())
            for n in range(each_second):
                peer = peers[(second * each_second + n) % len(peers)]
                rules.send(commands.Heartbeat(peer, rules.state.current_round, second))

    def _payload(self, peer: str, stage: int, number: int) -> PayloadDescriptor:
        state = self.rules.state
        assignment = state.assignment(peer, number)
        assert assignment is not None
        epoch = state.plan_for(number).epoch
        return self.peers[peer].payload(
            self.spec, stage, number, weight=assignment.replica.weight, epoch=epoch
        )


def measure(peers: int, rounds: int) -> Rules:
    """The costs of `rounds` rounds after the first."""
    swarm = Swarm(peers)
    swarm.join()
    swarm.start()
    swarm.play_round()
    swarm.rules.seconds.clear()
    swarm.rules.counts.clear()
    for _ in range(rounds):
        swarm.play_round()
    return swarm.rules


def table(quick: bool, shapes: Sequence[int] = ()) -> Table:
    rounds, rows = 1 if quick else 3, []
    for peers in shapes or (SHAPES[:1] if quick else SHAPES):
        rules = measure(peers, rounds)
        for kind, seconds in sorted(rules.seconds.items(), key=lambda each: -each[1]):
            count = rules.counts[kind]
            each, whole = f"{1000 * seconds / count:.3f}", f"{seconds / rounds:.2f}"
            rows.append((f"{peers:,}", kind, f"{count / rounds:,.0f}", each, whole))
        rows.append((f"{peers:,}", "all", "", "", f"{sum(rules.seconds.values()) / rounds:.2f}"))
    return Table(
        "The coordinator's rules",
        "python -m benchmarks.rules" + (" --quick" if quick else ""),
        ("peers", "command", "in a round", "CPU of each, ms", "CPU of a round, s"),
        tuple(rows),
        (f"A fifth are full replicas, the others pipelines of {STAGES}. No calls, no log.",),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", type=int, nargs="+", default=())
    parser.add_argument("--profile", action="store_true", help="print the functions that take most of it")
    arguments = parser.parse_args()
    if arguments.profile:
        swarm = Swarm((arguments.peers or SHAPES)[0])
        swarm.join()
        swarm.start()
        swarm.play_round()
        profile = cProfile.Profile()
        profile.runcall(swarm.play_round)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    print(machine())
    print(table(arguments.quick, arguments.peers).markdown)


if __name__ == "__main__":
    main()
