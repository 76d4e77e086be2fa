"""Forecasts tokens per second, traffic and the bottleneck of a plan with the cost model.

Placement uses the same cost model (:mod:`coordinator.placement.cost_model`); here it is extended to whole
rounds. M is the number of replicas in the plan. Units are seconds and bytes.

**Inner phase.** H inner steps. The replicas work in parallel, so it lasts as long as the slowest replica.

**Outer exchange.** The M hosts of each stage gather each other's payloads, all stages at the same time: a
peer receives M - 1 payloads of each of its stages, and sends as many as the schedule says
(:mod:`protocol.group.gathering`). Then members without stage 0 fetch the M payloads of stage 0 for the
embedding, in equal parts from the hosts that decisions name. Each of these two parts takes

    max over peers (bytes sent / uplink, bytes received / downlink)

and they run one after the other after the inner phase.

Another `outer.exchange` says by itself what its members send, receive and fetch
(:mod:`coordinator.ops.forecast.exchange_traffic`).

**Snapshots.** With T_perp from a snapshot of the embedding every n rounds
(:mod:`protocol.math.embedding_snapshot`), these members fetch no payloads of stage 0. Each fetches the
snapshot from all that have it, hosts and other fetchers, in parts in proportion to their uplinks and during
an inner phase; a round waits for the n-th part of what takes longer than that.

Left out: forming groups, validating, deciding and
applying, the DHT, checkpoints of returning peers. A bandwidth or speed that is not measured costs no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import fmean

from coordinator.ops.forecast.exchange_traffic import (
    Traffic,
    embedding_traffic,
    payload_traffic,
    snapshot_traffic,
)
from coordinator.placement.cost_model import Survey
from coordinator.placement.predict import Prediction, predict
from coordinator.placement.rules import largest_share
from coordinator.placement.schedule import StepTime
from coordinator.placement.start import initial_plan
from coordinator.placement.tuning import fair_shares
from coordinator.run.state.records import Peer
from protocol.group.batch import equal_shares, whole_batch, with_equal_shares, with_shares
from protocol.math import embedding_snapshot
from protocol.spec.run import RunSpec
from protocol.status import Cause
from protocol.types import PeerId, Replica

_DAY = 86_400.0


@dataclass(frozen=True)
class ReplicaForecast:
    """One replica in the inner phase.

    Attributes:
        step: one inner step.
        utilization: share of a whole round that each member computes. The rest of the round includes the wait
            for slower replicas and the outer exchange.
    """

    replica: Replica
    step: StepTime
    utilization: tuple[float, ...]

    @property
    def bottleneck(self) -> str:
        """The resource that the inner step waits for, with members by position; "" where it takes no time."""
        return str(self.step.bottleneck or "")


@dataclass(frozen=True)
class Forecast:
    """The predicted rounds of a plan. Where stages exchange in turn, figures are means over the turns.

    Attributes:
        inner_seconds: of the inner phase of one round.
        gather_seconds: of gathering payloads in one round.
        all_stages_seconds: the same in the last round, in which all stages exchange.
        embedding_seconds: of fetching the embedding's update in one round.
        hidden_seconds: the part of these two during which inner steps of the next round run
            (`outer.overlap`). The activations that the links carry at the same time are left out.
        tokens_per_round: of all replicas.
        per_round: traffic of each peer in one round.
        bottleneck: a sentence that says what a round waits for.
    """

    replicas: tuple[ReplicaForecast, ...]
    inner_seconds: float
    gather_seconds: float
    all_stages_seconds: float
    embedding_seconds: float
    hidden_seconds: float
    tokens_per_round: int
    per_round: Mapping[PeerId, Traffic]
    bottleneck: str

    @property
    def outer_seconds(self) -> float:
        """Of the outer exchange of one round."""
        return self.gather_seconds + self.embedding_seconds

    @property
    def round_seconds(self) -> float:
        return self.inner_seconds + self.outer_seconds - self.hidden_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of the whole swarm; 0 where nothing is known of its speeds."""
        return self.tokens_per_round / self.round_seconds if self.round_seconds else 0.0

    @property
    def per_day(self) -> dict[PeerId, Traffic]:
        """Traffic of each peer in a day of such rounds."""
        rounds = _DAY / self.round_seconds if self.round_seconds else 0.0
        return {peer: traffic * rounds for peer, traffic in self.per_round.items()}

    @property
    def utilization(self) -> float:
        """Mean over all members of the share of a round that they compute."""
        shares = [share for each in self.replicas for share in each.utilization]
        return sum(shares) / len(shares)


