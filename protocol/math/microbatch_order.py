"""The order of microbatches in an inner step. Members follow it, and the cost model replays it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OpKind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Op:
    """One piece of a member's work in an inner step."""

    kind: OpKind
    microbatch: int


def most_in_flight(members_left: int) -> int:
    """Most microbatches that hold activations at a member, `members_left` from it to the end of its chain."""
    return 2 * members_left - 1


def one_forward_one_backward(position: int, members: int, microbatches: int) -> tuple[Op, ...]:
    """The order of work of the member at `position` of a chain of `members`, for one inner step (1F1B).

    A member first runs two forwards for each member behind it: the second one hides messages that take as
    long as the computation of a microbatch. Then one forward and one backward alternate, and the remaining
    backwards end the step. At most :func:`most_in_flight` microbatches hold activations at once.

    Raises ValueError for a position outside the chain, or without microbatches.
    """
    if not 0 <= position < members or microbatches < 1:
        raise ValueError(f"no position {position} of {members} members with {microbatches} microbatches")
    # One less than in flight: the forward that precedes the first backward is the last of them.
    ahead = min(most_in_flight(members - position) - 1, microbatches)
    order = [Op(OpKind.FORWARD, microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            order.append(Op(OpKind.FORWARD, ahead + microbatch))
        order.append(Op(OpKind.BACKWARD, microbatch))
    return tuple(order)
