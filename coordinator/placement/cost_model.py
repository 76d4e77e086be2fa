"""What an inner step of a pipeline takes, from what its members have measured: the cost model.

Pure arithmetic in seconds, bytes, bytes per second and floating-point operations (FLOP). Whoever forms
pipelines, moves k, shares out microbatches, or plans a run on paper asks here.

**A microbatch** of b samples of L tokens takes a member

    compute = FLOP(stages) / (FLOP/s of the peer)
    FLOP(stages) = b L [ 6 (layers (4 d^2 + 3 d f) + V d, if the head is there) + 12 L d layers ]

forward and backward together: two operations per weight and token forward, four backward, and attention
scores over the whole context. The forward pass is a third of it. The peer's FLOP/s are those that it
reached in training layers of this run (:class:`protocol.types.Capacity`), so how well its device is used is
in them.

**A message** from a member to the next one holds the activation in the k dimensions of the link (d where
k = 0) and the token ids; one to the former member holds the gradient in k dimensions:

    forward  = b L k e + b (L + 1) i        backward = b L k e

with e bytes of a value in `link.dtype` (int8 adds a scale of 4 bytes per token, int4 of one) and i
bytes of an id. From a to b it takes bytes / bandwidth, where bandwidth is what b has seen arrive from a, else
what a has measured towards b, else min(uplink of a, downlink of b). Then it travels for one delay: half the
measured round trip, else half of each end's to the coordinator.

**An inner step** is 1F1B, of which coordinator.placement.schedule computes every time exactly: members compute in a fixed
order, receive and send meanwhile; messages queue for each direction of a link, and for the one uplink of a
member in the middle. It lasts from the first member's first forward until that may begin the next step. The
norm adds nothing to it: the sums of squares go up behind the last gradient, while the member above still
computes its last backward pass, and the norm comes down ahead of the next step's first activation.

**Memory** of a member on its device (:func:`memory_needed`): float32 weights, gradients and two moments (16
bytes per parameter); for each microbatch in flight what autograd keeps of a block, about 10 d + 4 f values
per token; logits three times; the basis of its links and the T_perp of its upstream one. On a CPU anchor, error feedback and the error of a
proposal lie in the same memory (12 bytes per parameter).

**Left out**: AdamW and the norm themselves, the projection onto k dimensions, waits for the main process,
gRPC and its buffers, loss and slow start of TCP, a downlink that two neighbours fill at once (one that is no
narrower than the uplink does not bind before that does), other traffic of the home. A peer that has not
measured its speed is taken for the median of those that have; a link of which nothing is known for
infinitely fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from statistics import median

from coordinator.placement.schedule import Kind, LinkTime, StepTime, step_seconds, step_time
from protocol.algorithm.flops import microbatch_flops
from protocol.algorithm.microbatch_order import most_in_flight
from protocol.spec.run import RunSpec
from protocol.types import Capacity, Estimates, LinkEstimate, Member, PeerId, StageRange

__all__ = [
    "LinkTime",
    "StepTime",
    "Survey",
    "chain_time",
    "choose_k",
    "compute_seconds",
    "link_time",
    "memory_needed",
    "message_bytes",
    "microbatch_flops",
    "stage_parameters",
    "step_seconds",
    "step_time",
]

_FRESH, _WIDEN, _NARROW = 0.03, 0.02, 0.06
"""By so much a step may be longer than with the narrowest k: at first, to widen, before k narrows."""


@dataclass(frozen=True)
class Survey:
    """What is known of peers and of the ways between them; a value of 0, or none at all, is not measured.

    `links` are by (from, to).
    """

    capacities: Mapping[PeerId, Capacity] = field(default_factory=dict)
    links: Mapping[tuple[PeerId, PeerId], LinkEstimate] = field(default_factory=dict)

    @classmethod
    def of(
        cls, estimates: Mapping[PeerId, Estimates], declared: Mapping[PeerId, Capacity] | None = None
    ) -> Survey:
        """From what peers have told; of the others, the capacities that they `declared` when they joined."""
        told = {peer: each.capacity for peer, each in estimates.items()}
        links = {(peer, link.peer): link for peer, each in estimates.items() for link in each.links}
        return cls({**(declared or {}), **told}, links)

    @property
    def is_blank(self) -> bool:
        """Whether nobody has measured a speed or a bandwidth."""
        return not self.links and not any(
            each.flops or each.uplink or each.downlink for each in self.capacities.values()
        )

    def bandwidth(self, sender: PeerId, receiver: PeerId) -> float:
        """Bytes per second from one to the other; infinite where nothing is known.

        What arrives is best known to the receiver, whose live traffic tells it.
        """
        arrived = self.links.get((receiver, sender))
        if arrived is not None and arrived.incoming > 0:
            return arrived.incoming
        measured = self.links.get((sender, receiver))
        if measured is not None and measured.bandwidth > 0:
            return measured.bandwidth
        ends = (self._of(sender).uplink, self._of(receiver).downlink)
        return min((value for value in ends if value > 0), default=inf)

    def delay(self, one: PeerId, other: PeerId) -> float:
        """Seconds one way; the same in both directions, and 0 where nothing is known."""
        ways = [self.links.get((one, other)), self.links.get((other, one))]
        measured = [way.round_trip for way in ways if way is not None and way.round_trip > 0]
        if measured:
            return min(measured) / 2
        return (self._of(one).round_trip + self._of(other).round_trip) / 2

    def flops(self, peer: PeerId) -> float:
        """FLOP/s of `peer`: as measured, else the median of those that have measured it, else 0."""
        return self._of(peer).flops or self._median_flops

    @cached_property
    def _median_flops(self) -> float:
        known = [each.flops for each in self.capacities.values() if each.flops > 0]
        return median(known) if known else 0.0

    def _of(self, peer: PeerId) -> Capacity:
        return self.capacities.get(peer, _UNKNOWN)


_UNKNOWN = Capacity("", 0, 0)


def stage_parameters(spec: RunSpec, stage: int) -> int:
    """Scalars in the parameters of `stage`; ValueError for an unknown one."""
    model = spec.model
    block = 4 * model.width**2 + 3 * model.width * model.feed_forward + 2 * model.width
    table = model.vocabulary * model.width
    is_last = stage == spec.swarm.stages - 1
    return len(spec.layers_of(stage)) * block + (stage == 0) * table + is_last * (table + model.width)


def memory_needed(spec: RunSpec, stages: StageRange, members_left: int, device: str = "") -> int:
    """Bytes that a member with `stages` takes on its device, `members_left` from it to the end of its chain.

    On the device "cpu" the outer state is there, too.
    """
    model, parameters = spec.model, sum(stage_parameters(spec, stage) for stage in stages)
    tokens = spec.inner.microbatch_size * model.context
    layers = sum(len(spec.layers_of(stage)) for stage in stages)
    in_flight = max(0, most_in_flight(members_left))
    kept = in_flight * 4 * tokens * layers * (10 * model.width + 4 * model.feed_forward)
    logits = 3 * 4 * tokens * model.vocabulary if stages.stop == spec.swarm.stages else 0
    table = 4 * model.vocabulary * model.width
    has_link = stages.first > 0 or stages.stop < spec.swarm.stages
    # Every member of a chain holds the basis; T_perp is needed only where activations arrive.
    projection = (stages.first > 0) * table + 4 * model.width**2 if has_link and spec.link.k else 0
    outer = 12 * parameters + (stages.first > 0) * table if device == "cpu" else 0
    return 16 * parameters + kept + logits + projection + outer


def message_bytes(spec: RunSpec, k: int) -> tuple[int, int]:
    """Payload bytes of one microbatch's message downstream, token ids included, and of the one upstream."""
    tokens = spec.inner.microbatch_size * spec.model.context
    width = k or spec.model.width
    per_token = spec.link.token_bytes(width)
    vocabulary = spec.model.vocabulary
    id_bytes = 1 if vocabulary <= 2**8 else 2 if vocabulary <= 2**16 else 4
    ids = spec.inner.microbatch_size * (spec.model.context + 1) * id_bytes
    return tokens * per_token + ids, tokens * per_token