def forecast(
    spec: RunSpec, survey: Survey, replicas: Sequence[Replica], payload_bytes: Sequence[int]
) -> Forecast:
    """The rounds of `replicas`, predicted.

    Without snapshots of the embedding, members without stage 0 fetch the payloads of stage 0 as well.

    Args:
        survey: capacities of peers and measurements of links.
        payload_bytes: of one payload, by stage.
    """
    phase, turns = predict(spec, survey, replicas), spec.outer.turns
    inner = phase.inner_seconds
    gathers, gathering = _gathering(spec, survey, replicas, payload_bytes)
    in_last, _ = (gathers[0], {}) if turns == 1 else _of_stages(spec, survey, replicas, payload_bytes)
    if embedding_every := spec.link.embedding_every:
        whole_table = snapshot_traffic(spec, survey, replicas)
        unhidden = max(0.0, _seconds(survey, whole_table) - embedding_snapshot.LAG * inner)
        fetching = {peer: each * (1 / embedding_every) for peer, each in whole_table.items()}
        fetches = [unhidden / embedding_every] * turns
    else:
        of_stage_0 = embedding_traffic(spec, survey, replicas, payload_bytes[0])
        fetching = {peer: each * (1 / turns) for peer, each in of_stage_0.items()}
        fetches = [_seconds(survey, of_stage_0), *[0.0] * (turns - 1)]
    # With `outer.overlap`, that many inner steps of the next round run during the exchange.
    most = inner * spec.outer.overlap / spec.inner.steps
    hidden = fmean(min(sum(each), most) for each in zip(gathers, fetches, strict=True))
    gather, fetch = fmean(gathers), fmean(fetches)
    whole = inner + gather + fetch - hidden
    traffic: defaultdict[PeerId, Traffic] = defaultdict(Traffic)
    for part in (_inner_phase_traffic(phase), gathering, fetching):
        for peer, bytes_ in part.items():
            traffic[peer] += bytes_
    count = spec.inner.steps
    members = tuple(
        ReplicaForecast(
            each.replica, each.step, tuple(count * busy / whole if whole else 0.0 for busy in each.step.busy)
        )
        for each in phase.replicas
    )
    tokens = spec.model.context * sum(spec.samples_per_round(spec.microbatches_of(each)) for each in replicas)
    cause = _bottleneck(survey, phase, gather + fetch - hidden, (gathering, fetching))
    return Forecast(members, inner, gather, in_last, fetch, hidden, tokens, dict(traffic), cause)


def _gathering(
    spec: RunSpec, survey: Survey, replicas: Sequence[Replica], payload_bytes: Sequence[int]
) -> tuple[list[float], dict[PeerId, Traffic]]:
    """Seconds of gathering in each turn, and the traffic, mean over the turns."""
    turns, seconds = spec.outer.turns, []
    traffic: defaultdict[PeerId, Traffic] = defaultdict(Traffic)
    for turn in range(turns):
        due = [nbytes * (stage % turns == turn) for stage, nbytes in enumerate(payload_bytes)]
        of_turn, bytes_of_turn = _of_stages(spec, survey, replicas, due)
        seconds.append(of_turn)
        for peer, each in bytes_of_turn.items():
            traffic[peer] += each * (1 / turns)
    return seconds, dict(traffic)


