"""What the cost model predicts of the inner phase of a round under a plan, and what that phase waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

from coordinator.base.phrases import short
from coordinator.placement.cost_model import Costs, Survey
from coordinator.placement.schedule import StepTime
from protocol.spec.run import RunSpec
from protocol.types import PeerId, Replica


@dataclass(frozen=True)
class Bottleneck:
    """What an inner step waits for most. `other` is the far end of a line or of a latency, else `peer`."""

    kind: Literal["computing", "uplink", "downlink", "link", "latency"]
    peer: PeerId
    other: PeerId

    def __str__(self) -> str:
        match self.kind:
            case "latency":
                return f"latency between {short(self.peer)} and {short(self.other)}"
            case "link":
                return f"link {short(self.peer)} -> {short(self.other)}"
            case "downlink":
                return f"downlink of {short(self.other)}"
            case _:
                return f"{self.kind} of {short(self.peer)}"


@dataclass(frozen=True)
class ReplicaPrediction:
    """One replica in the inner phase of a round.

    Attributes:
        step: one inner step.
        link_bytes: bytes of the phase on each link, downstream and upstream.
    """

    replica: Replica
    step: StepTime
    link_bytes: tuple[tuple[int, int], ...]
    survey: Survey = field(repr=False, compare=False)

    @cached_property
    def bottleneck(self) -> Bottleneck | None:
        """What a step waits for most; None where nothing is known."""
        resource, members, survey = self.step.bottleneck, self.replica.members, self.survey
        if resource is None:
            return None
        peer, other = members[resource.position].peer, members[resource.other].peer
        if resource.kind != "sending":
            return Bottleneck(resource.kind, peer, other)
        # A bandwidth equals the value of an end only if that value determines it.
        bandwidth = survey.bandwidth(peer, other)
        if bandwidth == survey.capacity(peer).uplink:
            return Bottleneck("uplink", peer, other)
        is_downlink = bandwidth == survey.capacity(other).downlink
        return Bottleneck("downlink" if is_downlink else "link", peer, other)


@dataclass(frozen=True)
class Prediction:
    """The inner phase of a round under a plan.

    Attributes:
        replicas: in the order of the plan; at least one.
        inner_seconds: of the phase: the replicas work in parallel, so it lasts as long as the slowest one.
    """

    replicas: tuple[ReplicaPrediction, ...]
    inner_seconds: float

    @property
    def slowest(self) -> ReplicaPrediction:
        return max(self.replicas, key=lambda each: each.step.seconds)


def predict(spec: RunSpec, survey: Survey, replicas: Sequence[Replica]) -> Prediction:
    """The inner phase of `replicas`, of a plan or of a changed one, by what `survey` has measured."""
    costs = Costs(spec, survey)
    once = cache(lambda step: step)  # replicas of equal peers are replayed once
    found = []
    for replica in replicas:
        ks, microbatches = [link.k for link in replica.links], spec.microbatches_of(replica)
        step = once(costs.step(replica.members, ks, microbatches))
        messages = spec.inner.steps * microbatches
        link_bytes = tuple((messages * down, messages * up) for down, up in map(costs.sizes, ks))
        found.append(ReplicaPrediction(replica, step, link_bytes, survey))
    return Prediction(tuple(found), spec.inner.steps * max(each.step.seconds for each in found))
