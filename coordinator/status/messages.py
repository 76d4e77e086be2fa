"""Messages for people: what the run does or waits for, and events in the log."""

from __future__ import annotations

from collections.abc import Collection
from typing import assert_never

from coordinator.base.phrases import change_text, counted, listed, short, stages_of
from coordinator.run.state import events
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.status.cause_text import alarm_text, cause_text, pause_text, run_text
from coordinator.status.causes import peer_cause, run_cause, told_of_rest
from protocol.roles import POLICIES
from protocol.status import STALLS, RunPhase
from protocol.trust.public_name import name_as_text
from protocol.types import Aborted, Committed, Decision, Pause, PeerId, RolledBack, Skipped


def run_message(state: State, resting: Collection[PeerId] = ()) -> str:
    """What the run does or waits for, such as "training: round 7 of 30, waiting for replica-1 at stage 0"."""
    return run_text(run_cause(state, resting), state.pause, state.committed, state.aborted)


def stall_message(state: State, resting: Collection[PeerId] = ()) -> str:
    """What the run waits for, if it cannot go on before a peer joins or returns; "" otherwise."""
    cause = run_cause(state, resting)
    return run_text(cause, state.pause) if cause.code in STALLS else ""


def pause_message(state: State) -> str:
    """That the run is paused, by whom and why, for those who take part; "" if it is not."""
    if state.pause is None or state.phase is RunPhase.FINISHED:
        return ""
    return f"the run is paused before round {state.pause.from_round}{pause_text(state.pause)}"


def peer_message(state: State, peer: PeerId, resting: Collection[PeerId] = ()) -> str:
    """Why `peer`, which has joined, does not train while the run trains; "" if it trains."""
    cause = peer_cause(state, peer)
    return cause_text(told_of_rest(cause, resting)) if cause else ""


def event_peers(event: Event) -> tuple[PeerId, ...]:
    """The peers that :func:`event_message` names, but for those in the words of others."""
    match event:
        case events.PayloadOffered(descriptor=payload):
            return (payload.owner,)
        case events.AssignmentReserved(reservation=reserved):
            return (reserved.peer,)
        case events.PayloadsContested(owners=owners):
            return owners
        case _:
            names = (getattr(event, name, None) for name in ("peer", "owner", "neighbour"))
            return tuple(PeerId(each) for each in names if each)


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
            return f"replica-{reserved.replica}, {stages_of(reserved)} is reserved for {short(reserved.peer)}"
        case events.RoundDecided(decision=decision):
            return _decision_message(decision)
        case events.DigestAttested():
            where = f"{event.part} {event.stage} after round {event.round_number}"
            return f"{short(event.peer)} attests the digest {event.digest[:16]} of {where}"
        case events.AnchorDiverged():
            where = f"{event.part} {event.stage} after round {event.round_number}"
            digests = f"{event.digest}, expected {event.expected}"
            return f"{short(event.peer)} DIVERGED: its digest of {where} is {digests}"
        case _:
            return _peer_event_message(event)


def _decision_message(decision: Decision) -> str:
    if isinstance(decision, Skipped):
        return f"round {decision.round_number} skips stage {decision.stage}: {decision.reason}"
    outcomes = {Committed: "committed", Aborted: "aborted", RolledBack: "a rollback"}
    where = f"round {decision.round_number} of stage {decision.stage}"
    return f"{where} is {outcomes[type(decision)]}: {decision.reason}"


def _run_event_message(event: events.RunEvent) -> str:  # noqa: PLR0911
    match event:
        case events.AlarmRaised():
            return f"ALARM: {alarm_text(event.reason, event.last_healthy)}"
        case events.CoordinatorStarted():
            return "the coordinator listens" + ", in the place of another one" * bool(event.term)
        case events.OwnRelayTold():
            most = f"{8e-6 * event.uplink:.1f} Mb/s" if event.uplink else "an unknown number of Mb/s"
            return f"the coordinator's relay at {event.endpoint} sends {most} for all nodes together"
        case events.PlanAdopted(plan=plan):
            return f"plan {plan.epoch} from round {plan.from_round} on: {plan.reason}"
        case events.RunPaused():
            why = pause_text(Pause(event.from_round, event.by, event.reason))
            return f"the run is PAUSED before round {event.from_round}{why}"
        case events.RunResumed():
            return "the run goes on"
        case events.RunChanged():
            return f"the settings change: {change_text(event.change)}"
        case events.RunRolledBack():
            why = f"{': ' if event.reason else ''}{event.reason}"
            return f"round {event.round_number} is a ROLLBACK to round {event.restore_round}{why}"
        case events.ModelEvaluated(evaluation=told):
            found = listed([f"{metric} {value:.4g}" for metric, value in told.figures.items()])
            who = short(told.peer) if told.peer else "the operator"
            return (
                f"{who} tells of the model after round {told.round_number}, {told.name}: {found or 'samples'}"
            )
        case events.RunFinished():
            return "the run is finished"


def _invite_message(event: events.InviteEvent) -> str:
    match event:
        case events.InviteCreated():
            role = f" as {event.role.value}" if event.role else ""
            return f"invite {event.invite} is valid for {counted(event.uses, 'peer')}{role}"
        case events.InviteUsed():
            return f"{short(event.peer)} is enrolled with invite {event.invite}"
        case events.InviteRevoked():
            return f"invite {event.invite} is revoked"
        case events.PlaceAsked(admitted=True):
            return f"{short(event.peer)} may take part without an invite"
        case events.PlaceAsked():
            return f"{short(event.peer)} waits for its turn, without an invite"