def _of_stages(
    spec: RunSpec, survey: Survey, replicas: Sequence[Replica], payload_bytes: Sequence[int]
) -> tuple[float, dict[PeerId, Traffic]]:
    """Seconds and traffic of a round whose payloads have these bytes; 0 where a stage has none."""
    traffic = payload_traffic(spec, survey, replicas, payload_bytes)
    return _seconds(survey, traffic), traffic


def _inner_phase_traffic(phase: Prediction) -> dict[PeerId, Traffic]:
    traffic: defaultdict[PeerId, Traffic] = defaultdict(Traffic)  # a member in the middle has two links
    for each in phase.replicas:
        for (down, up), (upper, lower) in zip(each.link_bytes, pairwise(each.replica.members), strict=True):
            traffic[upper.peer] += Traffic(down, up)
            traffic[lower.peer] += Traffic(up, down)
    return traffic


def _seconds(survey: Survey, traffic: Mapping[PeerId, Traffic]) -> float:
    """Seconds until all peers have sent and received their parts, in parallel."""
    return max((_longest(survey, peer, each)[0] for peer, each in traffic.items()), default=0.0)


def _longest(survey: Survey, peer: PeerId, traffic: Traffic) -> tuple[float, str]:
    """Seconds of the slower direction of `peer`, and its name."""
    capacity = survey.capacity(peer)
    return max(
        (traffic.sent / (capacity.uplink or inf), "uplink"),
        (traffic.received / (capacity.downlink or inf), "downlink"),
    )


def _bottleneck(
    survey: Survey, phase: Prediction, outer: float, exchanges: Sequence[Mapping[PeerId, Traffic]]
) -> str:
    """What the longer part of a round waits for; `outer` is without the part that overlaps."""
    inner = phase.inner_seconds
    whole = inner + outer
    if whole == 0:
        return "nothing is known of the peers' speeds"
    if outer > inner:
        (_, direction), peer = max(
            (_longest(survey, peer, each), peer) for traffic in exchanges for peer, each in traffic.items()
        )
        return f"the outer exchange, {outer / whole:.0%} of a round: {direction} of {peer}"
    slowest = phase.slowest
    share = sum(slowest.step.utilization) / len(slowest.replica.members)
    return f"{slowest.bottleneck}, in {slowest.replica.name}, whose members compute {share:.0%} of a step"


def shared_out(spec: RunSpec, survey: Survey, replicas: Sequence[Replica]) -> list[Replica]:
    """`replicas` with microbatches by speed, as the coordinator assigns them.

    Shares are equal where the spec does not balance work, or where no speed is known.
    """
    equal = with_equal_shares(spec, replicas)
    seconds = [
        each.step.seconds / spec.microbatches_of(each.replica)
        for each in predict(spec, survey, equal).replicas
    ]
    most = largest_share(whole_batch(spec, len(equal)), len(equal))
    if not all(seconds):
        return equal
    limits = [most] * len(equal)
    total = whole_batch(spec, len(equal))
    shares = fair_shares(seconds, total, limits) if spec.grouping.balance else equal_shares(total, len(equal))
    return with_shares(spec, equal, shares)


@dataclass(frozen=True)
class ProposedPlan:
    """The plan that the coordinator would make.

    Attributes:
        reason: a sentence that says which replicas it has and why.
        spares: peers that are in no replica.
    """

    survey: Survey
    replicas: tuple[Replica, ...]
    reason: str
    spares: tuple[PeerId, ...]


def proposed(spec: RunSpec, peers: Sequence[Peer]) -> ProposedPlan | Cause:
    """The plan that the coordinator would make if all of `peers` joined and it knew their capacities."""
    plan = initial_plan(peers, spec)
    if isinstance(plan, Cause):
        return plan
    survey = Survey({peer.peer: peer.capacity for peer in peers})
    assigned = {member.peer for replica in plan.replicas for member in replica.members}
    spares = tuple(peer.peer for peer in peers if peer.peer not in assigned)
    return ProposedPlan(survey, tuple(shared_out(spec, survey, plan.replicas)), plan.reason, spares)