def compute_seconds(spec: RunSpec, survey: Survey, peer: PeerId, stages: StageRange) -> float:
    """Seconds that one microbatch, forward and backward, takes `peer` on `stages`; 0 where nobody knows."""
    flops = survey.flops(peer)
    return microbatch_flops(spec, stages) / flops if flops else 0.0


def link_time(survey: Survey, upstream: PeerId, downstream: PeerId, sizes: tuple[int, int]) -> LinkTime:
    """What a microbatch costs on the link between two peers, `upstream` being the one nearer to stage 0.

    `sizes` are those of its two messages (:func:`message_bytes`).
    """
    forward = sizes[0] / survey.bandwidth(upstream, downstream)
    backward = sizes[1] / survey.bandwidth(downstream, upstream)
    above, below = (survey.capacities.get(peer, _UNKNOWN) for peer in (upstream, downstream))
    return LinkTime(
        forward,
        backward,
        survey.delay(upstream, downstream),
        # Peers of one household reach each other faster than through their uplink, so do not use it.
        min(forward, sizes[0] / above.uplink) if above.uplink > 0 else 0.0,
        min(backward, sizes[1] / below.uplink) if below.uplink > 0 else 0.0,
    )


def chain_time(
    spec: RunSpec, survey: Survey, members: Sequence[Member], ks: Sequence[int], microbatches: int
) -> StepTime:
    """An inner step of `members`, in their order, with ``ks[i]`` on the link from member i to the next.

    `microbatches` 0 is the spec's number.
    """
    compute = [compute_seconds(spec, survey, each.peer, each.stages) for each in members]
    links = [
        link_time(survey, members[i].peer, members[i + 1].peer, message_bytes(spec, k))
        for i, k in enumerate(ks)
    ]

    def named(kind: Kind, position: int, other: int) -> str:
        peer = members[position].peer
        if kind == "computing":
            return f"computing of {_short(peer)}"
        if kind == "latency":
            return f"latency between {_short(peer)} and {_short(members[other].peer)}"
        return _narrowest(survey, peer, members[other].peer)

    return step_time(compute, links, microbatches or spec.inner.microbatches, named)


