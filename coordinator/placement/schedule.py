"""An inner step of a chain replayed: when each operation of 1F1B begins, and what the step waits for.

Receiving, computing and sending overlap. Each member computes one operation at a time in the order that
protocol.algorithm.microbatch_order gives, as the nodes do; each direction of a link carries one message at a time; a member
in the middle sends to both sides through one uplink. So every time in a step is the maximum of some earlier
ones plus a constant, and as the order is fixed, whatever becomes faster never makes a step longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from protocol.algorithm.microbatch_order import OpKind, one_forward_one_backward

FORWARD_SHARE = 1 / 3
"""Of the computing of a microbatch; the rest is its backward pass."""

Kind = Literal["computing", "sending", "latency"]
"""What a step can wait for: a member, the messages from it to a neighbour, or their travelling."""
Resource = tuple[Kind, int, int]
"""A kind with the position of the member, and of the neighbour (its own again where it computes)."""
Operation = tuple[int, bool, int]
"""Position of the member, whether it is a forward pass, microbatch."""


@dataclass(frozen=True)
class LinkTime:
    """What one microbatch costs on a link, in seconds.

    Attributes:
        forward: that its activation takes the wire downstream.
        backward: that its gradient takes the wire upstream.
        delay: that either travels afterwards.
        forward_uplink: of `forward`, how long the sender's uplink has no room for its other link; 0 if it is
            not shared.
        backward_uplink: likewise of `backward`.
    """

    forward: float
    backward: float
    delay: float
    forward_uplink: float = 0.0
    backward_uplink: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """An inner step of one replica.

    Attributes:
        seconds: from the first member's first forward until it may begin the next step.
        busy: seconds that each member computes in it.
        bottleneck: what most of the critical path is spent on, such as "uplink of ..cd"; "" where nothing
            takes any time.
    """

    seconds: float
    busy: tuple[float, ...]
    bottleneck: str

    @property
    def utilization(self) -> tuple[float, ...]:
        """Share of the step that each member computes; 0 where nothing takes any time."""
        return tuple(busy / self.seconds if self.seconds else 0.0 for busy in self.busy)


def step_time(
    compute: Sequence[float],
    links: Sequence[LinkTime],
    microbatches: int,
    named: Callable[[Kind, int, int], str] | None = None,
) -> StepTime:
    """An inner step of a chain.

    Args:
        compute: seconds that one microbatch takes each member, forward and backward.
        links: between each member and the next.
        microbatches: of one step, at least 1.
        named: the words for a bottleneck; positions by default.
    """
    replay = _replay(compute, links, microbatches)
    busy = tuple(microbatches * seconds for seconds in compute)
    if replay.seconds <= 0:
        return StepTime(0.0, busy, "")
    spent = _critical_path(compute, links, microbatches, replay)
    bottleneck = max(spent, key=lambda resource: spent[resource])
    return StepTime(replay.seconds, busy, (named or _by_position)(*bottleneck))


def step_seconds(compute: Sequence[float], links: Sequence[LinkTime], microbatches: int) -> float:
    """`seconds` of :func:`step_time`, for those who compare many chains."""
    return _replay(compute, links, microbatches).seconds


@lru_cache(maxsize=1024)
@lru_cache(maxsize=1024)
def _order_of(position: int, members: int, microbatches: int) -> tuple[tuple[bool, int], ...]:
    """The operations of the member at `position` in their order, as (is forward, microbatch)."""
    operations = one_forward_one_backward(position, members, microbatches)
    return tuple((each.kind is OpKind.FORWARD, each.microbatch) for each in operations)


@lru_cache(maxsize=256)
def _sequence(members: int, microbatches: int) -> tuple[Operation, ...]:
    """The operations of all members, each behind those that it waits for."""
    orders = [_order_of(position, members, microbatches) for position in range(members)]
    done = [0] * members
    sequence: dict[Operation, None] = {}
    while len(sequence) < 2 * members * microbatches:
        for i, order in enumerate(orders):
            while done[i] < len(order):
                forward, m = order[done[i]]
                source = i - 1 if forward else i + 1
                if 0 <= source < members and (source, forward, m) not in sequence:
                    break
                sequence[i, forward, m] = None
                done[i] += 1
    return tuple(sequence)


@dataclass(frozen=True)
class _Replay:
    """All times of a step, from its begin; those of an operation by [is forward][position][microbatch].

    `sent` is when its result begins to leave.
    """

    seconds: float
    starts: tuple[list[list[float]], list[list[float]]]
    sent: tuple[list[list[float]], list[list[float]]]


def _replay(compute: Sequence[float], links: Sequence[LinkTime], microbatches: int) -> _Replay:
    members = len(compute)
    forward = [seconds * FORWARD_SHARE for seconds in compute]
    backward = [seconds * (1 - FORWARD_SHARE) for seconds in compute]
    # When each member, its uplink, and the wires from it to either side are free again.
    free, uplink, downstream, upstream = ([0.0] * members for _ in range(4))
    starts_b, starts_f, sent_b, sent_f, arrived_b, arrived_f = (
        [[0.0] * microbatches for _ in range(members)] for _ in range(6)
    )
    for i, is_forward, m in _sequence(members, microbatches):
        if is_forward:
            starts_f[i][m] = start = max(free[i], arrived_f[i][m])
            free[i] = done = start + forward[i]
            if i < members - 1:
                link = links[i]
                sent_f[i][m] = sent = max(done, uplink[i], downstream[i])
                uplink[i] = sent + link.forward_uplink
                downstream[i] = sent + link.forward
                arrived_f[i + 1][m] = downstream[i] + link.delay
        else:
            starts_b[i][m] = start = max(free[i], arrived_b[i][m])
            free[i] = done = start + backward[i]
            if i:
                link = links[i - 1]
                sent_b[i][m] = sent = max(done, uplink[i], upstream[i])
                uplink[i] = sent + link.backward_uplink
                upstream[i] = sent + link.backward
                arrived_b[i - 1][m] = upstream[i] + link.delay
    return _Replay(free[0], (starts_b, starts_f), (sent_b, sent_f))


def _critical_path(
    compute: Sequence[float], links: Sequence[LinkTime], microbatches: int, replay: _Replay
) -> dict[Resource, float]:
    """Seconds of the step's longest path by what they are spent on, walked back from its end."""
    members = len(compute)
    spent: dict[Resource, float] = {}
    i, forward, m = 0, False, microbatches - 1
    while True:
        seconds = compute[i] * (FORWARD_SHARE if forward else 1 - FORWARD_SHARE)
        spent["computing", i, i] = spent.get(("computing", i, i), 0.0) + seconds
        start = replay.starts[forward][i][m]
        if start <= 0:
            return spent
        source = i - 1 if forward else i + 1
        if 0 <= source < members:
            link = links[min(i, source)]
            wire = link.forward if forward else link.backward
            if replay.sent[forward][source][m] + wire + link.delay >= start:
                between: Resource = ("latency", min(i, source), max(i, source))
                spent[between] = spent.get(between, 0.0) + link.delay
                queue: Resource = ("sending", source, i)
                spent[queue] = spent.get(queue, 0.0) + wire
                i, forward, m = _first_in_queue(
                    compute, links, microbatches, replay, (source, forward, m), spent
                )
                continue
        order = _order_of(i, members, microbatches)
        forward, m = order[order.index((forward, m)) - 1]


