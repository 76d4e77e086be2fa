"""The history of long runs of many peers: seconds of each query, bytes on disk, what writing costs.

    python -m benchmarks.history           # 1,000 peers x 1,000 rounds, 100 peers x 10,000 rounds: 10 minutes
    python -m benchmarks.history --quick   # 200 peers x 500 rounds, below a minute
    python -m benchmarks.history --peers 1000 --rounds 10000 --folder DIR    # an hour, and 2 GB

The rows come from events and measurements through the same code as in a coordinator. Peers are pipelines of
two; now and then one is lost, joins again, and another plan follows.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import Table, machine
from coordinator.history.records import CreditOrder, Page
from coordinator.history.row_builder import RowBuilder
from coordinator.history.rows import milliseconds
from coordinator.state import events
from coordinator.state.events import Event
from coordinator.storage.history import SqliteHistory
from coordinator.storage.history_database import HistoryDatabase
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.status import Measurement
from protocol.types import (
    Capacity,
    Decision,
    Dialer,
    Estimates,
    Link,
    ManifestEntry,
    Member,
    PayloadDescriptor,
    PeerId,
    Plan,
    Replica,
    Role,
    StageRange,
)

STAGES = 2
LOSS_EVERY = 20
"""Rounds between two losses of a peer; each makes a new plan."""
REPEATS = 3
CAPACITY = Capacity("cuda", 2**34, 8)
SHAPES = ((1000, 1000), (100, 10_000))
"""Peers and rounds."""
QUICK = ((200, 500),)


def peer_id(number: int) -> PeerId:
    return PeerId(f"12D3KooW{number:044d}")


def plan_of(epoch: int, from_round: int, peers: int) -> Plan:
    pipelines = tuple(
        Replica(
            index,
            tuple(
                Member(peer_id(STAGES * index + stage), StageRange(stage, stage + 1), "192.0.2.1:1000")
                for stage in range(STAGES)
            ),
            (Link(64, Dialer.UPSTREAM),),
        )
        for index in range(peers // STAGES)
    )
    return Plan(epoch, from_round, 0, pipelines, "a peer was lost" if epoch > 1 else "the first plan")


def payload_of(plan: Plan, replica: Replica, stage: int, round_number: int) -> PayloadDescriptor:
    owner = replica.members[stage].peer
    weight = replica.weight
    fields = ("run", stage, round_number, owner, "a" * 64, "sparse", weight, 1_000_000, "b" * 64)
    return PayloadDescriptor(*fields, epoch=plan.epoch)


def first_events(peers: int) -> Iterator[Event]:
    for number in range(peers):
        yield events.PeerJoined(
            0.0, peer_id(number), Role.STAGE, Capacity("cuda", 2**34, 8), "192.0.2.1:1000"
        )
    yield events.PlanAdopted(1.0, plan_of(1, 1, peers))


def round_events(plan: Plan, round_number: int, peers: int) -> tuple[list[Event], Plan]:
    """What a coordinator stores of one round, and the plan of the next."""
    at, found, following = 60.0 * round_number, list[Event](), plan
    for stage in range(STAGES):
        payloads = [payload_of(plan, replica, stage, round_number) for replica in plan.replicas]
        # The payload of one replica does not count, now and then.
        entries = tuple(ManifestEntry(each, ()) for each in payloads[round_number % 5 == 0 :])
        owners = tuple(each.owner for each in payloads)
        found += [events.PayloadOffered(at + 40 + 0.01 * n, each) for n, each in enumerate(payloads)]
        found.append(events.GroupClosed(at + 51, stage, round_number, "group", "a" * 64, 20.0))
        found += [events.HoldingsReported(at + 55, stage, round_number, owner, owners) for owner in owners]
        if stage == 0 and round_number % LOSS_EVERY == 0:
            lost = peer_id(round_number // LOSS_EVERY % peers)
            following = plan_of(plan.epoch + 1, round_number + 1, peers)
            found.append(events.PeerLost(at + 55, lost, 15.0))
            found.append(events.PeerJoined(at + 56, lost, Role.STAGE, CAPACITY, "192.0.2.1:1000"))
            found.append(events.PlanAdopted(at + 57, following))
        decision = Decision(stage, round_number, True, entries, following.epoch, "all payloads are held")
        found.append(events.RoundCommitted(at + 58, decision))
    return found, following


def measurements_of(plan: Plan, round_number: int) -> Iterator[tuple[float, Measurement]]:
    at = 60.0 * round_number + 59
    for replica in plan.replicas:
        for position, member in enumerate(replica.members):
            is_last = position == STAGES - 1
            loss = 10.0 - 5.0 * round_number / (round_number + 500) + 0.001 * replica.index
            yield (
                at,
                Measurement(
                    member.peer,
                    round_number,
                    replica.index,
                    position,
                    train_loss=loss * is_last,
                    validation_loss=loss * is_last,
                    tokens=65_536 * is_last,
                    inner_seconds=40.25,
                    outer_seconds=18.5,
                    link_bytes_sent=12_345_678 + round_number,
                    link_bytes_dense=123_456_789,
                    payload_bytes=1_000_000,
                    payload_bytes_dense=100_000_000,
                    gradient_norm=1.234567 + 0.001 * round_number,
                    complete=is_last,
                    steps=50,
                    microbatches=8,
                    compute_seconds=33.3,
                ),
            )


@dataclass(frozen=True)
class Figures:
    """Of one shape. Times in seconds; `memory` is what the process holds at most, in bytes."""

    peers: int
    rounds: int
    write_seconds: float
    nbytes: int
    slowest: str
    query_seconds: dict[str, float]
    memory: int


def spec_of(rounds: int) -> RunSpec:
    return resolve("tiny", overrides={"rounds": rounds, "swarm.stages": STAGES})


def fill(path: Path, peers: int, rounds: int) -> float:
    """Write a history; returns the mean seconds for a round, without those that make its events."""
    spec, sequence, seconds = spec_of(rounds), 0, 0.0
    builder, plan = RowBuilder(spec), plan_of(1, 1, peers)
    with HistoryDatabase(path, spec, "benchmark") as database:

        def write(found: list[Event], measured: list[tuple[float, Measurement]]) -> None:
            nonlocal sequence
            rows = []
            for event in found:
                sequence += 1
                rows += builder.of_event(sequence, event)
            for each in measured:
                rows += builder.of_measurement(*each)
            database.write(rows, sequence, milliseconds(found[-1].at), 1)

        write(list(first_events(peers)), [])
        for round_number in range(1, rounds + 1):
            found, following = round_events(plan, round_number, peers)
            estimates = Estimates(Capacity("cuda", 2**34, 8, 1e13 + round_number, 1e7, 1e7, 0.03), 0.5)
            if round_number % LOSS_EVERY == 1:
                at = found[-1].at
                found += [events.PeerMeasured(at, peer_id(n), estimates) for n in range(peers)]
            measured = list(measurements_of(plan, round_number))
            began = time.perf_counter()
            write(found, measured)
            seconds += time.perf_counter() - began
            plan = following
    return seconds / rounds


def queries(history: SqliteHistory, peers: int, rounds: int) -> dict[str, Callable[[], object]]:
    """What pages ask for, by name: the largest and the most distant parts."""
    middle, peer = rounds // 2, peer_id(peers // 2)
    last_page = Page(skip=max(0, peers - 100), most=100)
    return {
        "summary": history.summary,
        "replicas": lambda: history.replicas(Page(most=1000)),
        "losses": history.losses,
        "losses of a replica": lambda: history.losses(peers // STAGES - 1),
        "speed": history.speed,
        "traffic": history.traffic,
        "traffic of a replica": lambda: history.traffic(0),
        "traffic of a link": lambda: history.traffic(0, 0),
        "members of a round": lambda: history.members(middle),
        "rounds": lambda: history.rounds(before=middle),
        "a round": lambda: history.round(middle),
        "peers": lambda: history.peers(last_page),
        "a peer": lambda: history.peer(peer),
        "credits": lambda: history.credits(CreditOrder.LINK, last_page),
        "all credits": lambda: history.credits(CreditOrder.NAME, Page(most=1000)),
        "plans": history.plans,
        "a plan": lambda: history.plan(1 + (rounds - 1) // LOSS_EVERY),
    }


def measure(folder: Path, peers: int, rounds: int) -> Figures:
    path = folder / f"history-{peers}-{rounds}.sqlite"
    write_seconds = fill(path, peers, rounds)
    history, slowest = SqliteHistory(path), dict[str, float]()
    for _ in range(REPEATS):
        for name, query in queries(history, peers, rounds).items():
            began = time.perf_counter()
            assert query()
            slowest[name] = max(slowest.get(name, 0.0), time.perf_counter() - began)
    return Figures(
        peers,
        rounds,
        write_seconds,
        path.stat().st_size,
        max(slowest, key=lambda name: slowest[name]),
        slowest,
        1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


def table(quick: bool, shapes: tuple[tuple[int, int], ...] = (), folder: Path | None = None) -> Table:
    with tempfile.TemporaryDirectory(dir=folder) as target:
        found = [measure(Path(target), *shape) for shape in shapes or (QUICK if quick else SHAPES)]
    rows = tuple(
        (
            f"{each.peers:,}",
            f"{each.rounds:,}",
            f"{1000 * each.query_seconds[each.slowest]:.0f}",
            each.slowest,
            f"{1000 * each.write_seconds:.0f}",
            f"{each.nbytes / 2**20:,.0f}",
            f"{each.nbytes / each.peers / each.rounds:.0f}",
            f"{each.memory / 2**20:,.0f}",
        )
        for each in found
    )
    others = [
        f"{each.peers:,} peers x {each.rounds:,} rounds, in ms: "
        + ", ".join(f"{name} {1000 * time:.0f}" for name, time in each.query_seconds.items())
        for each in found
    ]
    return Table(
        "History of a run: queries of pages, and the writer",
        "python -m benchmarks.history" + (" --quick" if quick else ""),
        (
            "peers",
            "rounds",
            "slowest query, ms",
            "which",
            "write a round, ms",
            "file, MiB",
            "bytes per peer and round",
            "process, MiB",
        ),
        rows,
        (
            f"Pipelines of {STAGES}; every {LOSS_EVERY} rounds a peer is lost and another plan follows. The "
            f"slowest of {REPEATS} calls of each query counts; each opens the file anew.",
            "The process also makes the events: its memory is more than that of the writer.",
            *others,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=None, help="where the files are while this runs")
    arguments = parser.parse_args()
    shapes = ((arguments.peers, arguments.rounds),) if arguments.peers else ()
    print(machine())
    print(table(arguments.quick, shapes, arguments.folder).markdown)


if __name__ == "__main__":
    main()