def choose_k(
    spec: RunSpec,
    survey: Survey,
    members: Sequence[Member],
    present: Sequence[int] | None,
    microbatches: int = 0,
) -> tuple[int, ...]:
    """k of each link of `members`: the widest with which a step is hardly longer than with the narrowest.

    A wider link loses less of the activations, so it is taken where it costs next to nothing. The rungs are
    `least_k`, twice that, and so on up to `most_k`. With `present` each link moves by one rung at most: to a
    wider one if that costs less than 2 % of the step, to a narrower one if the present costs more than 6 %.
    Where the run's k does not adapt, or nothing is known of speeds or of a link, k stays as it is.
    """
    link = spec.link
    at_first = tuple(present) if present is not None else (link.k,) * (len(members) - 1)
    known = [_is_known(survey, members[i].peer, members[i + 1].peer) for i in range(len(at_first))]
    if not link.adapts or not any(known) or not all(survey.flops(each.peer) for each in members):
        return at_first
    rungs = _ladder(link.least_k, link.most_k)
    compute = [compute_seconds(spec, survey, each.peer, each.stages) for each in members]
    times = [
        {
            k: link_time(survey, members[i].peer, members[i + 1].peer, message_bytes(spec, k))
            for k in {*rungs, at_first[i]}
        }
        for i in range(len(at_first))
    ]

    def seconds(ks: Sequence[int]) -> float:
        links = [times[i][k] for i, k in enumerate(ks)]
        return step_seconds(compute, links, microbatches or spec.inner.microbatches)

    def widest(tolerance: float) -> list[int]:
        ks = [rungs[0] if known[i] else now for i, now in enumerate(at_first)]
        most = seconds(ks) * (1 + tolerance)
        rising = [i for i in range(len(ks)) if known[i]]
        for wider in rungs[1:]:
            for i in list(rising):
                narrower, ks[i] = ks[i], wider
                if seconds(ks) > most:
                    ks[i] = narrower
                    rising.remove(i)
        return ks

    if present is None:
        return tuple(widest(_FRESH))
    least, most = widest(_WIDEN), widest(_NARROW)
    return tuple(
        _one_rung(rungs, now, low, max(low, high)) if known[i] else now
        for i, (now, low, high) in enumerate(zip(present, least, most, strict=True))
    )


def _ladder(least: int, most: int) -> list[int]:
    rungs = [least]
    while 2 * rungs[-1] <= most:
        rungs.append(2 * rungs[-1])
    return rungs if rungs[-1] == most else [*rungs, most]


def _one_rung(rungs: Sequence[int], now: int, low: int, high: int) -> int:
    """`now`, or the rung next to it on the way to the interval `low` .. `high`."""
    if now < low:
        return min(rung for rung in rungs if rung > now)
    if now > high:
        return max(rung for rung in rungs if rung < now)
    return now


def _is_known(survey: Survey, one: PeerId, other: PeerId) -> bool:
    return min(survey.bandwidth(one, other), survey.bandwidth(other, one)) < inf


def _short(peer: PeerId) -> str:
    return f"..{peer[-8:]}"


def _narrowest(survey: Survey, sender: PeerId, receiver: PeerId) -> str:
    """What bounds the bandwidth from one to the other, in words."""
    bandwidth = survey.bandwidth(sender, receiver)
    ends = [survey.capacities.get(peer, _UNKNOWN) for peer in (sender, receiver)]
    if bandwidth == ends[0].uplink:
        return f"uplink of {_short(sender)}"
    if bandwidth == ends[1].downlink:
        return f"downlink of {_short(receiver)}"
    return f"link {_short(sender)} -> {_short(receiver)}"
