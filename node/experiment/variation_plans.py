"""The plans of a swarm as a variation changes them: weights, uncompressed links, how many replicas train."""

from __future__ import annotations

from dataclasses import replace

from node.experiment.variation import Variation
from protocol.algorithm.batch import with_equal_shares
from protocol.algorithm.sampling import next_first_sample
from protocol.spec.link import UNCOMPRESSED
from protocol.spec.run import RunSpec
from protocol.types import Plan, Replica


def varied(plan: Plan, variation: Variation) -> Plan:
    """`plan` with the weights and the uncompressed links of `variation`."""
    pipelines = [replica.index for replica in plan.replicas if replica.links]
    uncompressed = pipelines[: variation.uncompressed_pipelines]

    def changed(replica: Replica) -> Replica:
        if not replica.links:
            return replace(replica, weight=replica.weight * variation.full_weight)
        if replica.index in uncompressed:
            return replace(replica, links=tuple(replace(link, k=UNCOMPRESSED) for link in replica.links))
        return replica

    return replace(plan, replicas=tuple(map(changed, plan.replicas)))


def plans_of(spec: RunSpec, plan: Plan, variation: Variation) -> list[Plan]:
    """`plan`, or with `replicas_by_round` the plans of these rounds, whose replicas divide the batch."""
    plans = list[Plan]()
    for first, count in variation.replicas_by_round:
        sample = next_first_sample(plans[-1], spec, first) if plans else plan.first_sample
        replicas = tuple(with_equal_shares(spec, plan.replicas[:count]))
        reason = f"{count} replicas train"
        plans.append(Plan(len(plans) + 1, first, sample, replicas, reason))
    return plans or [plan]
