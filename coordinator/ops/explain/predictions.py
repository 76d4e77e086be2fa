"""What the planner's cost model says of an inner step, and of a step with one thing changed.

The exchange of a round is not predicted: it takes what it took in the last rounds. Where nothing is measured
there is no prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.ops.explain.known import Known, middle
from coordinator.ops.explain.statements import Code, say
from coordinator.placement.cost_model import Survey, survey_of
from coordinator.placement.predict import Bottleneck, Prediction, ReplicaPrediction, predict
from coordinator.placement.rules import fits, links_between, may_be_neighbours, member_of
from coordinator.run.state.records import Peer
from coordinator.run.state.state import State
from protocol.spec.link import width_order
from protocol.status import Statement
from protocol.types import Replica

MOST_OPERATIONS = 100_000
"""Operations of members in one inner step of all replicas, up to which changes are predicted as well."""
MOST_SPARES = 8
"""Spares that are tried in the place of a slow member."""
_WORTH = 0.01
"""A change is told if it makes a step shorter by this share."""


@dataclass(frozen=True)
class _Outlook:
    """The predicted inner phase of the replicas that train. `exchange`: seconds of the rest of a round."""

    state: State
    survey: Survey
    replicas: tuple[Replica, ...]
    base: Prediction
    exchange: float

    @property
    def slowest(self) -> ReplicaPrediction:
        return self.base.slowest

    def without(self, changed: Replica) -> ReplicaPrediction:
        """The slowest replica predicted again, with other members or links."""
        return predict(self.state.spec, self.survey, [changed]).replicas[0]


def predictions(known: Known) -> Iterator[Statement]:
    """What a round waits for most, then what would make it shorter; the best first."""
    state, survey = known.state, survey_of(known.state)
    replicas = tuple(state.complete_replicas(state.current_round))
    if not replicas or survey.is_blank:
        yield say(Code.UNMEASURED)
        return
    _, before = known.times(known.current)
    exchange = middle(each.phases["group"] + each.phases["decision"] for each in before) or 0.0
    outlook = _Outlook(state, survey, replicas, predict(state.spec, survey, replicas), exchange)
    bottleneck, inner = outlook.slowest.bottleneck, outlook.base.inner_seconds
    if bottleneck is None:
        return
    yield say(
        Code.PREDICTION,
        replicas=(outlook.slowest.replica.index,),
        peers=(bottleneck.peer, bottleneck.other),
        detail=bottleneck.kind,
        seconds=inner + exchange,
        inner=inner,
        exchange=exchange,
    )
    operations = sum(2 * len(each.members) * state.spec.microbatches_of(each) for each in replicas)
    if operations <= MOST_OPERATIONS:
        yield from sorted(_changes(outlook, bottleneck), key=lambda each: each.figures["step"])


def _changes(outlook: _Outlook, bottleneck: Bottleneck) -> Iterator[Statement]:
    replica, step = outlook.slowest.replica, outlook.slowest.step
    resource = step.bottleneck
    assert resource is not None
    one, other, survey = bottleneck.peer, bottleneck.other, outlook.survey
    rate = survey.flops(one) if resource.kind == "computing" else None
    rate = survey.bandwidth(one, other) if resource.kind == "sending" else rate
    faster = dict(step.with_one_changed(0.5))[resource].seconds
    ends = (one, other)
    yield from _shorter(outlook, faster, Code.FASTER, peers=ends, detail=resource.kind, rate=rate)
    yield from _with_spare(outlook, replica, resource.position)
    if resource.kind == "sending":
        yield from _narrower(outlook, replica, min(resource.position, resource.other))


def _shorter(outlook: _Outlook, step: float, code: Code, **fields: Any) -> Iterator[Statement]:
    """A change after which the step of the slowest replica takes `step` seconds, if that is shorter."""
    now, steps = outlook.slowest.step.seconds, outlook.state.spec.inner.steps
    if now - step < _WORTH * now:
        return
    index = outlook.slowest.replica.index
    others = (each.step.seconds for each in outlook.base.replicas if each.replica.index != index)
    whole = steps * max(step, *others, 0.0) + outlook.exchange
    round_now = outlook.base.inner_seconds + outlook.exchange
    yield say(code, replicas=(index,), step=step, step_now=now, round=whole, round_now=round_now, **fields)


def _with_spare(outlook: _Outlook, replica: Replica, position: int) -> Iterator[Statement]:
    """The best spare in the place of one member."""
    member, found = replica.members[position], []
    for peer in _spares(outlook.state, replica, position)[:MOST_SPARES]:
        members = [*replica.members]
        members[position] = member_of(peer, member.stages)
        links = links_between(members, [link.k for link in replica.links])
        changed = outlook.without(replace(replica, members=tuple(members), links=links))
        found.append((changed.step.seconds, peer.peer))
    if found:
        seconds, spare = min(found)
        yield from _shorter(outlook, seconds, Code.SPARE_INSTEAD, peers=(spare, member.peer))


def _spares(state: State, replica: Replica, position: int) -> list[Peer]:
    """The peers without a part in the plan that the rules allow at `position` of `replica`."""
    assigned = state.assignments.get(state.plan_for(state.current_round).epoch, {})
    members, stages = replica.members, replica.members[position].stages
    beside = [members[at] for at in (position - 1, position + 1) if 0 <= at < len(members)]
    return [
        peer
        for peer in state.staying
        if peer.peer not in assigned
        and peer.policy.is_alone(state.spec) == (len(members) == 1)
        and fits(state, peer.peer, stages, len(members) - position)
        and all(may_be_neighbours(state, peer, each) for each in beside)
    ]


def _narrower(outlook: _Outlook, replica: Replica, position: int) -> Iterator[Statement]:
    """The next narrower k of one link: the run's next possible one, or half where k is fixed."""
    spec, ks = outlook.state.spec, [link.k for link in replica.links]
    now = ks[position]
    possible: Sequence[int] = spec.link.possible_ks
    if not spec.link.adapts:
        possible = ((now or spec.model.width) // 2,)
    narrower = [k for k in possible if 0 < k < width_order(now)]
    if not narrower:
        return
    ks[position] = narrower[-1]
    links = links_between(replica.members, ks)
    step = outlook.without(replace(replica, links=links)).step.seconds
    ends = (each.peer for each in replica.members[position : position + 2])
    fixed = not spec.link.adapts
    yield from _shorter(outlook, step, Code.NARROWER, peers=ends, k=narrower[-1], k_now=now, fixed=fixed)
