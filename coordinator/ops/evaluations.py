"""Takes in what members and the operator tell of the model."""

from __future__ import annotations

from coordinator.run.command_loop import CommandLoop
from protocol.server.calls import Context, rate_limited
from protocol.status import ModelEvaluation
from protocol.trust.names import identity_of, peer_of
from protocol.trust.rate_limit import RateLimit
from protocol.types import PeerId
from protocol.wire.operator_calls import TellEvaluation

_AT_ONCE, _PER_SECOND = 64, 1 / 60
"""Evaluations of one peer, of up to 64 KB in the log. A harness tells all its tasks at once."""


class EvaluationDesk:
    """Answers :class:`TellEvaluation`, for every peer that has joined, live or not, and the operator."""

    def __init__(self, command_loop: CommandLoop) -> None:
        self._command_loop = command_loop
        self._rate = RateLimit(_AT_ONCE, _PER_SECOND)

    async def tell(self, call: TellEvaluation, context: Context) -> None:
        """Raises HetnodeError RATE_LIMITED, and as coordinator.membership.evaluations.take_evaluation."""
        peer = peer_of(identity_of(context)) or PeerId("")
        if peer and not self._rate.allows(peer, self._command_loop.now()):
            raise rate_limited(f"Peer {peer} tells evaluations too often")
        told = call.round_number, call.name, call.figures, call.samples
        await self._command_loop.execute(ModelEvaluation(peer, *told))
