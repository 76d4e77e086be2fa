"""The operator's calls to a coordinator: invites, the list of peers with their bans, pauses of the run."""

from __future__ import annotations

from typing import Any, Self, cast

import grpc

from node.security.channels import open_channel
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.trust.names import COORDINATOR_NAME
from protocol.types import Role
from protocol.wire.rpc_errors import error_from_rpc

_CALL_SECONDS = 10.0


class AdminClient:
    """An asynchronous context manager. Each call raises COORDINATOR_UNREACHABLE or the refusal."""

    def __init__(self, address: str, operator: Credentials) -> None:
        self._address = address
        self._channel = open_channel(address, operator, COORDINATOR_NAME, ())
        self._stub = pb_grpc.AdminStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def create_invite(self, uses: int, valid_seconds: float, role: Role | None) -> tuple[str, str]:
        """The invite, which is secret, and its id, which is public."""
        request = pb.CreateInviteRequest(
            uses=uses, valid_seconds=valid_seconds, role=role.value if role else ""
        )
        reply = await self._call(self._stub.CreateInvite, request)
        return reply.invite, reply.id

    async def list_invites(self) -> list[pb.InviteStatus]:
        return list((await self._call(self._stub.ListInvites, pb.ListInvitesRequest())).invites)

    async def revoke_invite(self, id: str) -> None:
        await self._call(self._stub.RevokeInvite, pb.RevokeInviteRequest(id=id))

    async def list_peers(self) -> list[pb.EnrolledPeer]:
        return list((await self._call(self._stub.ListPeers, pb.ListPeersRequest())).peers)

    async def ban(self, peer: str, reason: str, revoke_invites: bool = False) -> list[pb.InviteStatus]:
        """Ban `peer`. Returns its invites that let others in until now; each says whether it is revoked."""
        request = pb.BanRequest(peer=peer, reason=reason, revoke_invites=revoke_invites)
        return list((await self._call(self._stub.Ban, request)).invites)

    async def unban(self, peer: str) -> None:
        await self._call(self._stub.Unban, pb.UnbanRequest(peer=peer))

    async def pause_run(self, reason: str) -> pb.PauseRunReply:
        return cast(
            pb.PauseRunReply, await self._call(self._stub.PauseRun, pb.PauseRunRequest(reason=reason))
        )

    async def resume_run(self) -> bool:
        """Returns whether the run was paused."""
        return bool((await self._call(self._stub.ResumeRun, pb.ResumeRunRequest())).changed)

    async def unname(self, peer: str, allow: bool = False) -> str:
        """Take the public name of `peer`, or allow it one again. Returns the name that it had, or ""."""
        request = pb.UnnameRequest(peer=peer, allow=allow)
        return str((await self._call(self._stub.Unname, request)).name)

    async def list_rollbacks(self) -> pb.ListRollbacksReply:
        """The former rounds whose anchors peers may keep, and the open round."""
        reply = await self._call(self._stub.ListRollbacks, pb.ListRollbacksRequest())
        return cast(pb.ListRollbacksReply, reply)

    async def roll_back(self, restore_round: int, reason: str) -> int:
        """Returns the round whose decision is the rollback. Raises NO_ROLLBACK as well."""
        request = pb.RollBackRequest(restore_round=restore_round, reason=reason)
        return int((await self._call(self._stub.RollBack, request)).round)

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            refusal = error_from_rpc(error)
            if refusal is not None:
                raise refusal from None
            raise HetnodeError(
                ErrorCode.COORDINATOR_UNREACHABLE,
                f"The coordinator at {self._address} does not answer ({error.code().name}).",
                "Check that 'hetnode coordinator' runs, with this folder.",
            ) from None
