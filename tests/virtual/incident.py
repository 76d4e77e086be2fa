"""Plays a recorded incident with production nodes on the virtual clock.

``python -m tests.virtual.incident FILE [NEW]`` plays a file, and writes the log of the virtual run to NEW.

The log tells who joined when and in which role, who was lost or left, when the coordinator was away, whom the
operator banned, and how fast each peer was. That is the scenario. The model is small, so the numbers of the
training differ from the recorded ones; what must hold is what holds in every run: no decision is made twice,
all anchors are equal, and no round, sample or payload is lost.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby
from pathlib import Path
from statistics import median

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.ops.incident.file import Incident, to_bytes
from coordinator.ops.incident.pseudonyms import pseudonymous_keys
from coordinator.ops.incident.redaction import RUN, peers_in, redacted_log, redacted_spec
from coordinator.run.state import events
from coordinator.run.state.apply import apply
from coordinator.run.state.commands import Ban, Unban
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from protocol.errors import HetnodeError
from protocol.roles import POLICIES, RoleWish
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.types import PeerId, Reachability
from tests.support.incident_file import from_bytes
from tests.support.invariants import Invariants
from tests.virtual import swarm as virtual
from tests.virtual.scenario import CORPUS
from tests.virtual.swarm import VirtualSwarm

STEPS = 2
"""Inner steps of a round, each as long as the recorded round needs."""
MOST_ROUNDS = 40
_SLOWEST, _FASTEST = 0.05, 20.0


class Kind(Enum):
    """What happens to a member, or to the coordinator."""

    KILL = auto()
    START = auto()
    DRAIN = auto()
    BAN = auto()
    UNBAN = auto()
    COORDINATOR_KILL = auto()
    COORDINATOR_START = auto()


@dataclass(frozen=True)
class Action:
    """`seconds` after the first event of the log, `kind` happens to `peer`, or to the coordinator: ""."""

    seconds: float
    kind: Kind
    peer: PeerId | str = ""


@dataclass(frozen=True)
class Member:
    """A member of the recorded run; `speed` 1 is the median."""

    role: RoleWish
    speed: float
    dial_only: bool


@dataclass(frozen=True)
class Script:
    """The scenario of a log."""

    spec: RunSpec
    members: Mapping[PeerId, Member]
    actions: Sequence[Action]
    step_seconds: float


def script_of(incident: Incident) -> Script:
    """What the virtual swarm plays."""
    seconds = _phase_seconds(incident)
    usual = median(median(each) for each in seconds.values()) if seconds else float(STEPS)
    members: dict[PeerId, Member] = {}
    for event in incident.events:
        if isinstance(event, events.PeerJoined) and POLICIES[event.role].trains:
            own = median(seconds[event.peer]) if event.peer in seconds else usual
            speed = min(max(usual / own, _SLOWEST), _FASTEST) if own else 1.0
            wish = RoleWish.AUTO if event.role_reason else RoleWish(event.role.value)
            dials = event.reachability is Reachability.DIAL_ONLY
            members.setdefault(event.peer, Member(wish, speed, dials))
    return Script(_small(incident), members, _actions(incident, set(members)), usual / STEPS)


def _small(incident: Incident) -> RunSpec:
    """The recorded spec with a small model, and the rounds that were decided."""
    spec = incident.spec
    decided = [
        each.decision.round_number for each in incident.events if isinstance(each, events.RoundDecided)
    ]
    stages = spec.swarm.stages
    tree = spec.model_dump(mode="json")
    keep = {
        f"{section}.{name}": value
        for section in ("swarm", "grouping", "timing", "recovery")
        for name, value in tree[section].items()
    }
    small = {
        "rounds": max(3, min(max(decided, default=3), MOST_ROUNDS)),
        "model.layers": stages,
        "inner.steps": STEPS,
        "inner.microbatches": 2,
        "data.source": CORPUS,
        "recovery.keep_rounds": max(8, spec.recovery.keep_rounds),
    }
    return resolve("nano", overrides=keep | small)


def _phase_seconds(incident: Incident) -> dict[PeerId, list[float]]:
    """By peer, how long the inner phases of its replicas took, per weight."""
    state, found = State(incident.spec, RUN), defaultdict[PeerId, list[float]](list)
    for event in incident.events:
        if isinstance(event, events.PayloadOffered):
            payload = event.descriptor
            assignment = state.assignment(payload.owner, payload.round_number)
            is_first = assignment is not None and assignment.replica.index not in state.answered
            if assignment and is_first and payload.round_number == state.current_round and payload.weight:
                for member in assignment.replica.members:
                    found[member.peer].append((event.at - state.began_at) / payload.weight)
        state = apply(state, event)
    return dict(found)


def _actions(incident: Incident, members: set[PeerId]) -> list[Action]:
    log, start = incident.events, incident.span[0]
    found: list[Action] = []
    for former, event in zip((None, *log), log, strict=False):
        now = event.at - start
        peer = getattr(event, "peer", None)
        if isinstance(event, events.CoordinatorStarted) and former is not None:
            found.append(Action(former.at - start, Kind.COORDINATOR_KILL))
            found.append(Action(now, Kind.COORDINATOR_START))
        if peer not in members:
            continue
        match event:
            case events.PeerJoined():
                found.append(Action(now, Kind.START, peer))
            case events.PeerLost():
                found.append(Action(max(0.0, now - event.silent_seconds), Kind.KILL, peer))
            case events.PeerDraining():
                found.append(Action(now, Kind.DRAIN, peer))
            case events.PeerLeft(finished=False) if not event.reason.endswith("(banned)"):
                found.append(Action(now, Kind.KILL, peer))
            case events.PeerBanned():
                found.append(Action(now, Kind.BAN, peer))
            case events.PeerUnbanned():
                found.append(Action(now, Kind.UNBAN, peer))
            case _:
                pass
    return sorted(found, key=lambda each: each.seconds)  # stable: of equal times, in the order of the log


def play_incident(incident: Incident, folder: Path) -> tuple[Event, ...]:
    """Play the scenario and check what must hold. Returns the log of the virtual run."""
    script = script_of(incident)
    by_peer = pseudonymous_keys(len(peers_in(incident.events)))
    names = {peer: f"peer-{number}" for number, peer in enumerate(script.members)}
    keys: dict[str, Ed25519PrivateKey] = {name: by_peer[peer] for peer, name in names.items()}

    async def scenario(swarm: VirtualSwarm) -> tuple[Event, ...]:
        swarm.is_supervised = True
        for peer, member in script.members.items():
            node = swarm.nodes[names[peer]]
            node.speed, node.dial_only = member.speed, member.dial_only
        away: set[str] = set()
        for action in script.actions:
            await asyncio.sleep(max(0.0, action.seconds - swarm.loop.time() + started[0]))
            if swarm.state.phase is RunPhase.FINISHED:
                break
            await _act(swarm, action, names.get(PeerId(action.peer), ""), away)
        await _until_finished(swarm, away)
        _check(swarm, away)
        return tuple(swarm.events)

    started = [0.0]

    async def timed(swarm: VirtualSwarm) -> tuple[Event, ...]:
        started[0] = swarm.loop.time()
        return await scenario(swarm)

    roles = {names[peer]: member.role for peer, member in script.members.items()}
    return virtual.play(timed, script.spec, folder, roles, step_seconds=script.step_seconds, keys=keys)


async def _act(swarm: VirtualSwarm, action: Action, name: str, away: set[str]) -> None:
    match action.kind:
        case Kind.COORDINATOR_KILL:
            swarm.coordinator.kill()
        case Kind.COORDINATOR_START:
            await swarm.coordinator.start()
        case Kind.START:
            away.discard(name)
            if not swarm.nodes[name].is_running:
                swarm.start(name)
        case Kind.KILL:
            away.add(name)
            if swarm.nodes[name].is_running:
                swarm.kill(name)
        case Kind.DRAIN:
            away.add(name)
            swarm.drain(name)
        case Kind.BAN:
            away.add(name)
            await swarm.coordinator.command_loop.execute(Ban(swarm.peer(name), "an incident"))
        case Kind.UNBAN:
            await swarm.coordinator.command_loop.execute(Unban(swarm.peer(name)))


async def _until_finished(swarm: VirtualSwarm, away: set[str]) -> None:
    """Peers that nobody has started again at the end of the log come back if the run cannot end without."""
    with suppress(AssertionError):
        await swarm.until(lambda state: state.phase is RunPhase.FINISHED, "the end", seconds=3600.0)
    if swarm.state.phase is not RunPhase.FINISHED:
        for name in sorted(away):
            if not swarm.nodes[name].is_running and swarm.peer(name) not in swarm.state.excluded:
                swarm.start(name)
        await swarm.until(lambda state: state.phase is RunPhase.FINISHED, "the end", seconds=86_400.0)
    with suppress(HetnodeError):  # of a peer that was lost or banned
        await swarm.until_over()


def _check(swarm: VirtualSwarm, away: set[str]) -> None:
    finished = [
        name
        for name, node in swarm.nodes.items()
        if name not in away and node.has_finished and node.process and not node.process.has_ended
    ]
    assert finished, "no node has finished"
    swarm.assert_all_agree(*finished)
    assert not swarm.diverged()
    check_log(swarm.spec, swarm.coordinator.run, swarm.events)


def check_log(spec: RunSpec, run: str, log: Sequence[Event]) -> None:
    """Raises InvariantBroken unless all invariants hold after each command of `log`."""
    state, invariants = State(spec, run), Invariants(spec)
    for _, command in groupby(log, key=lambda event: event.at):
        for event in command:
            before, state = state, apply(state, event)
            invariants.check_event(before, event, state)
        invariants.check_state(state)


def main() -> None:
    """Play the file that is named on the command line."""
    file, *new = map(Path, sys.argv[1:])
    incident = from_bytes(file.read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        log = play_incident(incident, Path(folder))
    decided = sum(isinstance(event, events.RoundDecided) for event in log)
    if new:
        spec = redacted_spec(script_of(incident).spec)
        new[0].write_bytes(to_bytes(Incident(spec, redacted_log(log), incident.version, incident.why)))
    print(f"{len(log)} events, {decided} decisions: all anchors agree, all invariants hold")


if __name__ == "__main__":
    main()
