"""The call by which a peer names its owner."""

from __future__ import annotations

from coordinator.api.access import AccessControl
from coordinator.run.command_loop import CommandLoop
from coordinator.run.state.commands import BindOwner
from protocol.server.calls import Context
from protocol.wire.operator_calls import NameOwner


class OwnerDesk:
    """Answers :class:`NameOwner`."""

    def __init__(self, access: AccessControl, command_loop: CommandLoop) -> None:
        self._access, self._command_loop = access, command_loop

    async def bind(self, call: NameOwner, context: Context) -> None:
        """Raises HetnodeError: CERTIFICATE_REFUSED for the node of another; RATE_LIMITED, BAD_REQUEST."""
        peer = self._access.peer(context, call.binding.peer)
        self._access.check_rate(peer, "names its owner")
        await self._command_loop.execute(BindOwner(call.binding))
