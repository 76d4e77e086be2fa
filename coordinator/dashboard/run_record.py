"""The record of the run as a whole: small, and sent to every reader whenever it changes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from coordinator.dashboard.health_record import health_record
from coordinator.dashboard.text import shown
from coordinator.dashboard.view import RunView, phase_of
from coordinator.placement.cost_model import stage_parameters
from coordinator.status.messages import stall_message
from protocol.algorithm.batch import batch_of, learning_rate_factor
from protocol.spec.run import RunSpec
from protocol.status import PeerStatus, RunPhase, RunStatus
from protocol.types import Lifecycle, Replica, Role

MOST_REPLICAS = 64
"""Replicas in the record. The sums are over all of them."""

_MOST_LACKS = 8

Record = dict[str, Any]


def run_record(view: RunView) -> Record:
    """JSON of the run: times are Unix times and seconds, losses nats per token. Unknown figures are null."""
    status, state = view.status, view.state
    replicas = [_replica(view, each) for each in view.replicas]
    losses = [each["loss"] for each in replicas if each["loss"] is not None]
    stall = stall_message(state)
    return {
        "run": status.run,
        "spec": _spec(status.spec),
        "phase": status.phase.value,
        "message": shown(status.message),
        "stalled": bool(stall) and status.phase is RunPhase.TRAINING,
        "round": view.round_number,
        "rounds": status.spec.rounds,
        "decided": status.rounds_decided,
        "committed": status.stage_rounds_committed,
        "aborted": status.stage_rounds_aborted,
        "agree": status.anchors_agree,
        "began": state.began_at or None,
        "last_commit": state.committed_at or None,
        "tokens": status.tokens_committed,
        "tokens_per_second": finite(status.tokens_per_second),
        "loss": finite(sum(losses) / len(losses)) if losses else None,
        "expected_round_seconds": status.expected_round_seconds,
        "remaining_seconds": status.remaining_seconds,
        "replicas": replicas[:MOST_REPLICAS],
        "waiting": [shown(view.obstacles[index]) for index in view.waiting if index in view.obstacles][
            :_MOST_LACKS
        ],
        "replica_count": len(replicas),
        "replicas_complete": len(view.complete),
        "peers": dict(Counter(map(state_of_peer, status.peers))),
        "plan": _plan(status),
        "health": health_record(view),
    }


def _spec(spec: RunSpec) -> Record:
    return {
        "name": spec.name,
        "hash": spec.hash,
        "steps": spec.inner.steps,
        "stages": spec.swarm.stages,
        "width": spec.model.width,
        "layers": spec.model.layers,
        "context": spec.model.context,
        "vocabulary": spec.model.vocabulary,
        "parameters": sum(stage_parameters(spec, stage) for stage in range(spec.swarm.stages)),
        "microbatches": spec.inner.microbatches,
        "batch": spec.global_batch if spec.grouping.batch == "constant" else None,
    }


def _plan(status: RunStatus) -> Record | None:
    if status.plan is None:
        return None
    plan = status.plan
    return {
        "epoch": plan.epoch,
        "from_round": plan.from_round,
        "reason": shown(plan.reason),
        "batch": batch_of(status.spec, plan.replicas),
        "learning_rate_factor": learning_rate_factor(status.spec, plan.replicas),
    }


def _replica(view: RunView, replica: Replica) -> Record:
    state, sentence = phase_of(view, replica)
    measured = view.last_measured.get(replica.index)
    if measured is not None and not measured.round_number:
        measured = None  # the model before the first round: nothing was trained
    seconds = measured.inner_seconds + measured.outer_seconds if measured else 0.0
    return {
        "index": replica.index,
        "members": len(replica.members),
        "state": state,
        "doing": shown(sentence),
        "progress": _progress(view, replica, state),
        "round": measured.round_number if measured else 0,
        "loss": finite(measured.validation_loss) if measured else None,
        "train_loss": finite(measured.train_loss) if measured else None,
        "tokens_per_second": finite(measured.tokens / seconds) if measured and seconds else None,
        "inner_seconds": finite(measured.inner_seconds) if measured else None,
        "outer_seconds": finite(measured.outer_seconds) if measured else None,
    }


def _progress(view: RunView, replica: Replica, state: str) -> float:
    """The share of its inner steps that a replica has done in the open round."""
    if state in ("offered", "exchanges", "decided", "done"):
        return 1.0
    seen = [view.state.last_seen.get(member.peer) for member in replica.members]
    steps = [each.inner_step if each and each.round_number == view.round_number else 0 for each in seen]
    return min(1.0, min(steps, default=0) / view.status.spec.inner.steps)


def state_of_peer(peer: PeerStatus) -> str:
    """What a peer does: trains, follows, spare, ready, drains, relay, rests or gone."""
    if peer.rests:
        return "rests"
    if peer.lifecycle is Lifecycle.GONE:
        return "gone"
    if peer.role is Role.RELAY:
        return "relay"
    match peer.lifecycle:
        case Lifecycle.TRAINING:
            return "trains"
        case Lifecycle.DRAINING:
            return "drains"
        case _:
            return "follows" if peer.assignment else "spare"


def finite(value: float) -> float | None:
    """JSON has neither NaN nor infinities."""
    return value if math.isfinite(value) else None
