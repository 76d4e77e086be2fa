"""The API for the operator: invites, the list of peers, bans, and pauses of the run."""

from __future__ import annotations

import hashlib
import secrets

from coordinator.api.access import Access
from coordinator.command_loop import CommandLoop
from coordinator.membership.invites import open_invites_of
from coordinator.rounds.rollback import restorable_rounds
from coordinator.state import commands
from coordinator.state.invitation import Invitation
from coordinator.state.state import State
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.server.admission import Context
from protocol.trust.invite import ID_BYTES, SECRET_BYTES, Invite
from protocol.types import PausedBy, PeerId
from protocol.wire.convert.fields import name_from_pb, peer_from_pb, role_from_pb, sentence_from_pb
from protocol.wire.convert.plans import pause_to_pb


class AdminService(pb_grpc.AdminServicer):
    """Answers calls with the operator's certificate.

    Args:
        command_loop: owns the state; it is running.
        access: checks who calls.
        pin: of the run's authority, for invites.
        api_address: advertised ``host:port`` of the API, for invites.
        enrollment_address: advertised ``host:port`` of enrollment, for invites.
    """

    def __init__(
        self, command_loop: CommandLoop, access: Access, pin: bytes, api_address: str, enrollment_address: str
    ) -> None:
        self._command_loop = command_loop
        self._access = access
        self._pin = pin
        self._addresses = (api_address, enrollment_address)

    async def CreateInvite(self, request: pb.CreateInviteRequest, context: Context) -> pb.CreateInviteReply:
        self._access.check_operator(context)
        # The secret leaves with the reply. The log keeps its hash alone, so its reader cannot enroll.
        id, secret = secrets.token_hex(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        role = role_from_pb(request.role) if request.role else None
        await self._command_loop.execute(
            commands.CreateInvite(
                invite=id,
                secret_sha256=hashlib.sha256(secret).hexdigest(),
                uses=request.uses,
                valid_seconds=request.valid_seconds,
                role=role,
            )
        )
        return pb.CreateInviteReply(invite=Invite(*self._addresses, self._pin, id, secret).encode(), id=id)

    async def ListInvites(self, request: pb.ListInvitesRequest, context: Context) -> pb.ListInvitesReply:
        self._access.check_operator(context)
        now = self._command_loop.now()
        invitations = self._command_loop.state.invitations.values()
        return pb.ListInvitesReply(invites=[_invite_status(each, now) for each in invitations])

    async def RevokeInvite(self, request: pb.RevokeInviteRequest, context: Context) -> pb.RevokeInviteReply:
        self._access.check_operator(context)
        invite = name_from_pb(request.id, "the invite")
        await self._command_loop.execute(commands.RevokeInvite(invite))
        return pb.RevokeInviteReply()

    async def ListPeers(self, request: pb.ListPeersRequest, context: Context) -> pb.ListPeersReply:
        self._access.check_operator(context)
        state = self._command_loop.state
        # Each peer once, in a stable order. A peer may be banned before it has enrolled.
        known = dict.fromkeys((*state.enrolled, *state.peers, *state.banned))
        return pb.ListPeersReply(peers=[_enrolled_peer(state, peer) for peer in known])

    async def Ban(self, request: pb.BanRequest, context: Context) -> pb.BanReply:
        self._access.check_operator(context)
        reason = sentence_from_pb(request.reason, "the reason")
        peer, now = peer_from_pb(request.peer), self._command_loop.now()
        open_before = open_invites_of(self._command_loop.state, peer, now)
        await self._command_loop.execute(commands.Ban(peer, reason, request.revoke_invites))
        invitations = self._command_loop.state.invitations
        return pb.BanReply(invites=[_invite_status(invitations[each.invite], now) for each in open_before])

    async def Unban(self, request: pb.UnbanRequest, context: Context) -> pb.UnbanReply:
        self._access.check_operator(context)
        await self._command_loop.execute(commands.Unban(peer_from_pb(request.peer)))
        return pb.UnbanReply()

    async def PauseRun(self, request: pb.PauseRunRequest, context: Context) -> pb.PauseRunReply:
        self._access.check_operator(context)
        reason = sentence_from_pb(request.reason, "the reason")
        before = self._command_loop.state.pause
        await self._command_loop.execute(commands.PauseRun(PausedBy.OPERATOR, reason))
        state = self._command_loop.state
        pause = state.pause
        return pb.PauseRunReply(
            changed=before is None,
            pause=None if pause is None else pause_to_pb(pause),
            round=0 if state.is_held else state.current_round,
        )

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Context) -> pb.ResumeRunReply:
        self._access.check_operator(context)
        was_paused = self._command_loop.state.pause is not None
        await self._command_loop.execute(commands.ResumeRun())
        return pb.ResumeRunReply(changed=was_paused)

    async def Unname(self, request: pb.UnnameRequest, context: Context) -> pb.UnnameReply:
        self._access.check_operator(context)
        peer = peer_from_pb(request.peer)
        former = self._command_loop.state.name_of(peer)
        await self._command_loop.execute(commands.Unname(peer, request.allow))
        return pb.UnnameReply(name=former)

    async def RollBack(self, request: pb.RollBackRequest, context: Context) -> pb.RollBackReply:
        self._access.check_operator(context)
        reason = sentence_from_pb(request.reason, "the reason")
        before = len(self._command_loop.state.restored)
        await self._command_loop.execute(commands.RollBack(request.restore_round, reason))
        restored = self._command_loop.state.restored
        assert len(restored) > before, "an accepted rollback is decided"
        return pb.RollBackReply(round=max(restored))

    async def ListRollbacks(
        self, request: pb.ListRollbacksRequest, context: Context
    ) -> pb.ListRollbacksReply:
        self._access.check_operator(context)
        state = self._command_loop.state
        rounds = restorable_rounds(state)
        return pb.ListRollbacksReply(
            rounds=[
                pb.RestorableRound(
                    round=each.round_number,
                    problem=each.problem,
                    tokens=state.tokens - state.tokens_at.get(each.round_number, 0),
                )
                for each in rounds
            ],
            round=state.current_round,
        )


def _invite_status(invitation: Invitation, now: float) -> pb.InviteStatus:
    return pb.InviteStatus(
        id=invitation.invite,
        uses=invitation.uses,
        peers=invitation.peers,
        expires_in_seconds=invitation.expires_at - now,
        role=invitation.role.value if invitation.role else "",
        revoked=invitation.revoked,
    )


def _enrolled_peer(state: State, peer: PeerId) -> pb.EnrolledPeer:
    known = state.peers.get(peer)
    return pb.EnrolledPeer(
        peer=peer,
        invite=state.enrolled.get(peer, ""),
        lifecycle=known.lifecycle.value if known else "",
        role=known.role.value if known else "",
        banned=peer in state.banned,
        reason=state.banned.get(peer, ""),
        quarantined=peer in state.quarantined,
        name=state.name_of(peer),
    )