def _first_in_queue(
    compute: Sequence[float],
    links: Sequence[LinkTime],
    microbatches: int,
    replay: _Replay,
    message: Operation,
    spent: dict[Resource, float],
) -> Operation:
    """The operation whose result left at once, so that those behind it up to `message` had to queue.

    What the messages before the last one took of wire or uplink is added to `spent`.
    """
    i, forward, m = message
    order = _order_of(i, len(compute), microbatches)
    for earlier in range(order.index((forward, m)) - 1, -1, -1):
        sent = replay.sent[forward][i][m]
        share = FORWARD_SHARE if forward else 1 - FORWARD_SHARE
        if replay.starts[forward][i][m] + compute[i] * share >= sent:
            break
        former, former_m = order[earlier]
        target = i + 1 if former else i - 1
        if not 0 <= target < len(compute):
            continue
        link = links[min(i, target)]
        wire, uplink = (
            (link.forward, link.forward_uplink) if former else (link.backward, link.backward_uplink)
        )
        taken = wire if former == forward else uplink
        if replay.sent[former][i][former_m] + taken >= sent:
            spent["sending", i, target] = spent.get(("sending", i, target), 0.0) + taken
            forward, m = former, former_m
    return i, forward, m


def _by_position(kind: Kind, position: int, other: int) -> str:
    if kind == "computing":
        return f"computing of member {position}"
    if kind == "sending":
        return f"sending from member {position} to {other}"
    return f"latency between members {position} and {other}"
