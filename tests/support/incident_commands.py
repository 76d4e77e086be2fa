"""Which command may have led to the next events of a log: commands are not stored, their events are.

The first event of a command often tells what the command was. Where several are possible, they come in the
order in which to try them. A tick may lead to almost any event, so it comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, nextafter
from typing import Any

from coordinator.run.state import commands, events
from coordinator.run.state.apply_rounds import owners_of
from coordinator.run.state.commands import Command
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from protocol.trust.envelope import Signer, sign_descriptor
from protocol.types import PROTOCOL_VERSION, Committed, PayloadDescriptor, PeerId, Rejection

Signers = Mapping[PeerId, Signer]

INPUTS = (events.PeerStruck, events.PeerQuarantined, events.AnchorDiverged, events.PeerNamed)
"""Events that may come of what the log does not contain: a call that was refused, or a repeated join."""


def implied_commands(state: State, upcoming: Sequence[Event], signers: Signers) -> Iterator[Command]:
    """The commands after which `upcoming`, whose events have one time, may begin, the likeliest first.

    Args:
        state: before the first of `upcoming`.
        signers: the keys of the peers, for payloads that the log does not contain.
    """
    first = upcoming[0]
    for event in upcoming:
        if isinstance(event, events.RunRolledBack):  # a pause, aborts and a plan may come before it
            yield commands.RollBack(event.restore_round, event.reason)
    for kind, candidates in _CANDIDATES:
        if isinstance(first, kind):
            yield from candidates(state, first, upcoming, signers)
    yield commands.Tick()
    yield from _repeated_reports(state)


def is_known(event: Event) -> bool:
    """Whether this version knows commands that lead to events of this kind; else they are taken as given."""
    return any(isinstance(event, kind) for kind, _ in _CANDIDATES) or isinstance(event, _CONSEQUENCES)


def signed(event: Event, signers: Signers) -> Event:
    """`event` with the signatures that redaction has left out, made with the keys of the pseudonyms."""
    if isinstance(event, events.PayloadOffered):
        return replace(event, descriptor=_signed(event.descriptor, signers))
    if isinstance(event, events.RoundDecided) and isinstance(event.decision, Committed):
        entries = tuple(
            replace(entry, descriptor=_signed(entry.descriptor, signers)) for entry in event.decision.entries
        )
        return replace(event, decision=replace(event.decision, entries=entries))
    return event


def _signed(descriptor: PayloadDescriptor, signers: Signers) -> PayloadDescriptor:
    return sign_descriptor(descriptor, signers[descriptor.owner])


def _join(state: State, event: Event, upcoming: Sequence[Event], signers: Signers) -> Iterator[Command]:
    """A join may first take the peer for lost, or change the roles of others."""
    joined = next((each for each in upcoming if isinstance(each, events.PeerJoined)), None)
    if joined is not None:
        names = [each.name for each in upcoming if isinstance(each, events.PeerNamed)]
        yield commands.Join(
            PROTOCOL_VERSION,
            state.spec.hash,
            joined.peer,
            None if joined.role_reason else joined.role,
            joined.capacity,
            joined.endpoint,
            joined.reachability,
            joined.claimed,
            joined.problem,
            names[0] if names else state.name_of(joined.peer),
        )


def _create_invite(
    state: State, event: Any, upcoming: Sequence[Event], signers: Signers
) -> Iterator[Command]:
    seconds = event.expires_at - event.at  # rounded, so the sum may be another number
    found = (each for each in (seconds, nextafter(seconds, inf), nextafter(seconds, -inf)))
    valid = next((each for each in found if event.at + each == event.expires_at), seconds)
    yield commands.CreateInvite(event.invite, event.secret_sha256, event.uses, valid, event.role)


def _use_invite(state: State, event: Any, upcoming: Sequence[Event], signers: Signers) -> Iterator[Command]:
    known = state.invitations.get(event.invite)
    yield commands.Enroll(event.peer, event.invite, known.secret_sha256 if known else "")


def _revoke_invite(
    state: State, event: Any, upcoming: Sequence[Event], signers: Signers
) -> Iterator[Command]:
    banned = next((each for each in upcoming if isinstance(each, events.PeerBanned)), None)
    if banned is not None:
        yield commands.Ban(banned.peer, banned.reason, revoke_invites=True)
    yield commands.RevokeInvite(event.invite)


def _offer(state: State, event: Any, upcoming: Sequence[Event], signers: Signers) -> Iterator[Command]:
    yield commands.Offer(event.descriptor.owner, event.descriptor)
    yield from _report(state, event, upcoming, signers)


def _withhold(state: State, event: Any, upcoming: Sequence[Event], signers: Signers) -> Iterator[Command]:
    epoch = state.plan_for(event.round_number).epoch if state.plans else 0
    yield commands.Await(event.peer, event.stage, event.round_number, epoch)


def _report(state: State, event: Event, upcoming: Sequence[Event], signers: Signers) -> Iterator[Command]:
    """The first report among `upcoming`, with what it rejects and payloads that only it has told of."""
    reports = [each for each in upcoming if isinstance(each, events.HoldingsReported)]
    rejections = [each for each in upcoming if isinstance(each, events.PayloadRejected)]
    results = [each for each in upcoming if isinstance(each, events.ResultReported)]
    told: Any = next(iter([*reports, *rejections, *results]), None)
    if told is None:
        return
    round_state = state.round_of(told.stage, told.round_number)
    offers = dict(round_state.offers)
    for each in upcoming:
        if isinstance(each, events.PayloadOffered):
            offers.setdefault(each.descriptor.owner, each.descriptor)
    owners = (
        owners_of(round_state, reports[0]) if reports else round_state.reports.get(told.peer, frozenset())
    )
    held = tuple(offers[owner] for owner in sorted(owners) if owner in offers)
    rejected = tuple(
        Rejection(offers[each.owner], each.reason)
        for each in rejections
        if each.peer == told.peer and each.owner in offers
    )
    result = next((each.claim for each in results if each.peer == told.peer), None)
    yield commands.Report(told.peer, told.stage, told.round_number, held, rejected, result)


def _diverge(state: State, event: Any, upcoming: Sequence[Event], signers: Signers) -> Iterator[Command]:
    """An offer from another anchor is refused, and not stored."""
    number = event.round_number + 1
    assignment = state.assignment(event.peer, number)
    if assignment is None:
        return
    weight, epoch = assignment.replica.weight, state.plan_for(number).epoch
    payload = PayloadDescriptor(
        state.run, event.stage, number, event.peer, event.digest, "", weight, 1, "0" * 64, epoch=epoch
    )
    yield commands.Offer(event.peer, _signed(payload, signers))


def _repeated_reports(state: State) -> Iterator[Command]:
    """Reports that bring nothing new, and may come when the round is due."""
    number = state.current_round
    for stage in range(state.stages):
        reports = state.round_of(stage, number).reports if number else {}
        reporter = next((peer for peer in reports if state.peers[peer].is_live), None)
        if reporter is not None and not state.is_decided(stage, number):
            yield commands.Report(reporter, stage, number, ())


_Candidates = Callable[[State, Any, Sequence[Event], Signers], Iterable[Command]]
_CANDIDATES: tuple[tuple[type[Event], _Candidates], ...] = (
    (events.CoordinatorStarted, lambda state, event, *_: [commands.Start()]),
    (events.OwnRelayTold, lambda state, event, *_: [commands.TellOwnRelay(event.endpoint, event.uplink)]),
    (events.RunPaused, lambda state, event, *_: [commands.PauseRun(event.by, event.reason)]),
    (events.RunResumed, lambda state, event, *_: [commands.ResumeRun()]),
    (events.PeerJoined, _join),
    (events.PeerNamed, lambda state, event, *_: [commands.Unname(event.peer, allow=not event.refused)]),
    (events.PeerLost, _join),
    (events.RoleChanged, _join),
    (
        events.AddressesChanged,
        lambda state, event, *_: [
            commands.UpdateAddresses(
                event.peer, event.endpoint, event.reachability, event.claimed, event.problem
            )
        ],
    ),
    (
        events.LinkFailed,
        lambda state, event, *_: (
            [commands.ReportLink(event.peer, event.epoch, event.neighbour, event.address, event.reason)]
            * (event.since is None)
        ),  # else it follows from what replicas withhold
    ),
    (
        events.PeerMeasured,
        lambda state, event, *_: [commands.Heartbeat(event.peer, state.current_round, 0, event.estimates)],
    ),
    (events.PeerDraining, lambda state, event, *_: [commands.Drain(event.peer, event.reason)]),
    (events.PeerLeft, lambda state, event, *_: [commands.Leave(event.peer, event.reason)]),
    (
        events.PeerRetreated,
        lambda state, event, *_: [commands.Retreat(event.peer, event.epoch, event.reason)],
    ),
    (events.InviteCreated, _create_invite),
    (events.InviteUsed, _use_invite),
    (events.InviteRevoked, _revoke_invite),
    (events.PlaceAsked, lambda state, event, *_: [commands.AskPlace(event.peer, event.source, 2**31, 2**31)]),
    (events.PeerBanned, lambda state, event, *_: [commands.Ban(event.peer, event.reason)]),
    (events.PeerUnbanned, lambda state, event, *_: [commands.Unban(event.peer)]),
    (events.PayloadOffered, _offer),
    (events.PayloadWithheld, _withhold),
    (events.HoldingsReported, _report),
    (events.PayloadRejected, _report),
    (events.ResultReported, _report),
    (events.ArbiterAppointed, lambda state, event, *_: [commands.AppointArbiter(event.peer)]),
    (
        events.PayloadArbitrated,
        lambda state, event, *_: [
            commands.Arbitrate(event.stage, event.round_number, event.owner, event.verdict)
        ],
    ),
    (
        events.DigestAttested,
        lambda state, event, *_: [
            commands.Attest(event.peer, event.stage, event.round_number, event.part, event.digest)
        ],
    ),
    (events.AnchorDiverged, _diverge),
)
_CONSEQUENCES = (
    events.AssignmentReserved,
    events.PlanAdopted,
    events.GroupClosed,
    events.PayloadsContested,
    events.PeerStruck,
    events.PeerQuarantined,
    events.RoundDecided,
    events.RunRolledBack,
    events.RunFinished,
)
"""Events with which no command but a tick begins."""
