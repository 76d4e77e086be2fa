"""Who is let in: the life of an invite, from its making to its last use."""

from __future__ import annotations

import hmac

from coordinator.membership.validation import bad_request
from coordinator.state.events import InviteCreated, InviteRevoked, InviteUsed
from coordinator.state.state import Invitation, State
from coordinator.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId, Role

MAX_USES = 10_000
MAX_VALID_SECONDS = 366 * 86400.0

_ASK = "Ask the operator of the run for a new invite."


def create(
    transaction: Transaction,
    invite: str,
    secret_sha256: str,
    uses: int,
    valid_seconds: float,
    role: Role | None,
    now: float,
) -> None:
    """Raises BAD_REQUEST beyond MAX_USES or MAX_VALID_SECONDS."""
    if not 1 <= uses <= MAX_USES:
        raise bad_request(f"an invite for {uses} peers, not 1 to {MAX_USES}")
    if not 0 < valid_seconds <= MAX_VALID_SECONDS:
        raise bad_request(f"an invite for {valid_seconds:g} s, not up to {MAX_VALID_SECONDS:g}")
    if invite in transaction.state.invitations:
        raise bad_request(f"the name {invite} is another invite's")
    transaction.add(InviteCreated(now, invite, secret_sha256, uses, now + valid_seconds, role))


def revoke(transaction: Transaction, invite: str, now: float) -> None:
    """Nobody new comes in with it; those it has let in stay. Raises INVITE_UNKNOWN."""
    if not _known(transaction.state, invite).revoked:
        transaction.add(InviteRevoked(now, invite))


def enroll(transaction: Transaction, peer: PeerId, invite: str, secret_sha256: str, now: float) -> None:
    """Let `peer` have certificates. The same peer may come again with its invite, or later without any.

    Raises:
        HetnodeError: INVITE_UNKNOWN, INVITE_FORGED, INVITE_REVOKED, INVITE_EXPIRED, INVITE_USED; UNKNOWN_PEER
            for a peer without invite that was never let in.
    """
    if not invite:
        if peer not in transaction.state.enrolled:
            raise HetnodeError(ErrorCode.UNKNOWN_PEER, f"Peer {peer} was never let into this run.", _ASK)
        return
    invitation = _known(transaction.state, invite)
    if not hmac.compare_digest(secret_sha256, invitation.secret_sha256):
        raise _refused(ErrorCode.INVITE_FORGED, f"The secret of invite {invite} is another one.")
    if invitation.revoked:
        raise _refused(ErrorCode.INVITE_REVOKED, f"Invite {invite} was revoked by the operator.")
    if now >= invitation.expires_at:
        hours = (now - invitation.expires_at) / 3600
        raise _refused(ErrorCode.INVITE_EXPIRED, f"Invite {invite} expired {hours:.1f} h ago.")
    if peer in invitation.peers:
        return
    if len(invitation.peers) >= invitation.uses:
        times = "once" if invitation.uses == 1 else f"{invitation.uses} times"
        raise _refused(ErrorCode.INVITE_USED, f"Invite {invite} could be used {times} and was.")
    transaction.add(InviteUsed(now, invite, peer))


def permitted_role(state: State, peer: PeerId) -> Role | None:
    """The only role in which `peer` may join by the invite that it came with; None for any."""
    invite = state.enrolled.get(peer)
    return state.invitations[invite].role if invite is not None else None


def _known(state: State, invite: str) -> Invitation:
    found = state.invitations.get(invite)
    if found is None:
        raise _refused(ErrorCode.INVITE_UNKNOWN, f"This coordinator has made no invite {invite}.")
    return found


def _refused(code: ErrorCode, cause: str) -> HetnodeError:
    return HetnodeError(code, cause, _ASK)
