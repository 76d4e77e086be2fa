"""Invites: the operator creates and revokes them, and peers enroll with them."""

from __future__ import annotations

import hmac

from coordinator.membership.validation import bad_request, check_not_excluded
from coordinator.run.state.commands import CreateInvite, Enroll, RevokeInvite
from coordinator.run.state.events import InviteCreated, InviteRevoked, InviteUsed
from coordinator.run.state.records import Invitation
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId, Role

MAX_USES = 10_000
MAX_VALID_SECONDS = 366 * 86400.0

_ASK = "Ask the operator of the run for a new invite."


def create(transaction: Transaction, command: CreateInvite) -> None:
    """Create an invite. Raises BAD_REQUEST beyond MAX_USES or MAX_VALID_SECONDS, and for a name in use."""
    uses, seconds = command.uses, command.valid_seconds
    if not 1 <= uses <= MAX_USES:
        raise bad_request(f"an invite for {uses} peers, not 1 to {MAX_USES}")
    if not 0 < seconds <= MAX_VALID_SECONDS:
        raise bad_request(f"an invite for {seconds:g} s, not up to {MAX_VALID_SECONDS:g}")
    if command.invite in transaction.state.invitations:
        raise bad_request(f"another invite has the name {command.invite}")
    now, digest = transaction.now, command.secret_sha256
    transaction.add(InviteCreated(now, command.invite, digest, uses, now + seconds, command.role))


def revoke(transaction: Transaction, command: RevokeInvite) -> None:
    """Let no more peers in with the invite; peers that have used it stay. Raises INVITE_UNKNOWN."""
    if not _known(transaction.state, command.invite).revoked:
        transaction.add(InviteRevoked(transaction.now, command.invite))


def enroll(transaction: Transaction, command: Enroll) -> None:
    """Permit certificates for the peer. It may repeat the call with its invite, or later without one.

    Raises:
        HetnodeError: BANNED, QUARANTINED; INVITE_UNKNOWN, INVITE_FORGED, INVITE_REVOKED, INVITE_EXPIRED,
            INVITE_USED; UNKNOWN_PEER for a peer without invite that is not enrolled.
    """
    peer, invite = command.peer, command.invite
    check_not_excluded(transaction.state, peer)
    if not invite:
        if peer not in transaction.state.enrolled:
            raise HetnodeError(ErrorCode.UNKNOWN_PEER, f"Peer {peer} is not enrolled in this run.", _ASK)
        return
    invitation = _known(transaction.state, invite)
    # The secret comes first: without it, a caller learns nothing about the state of an invite.
    if not hmac.compare_digest(command.secret_sha256, invitation.secret_sha256):
        raise _refused(ErrorCode.INVITE_FORGED, f"The secret of invite {invite} is wrong.")
    if invitation.revoked:
        raise _refused(ErrorCode.INVITE_REVOKED, f"The operator has revoked invite {invite}.")
    if transaction.now >= invitation.expires_at:
        hours = (transaction.now - invitation.expires_at) / 3600
        raise _refused(ErrorCode.INVITE_EXPIRED, f"Invite {invite} expired {hours:.1f} h ago.")
    if peer in invitation.peers:
        return  # a repeated call, whose answer was lost, takes no second use
    if len(invitation.peers) >= invitation.uses:
        times = "once" if invitation.uses == 1 else f"{invitation.uses} times"
        raise _refused(ErrorCode.INVITE_USED, f"Invite {invite} is valid {times} and is used up.")
    transaction.add(InviteUsed(transaction.now, invite, peer))


def open_invites_of(state: State, peer: PeerId, now: float) -> list[Invitation]:
    """The invites that `peer` has used and that still let other peers in at time `now`."""
    return [
        each
        for each in state.invitations.values()
        if peer in each.peers and not each.revoked and now < each.expires_at and len(each.peers) < each.uses
    ]


def permitted_role(state: State, peer: PeerId) -> Role | None:
    """The only role in which `peer` may join, by its newest invite; None for any role."""
    invitation = state.invitations.get(state.enrolled.get(peer, ""))
    return invitation.role if invitation is not None else None


def _known(state: State, invite: str) -> Invitation:
    found = state.invitations.get(invite)
    if found is None:
        raise _refused(ErrorCode.INVITE_UNKNOWN, f"This coordinator knows no invite {invite}.")
    return found


def _refused(code: ErrorCode, cause: str) -> HetnodeError:
    return HetnodeError(code, cause, _ASK)
