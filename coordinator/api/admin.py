"""The API for the operator: invites, the list of peers, and bans."""

from __future__ import annotations

import hashlib
import secrets

from coordinator.api.access import Access
from coordinator.api.rpc_handling import Context, answering
from coordinator.command_loop import CommandLoop
from coordinator.state import commands
from coordinator.state.state import State
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.trust.invite import ID_BYTES, SECRET_BYTES, Invite
from protocol.types import PeerId
from protocol.wire.convert.fields import name_from_pb, peer_from_pb, role_from_pb, sentence_from_pb


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

    @answering
    async def CreateInvite(self, request: pb.CreateInviteRequest, context: Context) -> pb.CreateInviteReply:
        with self._access.of_operator(context):
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
            return pb.CreateInviteReply(
                invite=Invite(*self._addresses, self._pin, id, secret).encode(), id=id
            )

    @answering
    async def ListInvites(self, request: pb.ListInvitesRequest, context: Context) -> pb.ListInvitesReply:
        with self._access.of_operator(context):
            now = self._command_loop.now()
            return pb.ListInvitesReply(
                invites=[
                    pb.InviteStatus(
                        id=invitation.invite,
                        uses=invitation.uses,
                        peers=invitation.peers,
                        expires_in_seconds=invitation.expires_at - now,
                        role=invitation.role.value if invitation.role else "",
                        revoked=invitation.revoked,
                    )
                    for invitation in self._command_loop.state.invitations.values()
                ]
            )

    @answering
    async def RevokeInvite(self, request: pb.RevokeInviteRequest, context: Context) -> pb.RevokeInviteReply:
        with self._access.of_operator(context):
            invite = name_from_pb(request.id, "the invite")
            await self._command_loop.execute(commands.RevokeInvite(invite))
            return pb.RevokeInviteReply()

    @answering
    async def ListPeers(self, request: pb.ListPeersRequest, context: Context) -> pb.ListPeersReply:
        with self._access.of_operator(context):
            state = self._command_loop.state
            # Each peer once, in a stable order. A peer may be banned before it has enrolled.
            known = dict.fromkeys((*state.enrolled, *state.peers, *state.banned))
            return pb.ListPeersReply(peers=[_enrolled_peer(state, peer) for peer in known])

    @answering
    async def Ban(self, request: pb.BanRequest, context: Context) -> pb.BanReply:
        with self._access.of_operator(context):
            reason = sentence_from_pb(request.reason, "the reason")
            await self._command_loop.execute(commands.Ban(peer_from_pb(request.peer), reason))
            return pb.BanReply()

    @answering
    async def Unban(self, request: pb.UnbanRequest, context: Context) -> pb.UnbanReply:
        with self._access.of_operator(context):
            await self._command_loop.execute(commands.Unban(peer_from_pb(request.peer)))
            return pb.UnbanReply()


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
    )
