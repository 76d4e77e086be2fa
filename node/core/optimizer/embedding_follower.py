"""The token embedding on a member that does not host stage 0."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from node.core.model.shapes import EMBEDDING, payload_layout
from node.core.optimizer.outcome import Outcome, contents_of
from node.core.optimizer.outer_stage import with_state
from node.core.optimizer.received import ReceivedPayloads
from protocol.math.outer_step import apply_update
from protocol.spec.run import RunSpec


class EmbeddingFollower:
    """The token embedding of the last committed round, on a member that does not host stage 0.

    It applies what rounds of stage 0 commit to this one tensor with the same arithmetic as
    :class:`OuterStage`. So the table and its optimizer state equal those of stage 0's hosts in every bit.
    The receiving end of a link derives T_perp from this table.

    `table_vd` is the committed embedding before round 1.

    Attributes:
        committed: TE, float32 [V, d] on the CPU, and its optimizer state, by name. A commit replaces the
            tensors and never changes one in place.
    """

    def __init__(self, spec: RunSpec, table_vd: Tensor) -> None:
        self._received = ReceivedPayloads(payload_layout(spec, 0))
        self._outer = spec.outer
        self.committed: dict[str, Tensor] = {}
        self.load({EMBEDDING: table_vd})

    @property
    def table_vd(self) -> Tensor:
        """TE, float32 [V, d] on the CPU."""
        return self.committed[EMBEDDING]

    def load(self, committed: Mapping[str, Tensor]) -> None:
        """Copy the table after another round. An optimizer state that is not in `committed` becomes 0."""
        self.committed = with_state(committed, [EMBEDDING], self._outer.slots)

    def commit(self, outcome: Outcome) -> None:
        """Apply the outcome of a round of stage 0. HetnodeError PAYLOAD_CORRUPT changes nothing."""
        decoded, weights = contents_of(self._received, outcome)
        self._received.clear()
        self.committed = apply_update(self.committed, decoded, weights, self._outer)
