"""What the operator asks a coordinator to do: invites, the list of peers, bans, and pauses of the run."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Container

from coordinator.membership.invites import open_invites_of
from coordinator.rollback import restorable_rounds
from coordinator.run.command_loop import CommandLoop
from coordinator.run.state import commands
from coordinator.run.state.records import Invitation
from coordinator.run.state.state import State
from protocol.server.calls import Context
from protocol.trust.invite import ID_BYTES, OPEN_INVITE, SECRET_BYTES, Invite
from protocol.types import PausedBy, PeerId, RunChange
from protocol.wire import operator_calls as calls
from protocol.wire.convert.fields import name_from_pb, peer_from_pb, sentence_from_pb, setting_from_pb


class Admin:
    """Answers calls with the operator's certificate.

    Args:
        command_loop: owns the state; it is running.
        resting: the peers whose processes rest, as they are at each moment.
        pin: of the run's authority, for invites.
        api_address: advertised ``host:port`` of the API, for invites.
        enrollment_address: advertised ``host:port`` of enrollment, for invites.
    """

    def __init__(
        self,
        command_loop: CommandLoop,
        resting: Container[PeerId],
        pin: bytes,
        api_address: str,
        enrollment_address: str,
    ) -> None:
        self._command_loop, self._resting = command_loop, resting
        self._pin = pin
        self._addresses = (api_address, enrollment_address)

    async def issue_invite(self, call: calls.IssueInvite, _: Context) -> calls.IssuedInvite:
        # The secret leaves with the reply. The log keeps its hash alone, so its reader cannot enroll.
        id, secret = secrets.token_hex(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        secret_sha256 = hashlib.sha256(secret).hexdigest()
        await self._command_loop.execute(
            commands.CreateInvite(id, secret_sha256, call.uses, call.valid_seconds, call.role)
        )
        return calls.IssuedInvite(Invite(*self._addresses, self._pin, id, secret).encode(), id)

    async def list_invites(self, call: calls.ListInvites, _: Context) -> tuple[calls.InviteStatus, ...]:
        now = self._command_loop.now()
        return tuple(_status(each, now) for each in self._command_loop.state.invitations.values())

    async def withdraw_invite(self, call: calls.WithdrawInvite, _: Context) -> None:
        await self._command_loop.execute(commands.RevokeInvite(name_from_pb(call.id, "the invite")))

    async def list_peers(self, call: calls.ListPeers, _: Context) -> tuple[calls.EnrolledPeer, ...]:
        state = self._command_loop.state
        # Each peer once, in a stable order. A peer may be banned before it has enrolled.
        known = dict.fromkeys((*state.enrolled, *state.peers, *state.banned))
        return tuple(_enrolled_peer(state, peer, peer in self._resting) for peer in known)

    async def ban(self, call: calls.BanPeer, _: Context) -> tuple[calls.InviteStatus, ...]:
        reason = sentence_from_pb(call.reason, "the reason")
        peer, now = peer_from_pb(call.peer), self._command_loop.now()
        open_before = open_invites_of(self._command_loop.state, peer, now)
        await self._command_loop.execute(commands.Ban(peer, reason, call.revoke_invites))
        invitations = self._command_loop.state.invitations
        return tuple(_status(invitations[each.invite], now) for each in open_before)

    async def unban(self, call: calls.UnbanPeer, _: Context) -> None:
        await self._command_loop.execute(commands.Unban(peer_from_pb(call.peer)))

    async def hold_run(self, call: calls.HoldRun, _: Context) -> calls.PauseAnswer:
        reason = sentence_from_pb(call.reason, "the reason")
        before = self._command_loop.state.pause
        await self._command_loop.execute(commands.PauseRun(PausedBy.OPERATOR, reason))
        state = self._command_loop.state
        return calls.PauseAnswer(before is None, state.pause, 0 if state.is_held else state.current_round)

    async def go_on(self, call: calls.GoOn, _: Context) -> bool:
        was_paused = self._command_loop.state.pause is not None
        await self._command_loop.execute(commands.ResumeRun())
        return was_paused

    async def change_settings(self, call: calls.ChangeSettings, _: Context) -> RunChange:
        settings = tuple(setting_from_pb(each, "the setting") for each in call.settings)
        reason = sentence_from_pb(call.reason, "the reason")
        before = Counter(self._command_loop.state.changes)
        await self._command_loop.execute(commands.ChangeRun(settings, call.from_round, reason))
        # An equal one may have been told before.
        return next(iter(Counter(self._command_loop.state.changes) - before))

    async def take_name(self, call: calls.TakeName, _: Context) -> str:
        peer = peer_from_pb(call.peer)
        former = self._command_loop.state.name_of(peer)
        await self._command_loop.execute(commands.Unname(peer, call.allow))
        return former

    async def restore_round(self, call: calls.RestoreRound, _: Context) -> int:
        reason = sentence_from_pb(call.reason, "the reason")
        before = len(self._command_loop.state.restored)
        await self._command_loop.execute(commands.RollBack(call.restore_round, reason))
        restored = self._command_loop.state.restored
        assert len(restored) > before, "an accepted rollback is decided"
        return max(restored)

    async def list_rollbacks(self, call: calls.ListRollbacks, _: Context) -> calls.RollbackChoices:
        state = self._command_loop.state
        rounds = (
            calls.RestorableRound(
                each.round_number,
                each.problem,
                # Of a round that is not decided here nothing is undone.
                0
                if each.round_number >= state.current_round
                else state.tokens - state.tokens_at.get(each.round_number, 0),
            )
            for each in restorable_rounds(state)
        )
        return calls.RollbackChoices(tuple(rounds), state.current_round)


def _status(invitation: Invitation, now: float) -> calls.InviteStatus:
    return calls.InviteStatus(
        invitation.invite,
        invitation.uses,
        tuple(invitation.peers),
        invitation.expires_at - now,
        invitation.role,
        invitation.revoked,
    )


def _enrolled_peer(state: State, peer: PeerId, rests: bool) -> calls.EnrolledPeer:
    known = state.peers.get(peer)
    return calls.EnrolledPeer(
        peer=peer,
        invite="open" if state.enrolled.get(peer) == OPEN_INVITE else state.enrolled.get(peer, ""),
        lifecycle=known.lifecycle if known else None,
        role=known.role if known else None,
        banned=peer in state.banned,
        reason=state.banned.get(peer, ""),
        quarantined=peer in state.quarantined,
        name=state.name_of(peer),
        rests=rests,
    )
