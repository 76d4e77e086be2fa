"""Which figures of a measurement are believed.

Pages and alarms take what a member tells of one payload of each of its stages: the next one in canonical
order. So each payload is described by one peer at most, which does not choose it. A liar can make its
neighbour in this order look bad, and nobody else. Scores take the median of what all members tell
(coordinator.membership.scores).
"""

from __future__ import annotations

import math
from dataclasses import replace

from coordinator.membership.validation import bad_request
from coordinator.run.state.state import State
from protocol.group.measured import measured_position
from protocol.status import Measurement, PayloadAgreement
from protocol.types import Committed

MAX_NORM = 1e18
"""Greater norms than any training has; their squares are still finite."""
_ROUNDING = 1e-6


def check_place(state: State, measurement: Measurement) -> None:
    """Raise HetnodeError BAD_REQUEST unless its peer has this place in this round."""
    peer, round_number = measurement.peer, measurement.round_number
    # Round 0 is the model before its first round.
    in_run = round_number <= state.current_round
    assignment = state.assignment(peer, max(1, round_number)) if in_run else None
    if assignment is None:
        raise bad_request(f"{peer} measured round {round_number}, in which it has no place")
    # The status would show it as the measurement of another replica.
    if (measurement.replica, measurement.position) != (assignment.replica.index, assignment.position):
        raise bad_request(f"{peer} measured another place than its own in round {round_number}")


def believed(state: State, measurement: Measurement) -> Measurement:
    """`measurement` without the figures that its peer cannot know or that no payload has; never raises."""
    found: dict[int, PayloadAgreement] = {}
    for each in measurement.agreements:
        if _is_measured(state, measurement, each) and _is_possible(each):
            found[each.stage] = each
    norms = (measurement.progress_norm, measurement.error_norm)
    known = norms if all(map(_is_norm, norms)) else (0.0, 0.0)
    agreements = tuple(found[stage] for stage in sorted(found))
    return replace(measurement, agreements=agreements, progress_norm=known[0], error_norm=known[1])


def possible(measurement: Measurement) -> Measurement:
    """`measurement` with the figures alone that a payload can have, of whichever payloads."""
    return replace(measurement, agreements=tuple(filter(_is_possible, measurement.agreements)))


def _is_measured(state: State, measurement: Measurement, agreement: PayloadAgreement) -> bool:
    decision = state.decisions.get((agreement.stage, measurement.round_number))
    if not isinstance(decision, Committed):
        return False
    owners = [entry.descriptor.owner for entry in decision.entries]
    position = measured_position(owners, measurement.peer)
    return position is not None and owners[position] == agreement.owner


def _is_possible(agreement: PayloadAgreement) -> bool:
    cosines = (agreement.cosine, agreement.alike, agreement.unlike, agreement.likeness)
    are_cosines = all(each is None or abs(each) <= 1 + _ROUNDING for each in cosines)
    return are_cosines and _is_norm(agreement.norm) and _is_norm(agreement.mean_norm)


def _is_norm(value: float) -> bool:
    return math.isfinite(value) and 0 <= value <= MAX_NORM
