"""What the planner's cost model says of an inner step, and of a step with one resource twice as fast.

The exchange of a round is not predicted: it takes what it took in the last rounds. Where nothing is measured
there is no prediction. Other members and other k are the planner's own choices, so no answer proposes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.ops.explain.known import Known, middle
from coordinator.ops.explain.statements import Code, say
from coordinator.placement.cost_model import survey_of
from coordinator.placement.predict import predict
from protocol.status import Statement

MOST_OPERATIONS = 100_000
"""Operations of members in one inner step of all replicas, up to which a change is predicted as well."""
_WORTH = 0.01
"""A change is told if it makes a step shorter by this share."""


def predictions(known: Known) -> Iterator[Statement]:
    """What a round waits for most, then how much shorter it would be without that."""
    state, survey = known.state, survey_of(known.state)
    spec, replicas = state.spec, tuple(state.complete_replicas(state.current_round))
    if not replicas or survey.is_blank:
        yield say(Code.UNMEASURED)
        return
    _, before = known.times(known.current)
    exchange = middle(each.phases["group"] + each.phases["decision"] for each in before) or 0.0
    base = predict(spec, survey, replicas)
    slowest, inner = base.slowest, base.inner_seconds
    bottleneck, resource = slowest.bottleneck, slowest.step.bottleneck
    if bottleneck is None or resource is None:
        return
    ends, index = (bottleneck.peer, bottleneck.other), (slowest.replica.index,)
    times = {"seconds": inner + exchange, "inner": inner, "exchange": exchange}
    yield say(Code.PREDICTION, replicas=index, peers=ends, detail=bottleneck.kind, **times)
    if sum(2 * len(each.members) * spec.microbatches_of(each) for each in replicas) > MOST_OPERATIONS:
        return
    now, step = slowest.step.seconds, dict(slowest.step.with_one_changed(0.5))[resource].seconds
    if now - step < _WORTH * now:
        return
    rate = survey.flops(ends[0]) if resource.kind == "computing" else None
    rate = survey.bandwidth(*ends) if resource.kind == "sending" else rate
    others = (each.step.seconds for each in base.replicas if (each.replica.index,) != index)
    faster = {"step": step, "step_now": now, "round_now": inner + exchange, "rate": rate}
    whole = spec.inner.steps * max(step, *others, 0.0) + exchange
    yield say(Code.FASTER, replicas=index, peers=ends, detail=resource.kind, round=whole, **faster)
