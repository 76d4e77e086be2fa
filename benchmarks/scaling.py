"""Forecasts of swarms of more and more nodes: equal homes and equal data centre nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from coordinator.ops.forecast.forecast import Forecast, forecast, shared_out
from coordinator.placement.cost_model import Survey
from coordinator.placement.rules import links_between
from protocol.spec.run import RunSpec
from protocol.types import Capacity, Member, PeerId, Replica, StageRange


@dataclass(frozen=True)
class ScalingPoint:
    """A mixed swarm of `nodes` nodes.

    Attributes:
        kind: "weak": each replica keeps its work, so the batch grows; "strong": the whole batch stays as
            it is with the fewest nodes.
        microbatches: of all replicas in an inner step.
        efficiency: tokens per second and node, against the fewest nodes.
        outer_share: of a round.
    """

    kind: Literal["weak", "strong"]
    nodes: int
    replicas: int
    pipelines: int
    microbatches: int
    tokens_per_second: float
    efficiency: float
    round_seconds: float
    outer_share: float
    utilization: float


def scaling(
    spec: RunSpec,
    payload_bytes: Sequence[int],
    home: Capacity,
    datacenter: Capacity,
    home_share: float,
    nodes: Sequence[int],
) -> Iterator[ScalingPoint]:
    """Weak, then strong scaling of swarms of `nodes` nodes, in rising order.

    Args:
        home: of the peers in pipelines of one member per stage.
        datacenter: of the full replicas.
        home_share: share of the nodes that are homes; those that do not fill a pipeline are idle.
    """
    kinds: tuple[Literal["weak", "strong"], ...] = ("weak", "strong")
    for kind in kinds:
        first: ScalingPoint | None = None
        for count in nodes:
            pipelines = round(home_share * count) // spec.swarm.stages
            full = count - round(home_share * count)
            share = spec.inner.microbatches
            if kind == "strong" and first is not None:
                share = max(1, round(first.microbatches / (pipelines + full)))
            inner = spec.inner.model_copy(update={"microbatches": share})
            varied = spec.model_copy(update={"inner": inner})
            found = _forecast_mixed(varied, payload_bytes, home, datacenter, full, pipelines)
            batch, speed, outer = (full + pipelines) * share, found.tokens_per_second, found.outer_seconds
            seconds, busy = found.round_seconds, found.utilization
            base = first.tokens_per_second / first.nodes if first else speed / count
            efficiency, outer_share = speed / count / base, outer / seconds
            point = ScalingPoint(
                kind, count, full, pipelines, batch, speed, efficiency, seconds, outer_share, busy
            )
            first = first or point
            yield point


def _forecast_mixed(
    spec: RunSpec,
    payload_bytes: Sequence[int],
    home: Capacity,
    datacenter: Capacity,
    full: int,
    pipelines: int,
) -> Forecast:
    """`full` full replicas of `datacenter` nodes and `pipelines` of `home` nodes, with fair shares."""
    whole = StageRange(0, spec.swarm.stages)
    replicas = [Replica(i, (Member(PeerId(f"full-{i}"), whole, "here"),), ()) for i in range(full)]
    replicas += [_pipeline(spec, full + i, spec.link.k) for i in range(pipelines)]
    alone = [(member.peer, len(each.members) == 1) for each in replicas for member in each.members]
    survey = Survey({peer: datacenter if is_alone else home for peer, is_alone in alone})
    return forecast(spec, survey, shared_out(spec, survey, replicas), payload_bytes)


def _pipeline(spec: RunSpec, index: int, k: int) -> Replica:
    """A pipeline with one member per stage; all members accept connections."""
    members = tuple(
        Member(PeerId(f"home-{index}-{stage}"), StageRange(stage, stage + 1), "here")
        for stage in range(spec.swarm.stages)
    )
    return Replica(index, members, links_between(members, k))
