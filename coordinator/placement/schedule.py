"""Replays the inner step of a chain operation by operation: how long it takes and what it waits for.

Receiving, computing and sending overlap:

- A member computes one operation at a time, in the 1F1B order that the nodes use
  (protocol.math.microbatch_order).
- Each direction of a link carries one message at a time.
- A member in the middle sends to both neighbours through one uplink.

Each time in a step is the maximum of some earlier times plus a constant, and the order is fixed. So a step
never becomes longer when something becomes faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from protocol.math.microbatch_order import OpKind, most_in_flight, one_forward_one_backward

FORWARD_SHARE = 1 / 3
"""Share of a microbatch's computing that the forward pass takes."""
_SLOWDOWN = 0.01
"""To find the bottleneck, each resource in turn is made slower by this share."""

ResourceKind = Literal["computing", "sending", "latency"]
Operation = tuple[int, bool, int]
"""Position of the member, whether it is a forward pass, microbatch."""


@dataclass(frozen=True)
class LinkTime:
    """What one microbatch costs on a link, in seconds.

    Attributes:
        forward: transfer of its activation downstream.
        backward: transfer of its gradient upstream.
        delay: latency of either message after its transfer.
        forward_uplink: part of `forward` during which the sender's uplink cannot serve its other link; 0 if
            the two links do not share it.
        backward_uplink: the same for `backward`.
    """

    forward: float
    backward: float
    delay: float
    forward_uplink: float = 0.0
    backward_uplink: float = 0.0


@dataclass(frozen=True)
class Resource:
    """What a step can wait for: one member, the messages from it to `other`, or the latency between the two.

    `other` is the position of the neighbour; it equals `position` for computing.
    """

    kind: ResourceKind
    position: int
    other: int

    def __str__(self) -> str:
        if self.kind == "computing":
            return f"computing of member {self.position}"
        if self.kind == "sending":
            return f"sending from member {self.position} to {self.other}"
        return f"latency between members {self.position} and {self.other}"


