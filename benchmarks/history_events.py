"""What a coordinator of many peers stores: made-up events and measurements of a run.

Peers are pipelines of two; now and then one is lost, joins again, and another plan follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coordinator.run.state import events
from coordinator.run.state.events import Event
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.status import Measurement, PayloadAgreement
from protocol.types import (
    Capacity,
    Committed,
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
CAPACITY = Capacity("cuda", 2**34, 8)


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
        decision = Committed(stage, round_number, following.epoch, "all payloads are held", entries)
        found.append(events.RoundDecided(at + 58, decision))
    return found, following


def agreement_of(members: Sequence[Sequence[Member]], index: int, stage: int) -> PayloadAgreement:
    """What the host of a stage measures of the payload of the next one."""
    owner = members[(index + 1) % len(members)][stage].peer
    return PayloadAgreement(stage, owner, cosine=0.21 + 1e-5 * index, norm=1.25, mean_norm=0.5)


def measurements_of(plan: Plan, round_number: int) -> Iterator[tuple[float, Measurement]]:
    at = 60.0 * round_number + 59
    owners = [replica.members for replica in plan.replicas]
    for index, replica in enumerate(plan.replicas):
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
                    progress_norm=1.5,
                    error_norm=0.75,
                    agreements=(agreement_of(owners, index, position),),
                ),
            )


def spec_of(rounds: int) -> RunSpec:
    return resolve("tiny", overrides={"rounds": rounds, "swarm.stages": STAGES})


def estimates_of(peers: int, round_number: int, at: float) -> list[Event]:
    estimates = Estimates(Capacity("cuda", 2**34, 8, 1e13 + round_number, 1e7, 1e7, 0.03), 0.5)
    return [events.PeerMeasured(at, peer_id(number), estimates) for number in range(peers)]


def story(peers: int, rounds: int) -> Iterator[tuple[list[Event], list[tuple[float, Measurement]]]]:
    """The events before the first round, then those of each round with its measurements."""
    yield list(first_events(peers)), []
    plan = plan_of(1, 1, peers)
    for round_number in range(1, rounds + 1):
        found, following = round_events(plan, round_number, peers)
        if round_number % LOSS_EVERY == 1:
            found += estimates_of(peers, round_number, found[-1].at)
        yield found, list(measurements_of(plan, round_number))
        plan = following
