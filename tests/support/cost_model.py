"""Peers for the cost model: capacities, what is known of them, and members with one stage each."""

from __future__ import annotations

from coordinator.placement.cost_model import Survey
from protocol.spec.run import RunSpec
from protocol.types import Capacity, Member, PeerId, StageRange

MEGABIT = 1e6 / 8


def capacity(flops: float = 1e9, up: float = 0.0, down: float = 0.0, trip: float = 0.0) -> Capacity:
    return Capacity("cpu", 2**30, 1, flops, up, down, trip)


def survey(*capacities: Capacity) -> Survey:
    return Survey({PeerId(f"peer-{i}"): each for i, each in enumerate(capacities)})


def chain(spec: RunSpec) -> tuple[Member, ...]:
    return tuple(
        Member(PeerId(f"peer-{i}"), StageRange(i, i + 1), f"10.0.0.{i}:1") for i in range(spec.swarm.stages)
    )
