"""Messages for people: what the run does or waits for, and events in the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from coordinator.placement.initial_placement import initial_plan, measuring, missing
from coordinator.placement.links import no_exchange, unreached_hosts
from coordinator.placement.replan import obstacles
from coordinator.placement.vacancies import is_spare
from coordinator.rounds.attestation import unattested, unconfirmed
from coordinator.rounds.missing import missing_offers, missing_reports
from coordinator.rounds.rounds import is_stalled
from coordinator.state import events
from coordinator.state.events import Event
from coordinator.state.state import Alarm, State
from coordinator.state.text import Waiting, compressed_weight_text, counted, listed, short, stages_of
from protocol.roles import POLICIES
from protocol.status import RunPhase
from protocol.trust.public_name import name_as_text
from protocol.types import Pause, PausedBy, PeerId, ReservedAssignment


def run_message(state: State) -> str:
    """What the run does or waits for, such as "training: round 7 of 30, waiting for replica-1 at stage 0"."""
    match state.phase:
        case RunPhase.GATHERING:
            return f"{_gathering(state)}{_then_paused(state)}"
        case RunPhase.TRAINING if state.pause is not None and _is_quiet(state):
            return (
                f"PAUSED before round {state.current_round} of {state.spec.rounds}{why_paused(state.pause)}"
            )
        case RunPhase.TRAINING:
            return f"{_training(state)}{_then_paused(state)}"
        case RunPhase.FINISHED:
            return f"finished: {state.spec.rounds} rounds, {state.committed} commits, {state.aborted} aborts"


def pause_message(state: State) -> str:
    """That the run is paused, by whom and why, for those who take part; "" if it is not."""
    if state.pause is None or state.phase is RunPhase.FINISHED:
        return ""
    return f"the run is paused before round {state.pause.from_round}{why_paused(state.pause)}"


def why_paused(pause: Pause) -> str:
    """Such as " by an alarm: the loss has risen"."""
    who = {PausedBy.OPERATOR: "its operator", PausedBy.ALARM: "an alarm"}[pause.by]
    return f" by {who}{': ' if pause.reason else ''}{pause.reason}"


def _is_quiet(state: State) -> bool:
    """Whether the replicas only wait for the end of the pause."""
    return state.is_held and state.current_round <= state.spec.rounds and not is_stalled(state)


def _then_paused(state: State) -> str:
    return f"; then PAUSED{why_paused(state.pause)}" if state.pause is not None else ""


def _gathering(state: State) -> str:
    staying = state.staying
    if lacks := missing(staying, state.spec):
        return f"waiting for {lacks}"
    if names := [short(peer.peer) for peer in measuring(staying, state.estimates)]:
        return f"waiting for the measured speed of {listed(names)}"
    waiting = initial_plan(staying, state.spec, state.estimates)
    return waiting.sentence if isinstance(waiting, Waiting) else "about to start"


def _training(state: State) -> str:  # noqa: PLR0911
    round_number = state.current_round
    if round_number > state.spec.rounds:
        names = [f"of {peer}" for peer in unconfirmed(state)]
        names = names or [f"of any peer at stage {stage}" for stage in unattested(state)]
        return f"all {state.spec.rounds} rounds are decided, waiting for the last digests {listed(names)}"
    if is_stalled(state):
        why = listed([*obstacles(state, round_number).values()])
        return f"waiting in round {round_number} of {state.spec.rounds}: no complete replica is left: {why}"
    doing = f"training: round {round_number} of {state.spec.rounds}"
    if hosts := unreached_hosts(state.plan_for(round_number).replicas, state.peers):
        return f"{doing}, but nothing can be committed: {no_exchange(hosts)}"
    for stage in range(state.stages):
        round_state = state.round_of(stage, round_number)
        if state.is_decided(stage, round_number) or not round_state.offers:
            continue
        if round_state.group is None:
            names = missing_offers(state, stage, round_number)
            return f"{doing}, waiting for {listed(names)} at stage {stage}"
        if (contest := round_state.contest) is not None and contest.open_owners:
            what = counted(len(contest.open_owners), "payload")
            return f"{doing}, fetching {what} that too few peers report as held at stage {stage}"
        assignments = [state.assignment(peer, round_number) for peer in missing_reports(state, round_state)]
        names = [assignment.replica.name for assignment in assignments if assignment is not None]
        return f"{doing}, waiting for the reports of {listed(names)} at stage {stage}"
    return doing


def alarm_message(alarm: Alarm | None) -> str:
    """What was seen, and what the operator may do; "" without an alarm."""
    if alarm is None:
        return ""
    back = f"{alarm.reason} The last healthy round was {alarm.last_healthy}"
    # Anchors are kept of some rounds only.
    offer = "'hetnode rollback' lists the rounds to which the run can go back."
    return f"{back}. {offer}" if alarm.last_healthy else back


def stall_message(state: State) -> str:
    """What the run waits for, if it cannot go on before a peer joins or returns; "" otherwise."""
    is_waiting = state.phase is RunPhase.GATHERING or is_stalled(state)
    return run_message(state) if is_waiting else ""


def failed_links_of(state: State, peer: PeerId) -> list[str]:
    """A sentence for each link of `peer` that could not be opened, for both of its ends."""
    return [
        f"the link from {short(one)} to {short(other)} at {link.address} cannot be opened: {link.reason}"
        for (one, other), link in state.failed_links.items()
        if peer in (one, other) and not link.is_moved
    ]


def peer_message(state: State, peer: PeerId, lacks: Mapping[int, str] | None = None) -> str:
    """Why `peer`, which has joined, does not train while the run trains; "" if it trains.

    `lacks`: the obstacles of the current round, for a caller that asks about many peers.
    """
    if state.phase is not RunPhase.TRAINING:
        return ""
    failed = failed_links_of(state, peer)
    if failed or state.takes_part(peer, state.plans[-1].from_round):
        return ". ".join(failed)
    known, reservation = state.peers[peer], state.reservations.get(peer)
    if is_spare(state, known):
        return (
            "waiting as a spare: for each vacancy it lacks the memory, "
            "or neither it nor a neighbour has an endpoint"
        )
    if reservation is None or not known.is_staying:
        return ""
    lacks = obstacles(state, state.current_round) if lacks is None else lacks
    why = lacks.get(reservation.replica) or _why_not_yet(state, reservation)
    return f"following the rounds of {stages_of(reservation)}: {why}"


def _why_not_yet(state: State, reservation: ReservedAssignment) -> str:
    spares = state.spec.grouping.spares
    is_new = reservation.replica not in state.assigned_replicas
    if is_new and len(state.layout(reservation.replica)) > 1 and spares:
        kept = counted(spares, "stage peer")
        return f"the run keeps {kept} as spares before another pipeline trains"
    return "the next plan includes it"


def event_message(event: Event) -> str:  # noqa: PLR0911
    """A line about `event` for the log."""
    if isinstance(event, events.InviteEvent):
        return _invite_message(event)
    if isinstance(event, events.ExchangeEvent):
        return _exchange_message(event)
    if isinstance(event, events.ArbitrationEvent):
        return _arbitration_message(event)
    if isinstance(event, events.RunEvent):
        return _run_event_message(event)
    match event:
        case events.AssignmentReserved(reservation=reserved):
            return f"replica-{reserved.replica}, {stages_of(reserved)} is reserved for {reserved.peer}"
        case events.StageSkipped(decision=decision):
            return f"round {decision.round_number} skips stage {decision.stage}: {decision.reason}"
        case events.RoundCommitted(decision=decision) | events.RoundAborted(decision=decision):
            restores = decision.restore_round is not None
            outcome = "committed" if decision.committed else "a rollback" if restores else "aborted"
            return f"round {decision.round_number} of stage {decision.stage} is {outcome}: {decision.reason}"
        case events.DigestAttested():
            where = f"{event.part} {event.stage} after round {event.round_number}"
            return f"{event.peer} attests the digest {event.digest[:16]} of {where}"
        case events.AnchorDiverged():
            where = f"{event.part} {event.stage} after round {event.round_number}"
            return (
                f"{event.peer} DIVERGED: its digest of {where} is {event.digest}, expected {event.expected}"
            )
        case _:
            return _peer_event_message(event)


def _run_event_message(event: events.RunEvent) -> str:  # noqa: PLR0911
    match event:
        case events.AlarmRaised():
            alarm = Alarm(event.round_number, event.last_healthy, event.reason)
            return f"ALARM: {alarm_message(alarm)}"
        case events.CompressedWeighed():
            why = compressed_weight_text(event.weight, event.agreement)
            return f"after round {event.round_number} {why}"
        case events.CoordinatorStarted():
            return "the coordinator listens"
        case events.OwnRelayTold():
            most = f"{8e-6 * event.uplink:.1f} Mb/s" if event.uplink else "an unknown number of Mb/s"
            return f"the coordinator's relay at {event.endpoint} sends {most} for all nodes together"
        case events.PlanAdopted(plan=plan):
            return f"plan {plan.epoch} from round {plan.from_round} on: {plan.reason}"
        case events.RunPaused():
            why = why_paused(Pause(event.from_round, event.by, event.reason))
            return f"the run is PAUSED before round {event.from_round}{why}"
        case events.RunResumed():
            return "the run goes on"
        case events.RunRolledBack():
            why = f"{': ' if event.reason else ''}{event.reason}"
            return f"round {event.round_number} is a ROLLBACK to round {event.restore_round}{why}"
        case events.RunFinished():
            return "the run is finished"


def _invite_message(event: events.InviteEvent) -> str:
    match event:
        case events.InviteCreated():
            role = f" as {event.role.value}" if event.role else ""
            return f"invite {event.invite} is valid for {counted(event.uses, 'peer')}{role}"
        case events.InviteUsed():
            return f"{event.peer} is enrolled with invite {event.invite}"
        case events.InviteRevoked():
            return f"invite {event.invite} is revoked"


def _exchange_message(event: events.ExchangeEvent) -> str:
    if isinstance(event, events.PayloadOffered):
        payload = event.descriptor
        where = f"stage {payload.stage}, round {payload.round_number}"
        return f"{payload.owner} offers {payload.nbytes} bytes for {where}"
    where = f"stage {event.stage}, round {event.round_number}"
    match event:
        case events.PayloadWithheld():
            return f"{event.peer} has no payload to offer for {where}"
        case events.GroupClosed():
            return f"the exchange group of {where} is closed"
        case events.HoldingsReported():
            return f"{event.peer} holds {counted(event.count, 'payload')} of {where}"
        case events.ResultReported(claim=claim):
            return f"{event.peer} has reduced {where} to {claim.sha256[:12]}"
        case events.PayloadRejected():
            return f"{event.peer} rejects the payload of {event.owner} for {where}: {event.reason}"


def _arbitration_message(event: events.ArbitrationEvent) -> str:
    match event:
        case events.ArbiterAppointed():
            return f"{event.peer or 'no peer'} fetches contested payloads"
        case events.PayloadsContested():
            where = f"stage {event.stage}, round {event.round_number}"
            return f"too few peers report holding the payloads of {listed(event.owners)} ({where})"
        case events.PayloadArbitrated(verdict=verdict):
            where = f"stage {event.stage}, round {event.round_number}"
            found = f"{verdict.finding.value}{': ' if verdict.reason else ''}{verdict.reason}"
            return f"the contested payload of {event.owner} ({where}) is {found}"


def _address_message(event: events.PeerJoined | events.ConnectionEvent) -> str:
    if isinstance(event, events.LinkFailed):
        link = f"{event.peer} cannot open its link to {event.neighbour} at {event.address}"
        return f"{link}: {event.reason}; its replica does not count until it is open"
    where = event.endpoint or "no endpoint"
    if event.reachability is not None:
        where = f"{where}, {event.reachability.value}"
    if isinstance(event, events.PeerJoined):
        why = f"; auto: {event.role_reason}" if event.role_reason else ""
        what = f"joined as {event.role.value} ({event.capacity.device}, {where}{why})"
    else:
        what = f"has other addresses ({where})"
    return f"{event.peer} {what}{': ' if event.problem else ''}{event.problem}"


def _peer_event_message(event: events.PeerEvent) -> str:  # noqa: PLR0911, PLR0912
    match event:
        case events.PeerJoined() | events.AddressesChanged() | events.LinkFailed():
            return _address_message(event)
        case events.PeerNamed():
            what = f"is called {name_as_text(event.name)}" if event.name else "has no public name any more"
            return f"{event.peer} {'may have no public name' if event.refused else what}"
        case events.RoleChanged():
            return f"{event.peer} is a {POLICIES[event.role].noun} now: {event.reason}"
        case events.PeerSeen():
            return f"{event.peer} is in round {event.round_number}, step {event.inner_step}"
        case events.PeerMeasured():
            flops = f"{event.estimates.capacity.flops / 1e9:.1f} GFLOP/s"
            up, down = event.estimates.capacity.uplink, event.estimates.capacity.downlink
            return f"{event.peer} measures {flops}, {8e-6 * up:.1f} Mb/s up, {8e-6 * down:.1f} Mb/s down"
        case events.PeerDraining():
            return f"{event.peer} leaves at the end of its round: {event.reason}"
        case events.PeerLeft():
            return f"{event.peer} left: {event.reason}"
        case events.PeerLost():
            return f"{event.peer} is lost: silent for {event.silent_seconds:.1f} s"
        case events.PeerRetreated():
            return f"{event.peer} retreats under plan {event.epoch} and follows: {event.reason}"
        case events.PeerBanned():
            return f"{event.peer} is banned: {event.reason or 'no reason was given'}"
        case events.PeerUnbanned():
            return f"{event.peer} is no longer banned"
        case events.PeerStruck():
            return f"{event.peer} gets a STRIKE in round {event.round_number}: {event.reason}"
        case events.PeerQuarantined():
            return f"{event.peer} is in QUARANTINE after {counted(event.strikes, 'strike')}"
        case _:
            assert_never(event)