def _exchange_message(event: events.ExchangeEvent) -> str:
    if isinstance(event, events.PayloadOffered):
        payload = event.descriptor
        where = f"stage {payload.stage}, round {payload.round_number}"
        return f"{short(payload.owner)} offers {payload.nbytes} bytes for {where}"
    where = f"stage {event.stage}, round {event.round_number}"
    match event:
        case events.PayloadWithheld():
            return f"{short(event.peer)} has no payload to offer for {where}"
        case events.GroupClosed():
            return f"the exchange group of {where} is closed"
        case events.HoldingsReported():
            return f"{short(event.peer)} holds {counted(event.count, 'payload')} of {where}"
        case events.ResultReported(claim=claim):
            return f"{short(event.peer)} has reduced {where} to {claim.sha256[:12]}"
        case events.PayloadRejected():
            return (
                f"{short(event.peer)} rejects the payload of {short(event.owner)} for {where}: {event.reason}"
            )


def _arbitration_message(event: events.ArbitrationEvent) -> str:
    match event:
        case events.ArbiterAppointed():
            return f"{short(event.peer) if event.peer else 'no peer'} fetches contested payloads"
        case events.PayloadsContested():
            where = f"stage {event.stage}, round {event.round_number}"
            owners = listed([*map(short, event.owners)])
            return f"too few peers report holding the payloads of {owners} ({where})"
        case events.PayloadArbitrated(verdict=verdict):
            where = f"stage {event.stage}, round {event.round_number}"
            found = f"{verdict.finding.value}{': ' if verdict.reason else ''}{verdict.reason}"
            return f"the contested payload of {short(event.owner)} ({where}) is {found}"


def _address_message(event: events.PeerJoined | events.ConnectionEvent) -> str:
    if isinstance(event, events.LinkFailed) and not event.address:
        return f"{short(event.peer)} and {short(event.neighbour)} are apart for a while: {event.reason}"
    if isinstance(event, events.LinkFailed):
        link = f"{short(event.peer)} cannot open its link to {short(event.neighbour)} at {event.address}"
        return f"{link}: {event.reason}; its replica does not count until it is open"
    where = event.endpoint or "no endpoint"
    if event.reachability is not None:
        where = f"{where}, {event.reachability.value}"
    if isinstance(event, events.PeerJoined):
        why = f"; auto: {event.role_reason}" if event.role_reason else ""
        what = f"joined as {event.role.value} ({event.capacity.device}, {where}{why})"
    else:
        what = f"has other addresses ({where})"
    return f"{short(event.peer)} {what}{': ' if event.problem else ''}{event.problem}"


def _peer_event_message(event: events.PeerEvent) -> str:  # noqa: PLR0911, PLR0912
    match event:
        case events.PeerJoined() | events.AddressesChanged() | events.LinkFailed():
            return _address_message(event)
        case events.PeerNamed():
            what = f"is called {name_as_text(event.name)}" if event.name else "has no public name any more"
            return f"{short(event.peer)} {'may have no public name' if event.refused else what}"
        case events.OwnerBound(binding=binding):
            return f"{short(binding.peer)} is a node of the owner {short(binding.owner)}"
        case events.RoleChanged():
            return f"{short(event.peer)} is a {POLICIES[event.role].noun} now: {event.reason}"
        case events.PeerSeen():
            return f"{short(event.peer)} is in round {event.round_number}, step {event.inner_step}"
        case events.PeerMeasured():
            flops = f"{event.estimates.capacity.flops / 1e9:.1f} GFLOP/s"
            up, down = event.estimates.capacity.uplink, event.estimates.capacity.downlink
            return (
                f"{short(event.peer)} measures {flops}, {8e-6 * up:.1f} Mb/s up, {8e-6 * down:.1f} Mb/s down"
            )
        case events.PeerDraining():
            return f"{short(event.peer)} leaves at the end of its round: {event.reason}"
        case events.PeerLeft():
            return f"{short(event.peer)} left: {event.reason}"
        case events.PeerLost():
            return f"{short(event.peer)} is lost: silent for {event.silent_seconds:.1f} s"
        case events.PeerRetreated():
            return f"{short(event.peer)} retreats under plan {event.epoch} and follows: {event.reason}"
        case events.PeerBanned():
            return f"{short(event.peer)} is banned: {event.reason or 'no reason was given'}"
        case events.PeerUnbanned():
            return f"{short(event.peer)} is no longer banned"
        case events.PeerStruck():
            return f"{short(event.peer)} gets a STRIKE in round {event.round_number}: {event.reason}"
        case events.PeerWeighed(counts=True):
            return f"the payloads of {short(event.peer)} count from now on: their score is {event.score:.2f}"
        case events.PeerWeighed():
            return (
                f"the payloads of {short(event.peer)} count for NOTHING from now on: up to round "
                f"{event.round_number} their score is {event.score:.2f}, and usual is 1"
            )
        case events.PeerQuarantined():
            return f"{short(event.peer)} is in QUARANTINE after {counted(event.strikes, 'strike')}"
        case _:
            assert_never(event)
