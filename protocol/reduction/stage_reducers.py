"""The reducers of one member for one stage, over rounds in which its parts change."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from protocol.reduction.partition import PartRange
from protocol.reduction.parts import Reducer, ReductionLayout, split_result


class StageReducers:
    """One reducer for each part of this member; what stays from round to round keeps its residual.

    Parts change with the group and its lines. The residual follows the chunks: that of chunks which another
    member reduces now is lost, and `lost_norm` counts it.

    Of two members, one reduces and its partner checks: both keep the same residuals, since the same round.

    Attributes:
        since: the first committed round in the residuals; 0 if there is none.
    """

    def __init__(self, layout: ReductionLayout) -> None:
        self._layout = layout
        self._reducers: list[Reducer] = []
        self._partner = ""
        self.since = 0
        self._lost_squares = 0.0

    @property
    def residual_norm(self) -> float:
        """L2 norm of what these reducers have not sent yet."""
        return math.hypot(*(each.residual_norm for each in self._reducers))

    @property
    def lost_norm(self) -> float:
        """L2 norm of all residuals that were lost by changes of the parts."""
        return math.sqrt(self._lost_squares)

    def for_parts(self, parts: Sequence[PartRange], partner: str = "") -> list[Reducer]:
        """The reducers of these parts, which do not overlap. What is pending is aborted.

        With another `partner` than in the last round all residuals are lost.
        """
        self.abort()
        if partner != self._partner:
            self.clear()
            self._partner = partner
        if [each.part for each in self._reducers] != list(parts):
            before = self.residual_norm
            self._reducers = [self._taking_over(part) for part in parts]
            # Rounding must not make a negative number of what is lost.
            self._lost_squares += max(0.0, before**2 - self.residual_norm**2)
        return list(self._reducers)

    def commit(self, round_number: int, result: bytes) -> None:
        """The round is committed with `result`.

        If that does not have all of these parts as they are pending, others have reduced, and all residuals
        are lost: the partner, which has seen the same, loses the same.

        Raises HetnodeError PAYLOAD_CORRUPT for what is no result of this stage.
        """
        committed = split_result(self._layout, result)
        if any(committed.get(each.part) != each.pending_result for each in self._reducers):
            self.clear()
            return
        for each in self._reducers:
            each.commit()
        self.since = self.since or round_number

    def abort(self) -> None:
        """The round is not committed."""
        for each in self._reducers:
            each.abort()

    def clear(self) -> None:
        """Lose all residuals."""
        self.abort()
        self._lost_squares += self.residual_norm**2
        self._reducers = [Reducer(self._layout, each.part) for each in self._reducers]
        self.since = 0

    def _taking_over(self, part: PartRange) -> Reducer:
        """A reducer of `part` with the residuals that the present ones have of its chunks."""
        elements = self._elements(part)
        residual = torch.zeros(elements.stop - elements.start)
        for each in self._reducers:
            held, theirs = each.residual, self._elements(each.part)
            first, stop = max(elements.start, theirs.start), min(elements.stop, theirs.stop)
            if first < stop:
                kept = held[first - theirs.start : stop - theirs.start]
                residual[first - elements.start : stop - elements.start] = kept
        found = Reducer(self._layout, part)
        found.residual = residual
        return found

    def _elements(self, part: PartRange) -> slice:
        before = self._layout.chunks.elements_before
        return slice(before(part.first_chunk), before(part.last_chunk))
