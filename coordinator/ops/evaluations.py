"""Takes in what members and the operator tell of the model."""

from __future__ import annotations

from coordinator.run.command_loop import CommandLoop
from protocol.server.calls import Context
from protocol.status import ModelEvaluation
from protocol.trust.names import identity_of, peer_of
from protocol.types import PeerId
from protocol.wire.operator_calls import TellEvaluation


class EvaluationDesk:
    """Answers :class:`TellEvaluation`, for every peer that has joined, live or not, and the operator."""

    def __init__(self, command_loop: CommandLoop) -> None:
        self._command_loop = command_loop

    async def tell(self, call: TellEvaluation, context: Context) -> None:
        """Raises HetnodeError as coordinator.membership.evaluations.take_evaluation."""
        peer = peer_of(identity_of(context)) or PeerId("")
        told = call.round_number, call.name, call.figures, call.samples
        await self._command_loop.execute(ModelEvaluation(peer, *told))