@dataclass(frozen=True)
class StepTime:
    """The inner step of one chain.

    Attributes:
        compute: seconds that one microbatch takes each member, forward and backward.
        links: the link between each member and the next.
        microbatches: in one step, at least 1.
    """

    compute: tuple[float, ...]
    links: tuple[LinkTime, ...]
    microbatches: int

    @cached_property
    def seconds(self) -> float:
        """From the first member's first forward pass until it may begin the next step."""
        return step_seconds(self.compute, self.links, self.microbatches)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each member computes in the step."""
        return tuple(self.microbatches * seconds for seconds in self.compute)

    @property
    def utilization(self) -> tuple[float, ...]:
        """Share of the step that each member computes; 0 where the step takes no time."""
        return tuple(busy / self.seconds if self.seconds else 0.0 for busy in self.busy)

    @cached_property
    def bottleneck(self) -> Resource | None:
        """The resource that makes the step longest when it becomes slower; None if the step takes no time."""
        if self.seconds <= 0:
            return None
        slower = {resource: step.seconds for resource, step in self.with_one_changed(1 + _SLOWDOWN)}
        return max(slower, key=lambda resource: slower[resource])

    def with_one_changed(self, factor: float) -> Iterator[tuple[Resource, StepTime]]:
        """For each resource, the step if all that waits for this resource took `factor` times as long."""
        for i, seconds in enumerate(self.compute):
            slower = (*self.compute[:i], seconds * factor, *self.compute[i + 1 :])
            yield Resource("computing", i, i), replace(self, compute=slower)
        for i, link in enumerate(self.links):
            # A slower transfer also occupies the shared uplink for longer.
            forward, down = link.forward * factor, link.forward_uplink * factor
            backward, up = link.backward * factor, link.backward_uplink * factor
            for resource, slower_link in (
                (Resource("sending", i, i + 1), replace(link, forward=forward, forward_uplink=down)),
                (Resource("sending", i + 1, i), replace(link, backward=backward, backward_uplink=up)),
                (Resource("latency", i, i + 1), replace(link, delay=link.delay * factor)),
            ):
                yield resource, replace(self, links=(*self.links[:i], slower_link, *self.links[i + 1 :]))


def step_seconds(compute: Sequence[float], links: Sequence[LinkTime], microbatches: int) -> float:
    """The seconds of an inner step (:class:`StepTime`)."""
    members = len(compute)
    forward = [seconds * FORWARD_SHARE for seconds in compute]
    backward = [seconds * (1 - FORWARD_SHARE) for seconds in compute]
    # When each member, its uplink, and its transfers to either side are free again.
    free, uplink, downstream, upstream = ([0.0] * members for _ in range(4))
    arrived_f, arrived_b = ([[0.0] * microbatches for _ in range(members)] for _ in range(2))
    # Each operation follows all those that it waits for, so one pass in this order finds all times.
    for i, is_forward, m in _sequence(members, microbatches):
        if is_forward:
            free[i] = max(free[i], arrived_f[i][m]) + forward[i]
            if i < members - 1:
                link = links[i]
                # A message waits for its content, for the uplink, and for the message before it on this link.
                sent = max(free[i], uplink[i], downstream[i])
                uplink[i] = sent + link.forward_uplink
                downstream[i] = sent + link.forward
                arrived_f[i + 1][m] = downstream[i] + link.delay
        else:
            free[i] = max(free[i], arrived_b[i][m]) + backward[i]
            if i:
                link = links[i - 1]
                sent = max(free[i], uplink[i], upstream[i])
                uplink[i] = sent + link.backward_uplink
                upstream[i] = sent + link.backward
                arrived_b[i - 1][m] = upstream[i] + link.delay
    # The first member ends the step: its last backward pass waits for those of all others.
    return free[0]


def least_seconds(compute: Sequence[float], links: Sequence[LinkTime], microbatches: int) -> float:
    """A lower bound of :func:`step_seconds`, rarely far below it.

    Let R_i be the time from a microbatch's arrival at member i until its gradient leaves member i. A step
    lasts at least R_0, the time of one microbatch along the whole chain. The bound is the longest of these:

    - Member i computes all microbatches in turn, and R_0 - R_i pass outside of it.
    - Member i has at most W_i microbatches in flight, so M microbatches take ceil(M / W_i) times R_i.
    - A link, or the uplink of a member in the middle, carries all messages in turn.
    """
    size = len(compute)
    round_trips = [0.0] * size
    total = 0.0
    for i in range(size - 1, -1, -1):
        if i < size - 1:
            link = links[i]
            total += link.forward + link.backward + 2 * link.delay
        total += compute[i]
        round_trips[i] = total
    most = total
    for i, own in enumerate(round_trips):
        windows = -(-microbatches // most_in_flight(size - i))  # ceil(M / W_i)
        most = max(most, total - own + max(microbatches * compute[i], windows * own))
        if i < size - 1:
            link = links[i]
            most = max(most, total + (microbatches - 1) * max(link.forward, link.backward))
            if i:
                # A member in the middle sends activations and gradients through one uplink.
                above = links[i - 1]
                uplink = microbatches * (link.forward_uplink + above.backward_uplink)
                most = max(most, total - own - above.backward + uplink)
    return most


@lru_cache(maxsize=256)
def _sequence(members: int, microbatches: int) -> tuple[Operation, ...]:
    """The operations of all members in an order in which each follows those that it waits for."""
    orders = [one_forward_one_backward(position, members, microbatches) for position in range(members)]
    done = [0] * members
    sequence: dict[Operation, None] = {}  # an ordered set
    while len(sequence) < 2 * members * microbatches:
        for i, order in enumerate(orders):
            while done[i] < len(order):
                is_forward, m = order[done[i]].kind is OpKind.FORWARD, order[done[i]].microbatch
                source = i - 1 if is_forward else i + 1
                if 0 <= source < members and (source, is_forward, m) not in sequence:
                    break  # the neighbour's operation comes first: go on with the next member
                sequence[i, is_forward, m] = None
                done[i] += 1
    return tuple(sequence)
