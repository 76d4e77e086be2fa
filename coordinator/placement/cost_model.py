"""The cost model: how long an inner step of a pipeline takes and how much memory its members need.

Units: seconds, bytes, bytes per second, floating-point operations (FLOP). The model is pure arithmetic on
what peers have measured. It forms and improves pipelines, and forecasts a run.

**Computing.** For a microbatch of b samples with L tokens each, a member needs

    compute = FLOP(its stages) / (FLOP/s of the peer)
    FLOP(stages) = b L [ 6 (layers (4 d^2 + 3 d f) + V d, if the head is there) + 12 L d layers ]

for the forward and the backward pass together: two operations per weight and token forward, four backward,
and the attention scores over the whole context. The forward pass is one third. A peer's FLOP/s are those that
it reached in training layers of this run (:class:`protocol.types.Capacity`), so they include how well its
device is used. At the join the peer measures them alone. From its first round on they are those of its inner
phases: there they include the optimizer, the norm, and the time that its other processes take from the same
cores.

**Messages.** Each microbatch sends an activation and the token ids to the next member, and a gradient back.
On a link of k dimensions (d where k = 0) they have

    forward  = b L k e + b (L + 1) i bytes        backward = b L k g bytes

where e is the size of a value in `link.dtype`, g that of a gradient's (formats of 8 bits and fewer add a
scale per token), and i the size of a token id. A message takes bytes / bandwidth for its transfer, and then
one delay. The bandwidth from a to b is

    what b saw arrive from a, else what a measured towards b, else min(uplink of a, downlink of b)

and, where neither end is open, at most (uplink of the relay) / (peers behind it). The delay is half the
measured round trip, else the sum of half of each peer's round trip to the coordinator.

**Inner step.** Members run 1F1B; they compute in a fixed order while they receive and send. Messages queue
for each direction of a link, and for the one uplink of a member in the middle. The replay in
coordinator.placement.schedule computes each time exactly. The gradient norm adds nothing: the sums of squares
travel behind the last gradients, and the norm ahead of the next step's first activation.

**Memory** of a member on its device (:func:`memory_needed`) is the least with which it can do:
protocol.memory says what it needs, and what it can keep in main memory or compute again.

**Left out**: what live figures include, before there are any; waits for the main process, gRPC and its
buffers, loss and slow start of TCP, a downlink that two neighbours fill at once (if it is as
wide as the uplink, the uplink is full first), other traffic of the home. A peer that has not measured its
speed counts as the median of the peers that have. A link without any measurement counts as infinitely fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from math import inf
from statistics import median

from coordinator.placement.schedule import LinkTime, StepTime
from coordinator.run.state.records import Peer
from coordinator.run.state.state import State
from protocol.math.flops import microbatch_flops
from protocol.memory.needs import MemoryRoom, choose
from protocol.spec.fixed import MEMORY_RESERVE
from protocol.spec.run import RunSpec
from protocol.types import Capacity, Estimates, LinkEstimate, Member, PeerId, Reachability, StageRange

COMPARED_MICROBATCHES = 16
"""Chains are compared by a step of this many microbatches at most; a longer step grows in proportion."""
SECONDS_BOUNDS = 1e-9, 1e9
"""Seconds per microbatch are kept within these bounds, since a peer may claim any speed."""
_UNKNOWN = Capacity("", 0, 0)


@dataclass(frozen=True)
class Survey:
    """What peers have measured of themselves and of their links.

    A value of 0, or a missing entry, means not measured. `links` are by (from, to). `relay_shares` has the
    bytes per second that the relay of each relayed peer can send for it, infinite where nothing is known.
    `dial_only` peers accept no connections.
    """

    capacities: Mapping[PeerId, Capacity] = field(default_factory=dict)
    links: Mapping[tuple[PeerId, PeerId], LinkEstimate] = field(default_factory=dict)
    relay_shares: Mapping[PeerId, float] = field(default_factory=dict)
    dial_only: frozenset[PeerId] = frozenset()

    @classmethod
    def of(
        cls, estimates: Mapping[PeerId, Estimates], declared: Mapping[PeerId, Capacity] | None = None
    ) -> Survey:
        """From the `estimates` that peers reported; for other peers from what they `declared` at the join."""
        measured = {peer: each.capacity for peer, each in estimates.items()}
        links = {(peer, link.peer): link for peer, each in estimates.items() for link in each.links}
        return cls({**(declared or {}), **measured}, links)

    @property
    def is_blank(self) -> bool:
        """Whether no peer has measured a speed or a bandwidth."""
        return not self.links and not any(
            each.flops or each.uplink or each.downlink for each in self.capacities.values()
        )

    def capacity(self, peer: PeerId) -> Capacity:
        return self.capacities.get(peer, _UNKNOWN)

    def bandwidth(self, sender: PeerId, receiver: PeerId) -> float:
        """Bytes per second from `sender` to `receiver`; infinite where nothing is known."""
        return min(self._line(sender, receiver), self._relay_share(sender, receiver))

    def _relay_share(self, one: PeerId, other: PeerId) -> float:
        """What a relay can send for a link of the two; infinite if one of them is open."""
        shares = [self.relay_shares[each] for each in (one, other) if each in self.relay_shares]
        needs_relay = len(shares) + (one in self.dial_only) + (other in self.dial_only) == 2
        return max(shares) if needs_relay and shares else inf

    def _line(self, sender: PeerId, receiver: PeerId) -> float:
        # Live traffic counts most. Only the receiver sees its rate: a sender sees what its socket takes.
        arrived = self.links.get((receiver, sender))
        if arrived is not None and arrived.incoming > 0:
            return arrived.incoming
        measured = self.links.get((sender, receiver))
        if measured is not None and measured.bandwidth > 0:
            return measured.bandwidth
        ends = (self.capacity(sender).uplink, self.capacity(receiver).downlink)
        return min((value for value in ends if value > 0), default=inf)

    def delay(self, one: PeerId, other: PeerId) -> float:
        """Seconds one way, the same in both directions; 0 where nothing is known."""
        # The lower one of two measurements has waited less in queues.
        links = [self.links.get((one, other)), self.links.get((other, one))]
        measured = [link.round_trip for link in links if link is not None and link.round_trip > 0]
        if measured:
            return min(measured) / 2
        return (self.capacity(one).round_trip + self.capacity(other).round_trip) / 2

    def knows_link(self, one: PeerId, other: PeerId) -> bool:
        """Whether a bandwidth is known in both directions."""
        return self.bandwidth(one, other) < inf and self.bandwidth(other, one) < inf

    def flops(self, peer: PeerId) -> float:
        """FLOP/s of `peer`: measured, else the median of the peers that have measured it, else 0."""
        return self.capacity(peer).flops or self._median_flops

    @cached_property
    def _median_flops(self) -> float:
        known = [each.flops for each in self.capacities.values() if each.flops > 0]
        return median(known) if known else 0.0


def relay_uplinks(state: State) -> Mapping[str, float]:
    """Bytes per second that each relay can send, by its endpoint; only where that is known."""
    uplinks = dict(state.own_uplinks)
    for relay in state.relays:
        reported = state.estimates.get(relay.peer)
        capacity = reported.capacity if reported else state.peers[relay.peer].capacity
        if capacity.uplink:
            uplinks[relay.endpoint] = capacity.uplink
    return uplinks


def survey_of(state: State) -> Survey:
    """What the peers of a run have measured, and what their relays can carry."""
    peers = state.peers
    survey = Survey.of(state.estimates, {peer.peer: peer.capacity for peer in peers.values()})
    return with_relays(survey, peers.values(), relay_uplinks(state))


def with_relays(survey: Survey, peers: Iterable[Peer], uplinks: Mapping[str, float]) -> Survey:
    """`survey` with the share of each relayed peer in the uplink of its relay, which all behind it divide."""
    live = [peer for peer in peers if peer.is_live]
    relayed = {peer.peer: peer.endpoint for peer in live if peer.reachability is Reachability.RELAYED}
    if not relayed:
        return survey
    behind = Counter(relayed.values())
    shares = {peer: uplinks.get(endpoint, inf) / behind[endpoint] for peer, endpoint in relayed.items()}
    dial_only = frozenset(each.peer for each in live if each.reachability is Reachability.DIAL_ONLY)
    return replace(survey, relay_shares=shares, dial_only=dial_only)


def present_capacity(peer: Peer, estimates: Estimates | None) -> Capacity:
    """What `peer` can do: what it has measured since, with the memory that it declared."""
    declared, measured = peer.capacity, estimates.capacity if estimates is not None else peer.capacity
    memory = declared.memory_bytes or measured.memory_bytes
    return replace(measured, memory_bytes=memory, main_bytes=declared.main_bytes or measured.main_bytes)


def memory_needed(
    spec: RunSpec, stages: StageRange, members_left: int, device: str = "", main: int = 0
) -> int:
    """Bytes that a member with `stages` needs on its device at least.

    Args:
        members_left: members from this one to the end of its chain. The nearer to the start, the more
            microbatches are in flight.
        device: on "cpu" the outer state needs the same memory.
        main: bytes that are free in main memory; 0 if that is not known. Then all is on the device.
    """
    room = MemoryRoom(device, 0, (1 - MEMORY_RESERVE) * main)
    return choose(spec, stages, members_left, room)[1].device


def has_memory(spec: RunSpec, capacity: Capacity, stages: StageRange, members_left: int) -> bool:
    """Whether the memory of a peer holds `stages`; True where its memory is not known."""
    needed = memory_needed(spec, stages, members_left, capacity.device, capacity.main_bytes)
    return needed <= memory_budget(spec, capacity)


def memory_budget(spec: RunSpec, capacity: Capacity) -> float:
    """Bytes of a peer's memory that may be planned with; infinite where it has not measured its memory."""
    return (1 - MEMORY_RESERVE) * capacity.memory_bytes or inf


def message_bytes(spec: RunSpec, k: int) -> tuple[int, int]:
    """Bytes of one microbatch's message downstream, token ids included, and of its message upstream."""
    tokens = spec.inner.microbatch_size * spec.model.context
    activation, gradient = spec.link.token_bytes(k or spec.model.width)
    vocabulary = spec.model.vocabulary
    # As the node packs them: the smallest unsigned integers that hold all ids, one more id than tokens.
    id_bytes = 1 if vocabulary <= 2**8 else 2 if vocabulary <= 2**16 else 4
    ids = spec.inner.microbatch_size * (spec.model.context + 1) * id_bytes
    return tokens * activation + ids, tokens * gradient


class Costs:
    """Seconds of members, links and chains by what `survey` knows. Each is calculated once."""

    def __init__(self, spec: RunSpec, survey: Survey) -> None:
        self._spec, self.survey = spec, survey
        self.sizes = cache(partial(message_bytes, spec))
        self.compute = cache(self._compute)
        self.link = cache(self._link)

    def _compute(self, peer: PeerId, stages: StageRange) -> float:
        """Of one microbatch, forward and backward, on `stages` of `peer`; 0 where no speed is known."""
        flops = self.survey.flops(peer)
        return microbatch_flops(self._spec, stages) / flops if flops else 0.0

    def _link(self, upstream: PeerId, downstream: PeerId, k: int) -> LinkTime:
        """Of one microbatch on the link between two peers; `upstream` is the one nearer to stage 0."""
        survey, sizes = self.survey, self.sizes(k)
        forward = sizes[0] / survey.bandwidth(upstream, downstream)
        backward = sizes[1] / survey.bandwidth(downstream, upstream)
        uplinks = survey.capacity(upstream).uplink, survey.capacity(downstream).uplink
        return LinkTime(
            forward,
            backward,
            survey.delay(upstream, downstream),
            # Peers in one home reach each other faster than through their uplink, so they do not use it.
            min(forward, sizes[0] / uplinks[0]) if uplinks[0] > 0 else 0.0,
            min(backward, sizes[1] / uplinks[1]) if uplinks[1] > 0 else 0.0,
        )

    def step(self, members: Sequence[Member], ks: Sequence[int], microbatches: int = 0) -> StepTime:
        """An inner step of `members` in their order; ``ks[i]`` is k of the link behind member i.

        `microbatches` is the number of one step; 0 means that of the specification.
        """
        compute = tuple(self.compute(each.peer, each.stages) for each in members)
        ends = zip(pairwise(members), ks, strict=True)
        links = tuple(self.link(upper.peer, lower.peer, k) for (upper, lower), k in ends)
        return StepTime(compute, links, microbatches or self._spec.inner.microbatches)

    def seconds_per_microbatch(self, members: Sequence[Member], ks: Sequence[int]) -> float:
        """The prediction for an inner step of `members`, within SECONDS_BOUNDS; 0 where nothing is known."""
        compared = min(self._spec.inner.microbatches, COMPARED_MICROBATCHES)
        seconds = self.step(members, ks, compared).seconds / compared
        return bounded_seconds(seconds) if seconds else 0.0


def bounded_seconds(seconds: float) -> float:
    least, most = SECONDS_BOUNDS
    return max(least, min(most, seconds))
