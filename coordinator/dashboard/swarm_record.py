"""The record of the swarm: the chains of the open round, and every peer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from coordinator.dashboard.run_record import Record, finite, state_of_peer
from coordinator.dashboard.text import shown
from coordinator.dashboard.view import RunView, phase_of
from coordinator.placement.predict import ReplicaPrediction
from protocol.status import PeerStatus
from protocol.types import Link, PeerId, Replica

MOST_PEERS = 2000
"""Peers in the record; of more, those that are gone are left out first."""


def swarm_record(view: RunView, predictions: Mapping[int, ReplicaPrediction]) -> Record:
    """JSON of the swarm. Speeds are in FLOP/s and bytes per second, shares of 1; unknown figures are null."""
    peers = sorted(view.status.peers, key=_order)
    return {
        "run": view.status.run,
        "round": view.round_number,
        "steps": view.status.spec.inner.steps,
        "width": view.status.spec.model.width,
        "replicas": [_replica(view, each, predictions.get(each.index)) for each in view.replicas],
        "waiting": [_waiting(view, index) for index in view.waiting],
        "peers": [peer_record(view, each) for each in peers[:MOST_PEERS]],
        "peer_count": len(peers),
        "relay": len(view.state.own_uplinks) > 0,
    }


def _order(peer: PeerStatus) -> tuple[bool, str, str]:
    return state_of_peer(peer) == "gone", peer.assignment, peer.peer


def peer_record(view: RunView, peer: PeerStatus) -> Record:
    """JSON of one peer."""
    state, capacity = view.state, peer.estimates.capacity
    known, seen = state.peers[peer.peer], state.last_seen[peer.peer]
    measured = view.measured.get(peer.peer)
    busy = None
    if measured is not None and measured.round_number and measured.inner_seconds:
        busy = finite(min(1.0, measured.compute_seconds / measured.inner_seconds))
    excluded = ""
    if peer.peer in state.banned:
        excluded = f"banned: {state.banned[peer.peer]}".removesuffix(": ")
    elif peer.peer in state.quarantined:
        excluded = "in quarantine"
    return {
        "peer": peer.peer,
        "name": shown(state.names.get(peer.peer) or ""),
        "role": peer.role.value,
        "state": state_of_peer(peer),
        "lifecycle": peer.lifecycle.value,
        "assignment": peer.assignment,
        "round": peer.round_number,
        "step": peer.inner_step,
        "seen": finite(seen.at),
        "joined": finite(known.joined_at),
        "device": shown(capacity.device, 60),
        "memory": capacity.memory_bytes or None,
        "flops": finite(capacity.flops) or None,
        "uplink": finite(capacity.uplink) or None,
        "downlink": finite(capacity.downlink) or None,
        "round_trip": finite(capacity.round_trip) or None,
        "reached": peer.reachability.value,
        "busy": busy,
        "strikes": len(state.strikes.get(peer.peer, ())),
        "failures": state.failures.get(peer.peer, (0, 0))[0],
        "excluded": shown(excluded),
        "problem": shown(peer.problem),
        "role_reason": shown(peer.role_reason),
        "why": shown(peer.message),
        "waits": [each.value for each in peer.waits],
    }


def _replica(view: RunView, replica: Replica, prediction: ReplicaPrediction | None) -> Record:
    phase, sentence = phase_of(view, replica)
    slowest = prediction.step.bottleneck if prediction else None
    return {
        "index": replica.index,
        "state": phase,
        "doing": shown(sentence),
        "weight": finite(replica.weight),
        "microbatches": view.status.spec.microbatches_of(replica),
        "slowest": shown(str(prediction.bottleneck or "")) if prediction else "",
        "step_seconds": finite(prediction.step.seconds) or None if prediction else None,
        "members": [
            {
                "peer": member.peer,
                "stages": str(member.stages),
                "predicted_busy": _busy(prediction, position),
                "is_slowest": bool(slowest and slowest.kind == "computing" and slowest.position == position),
            }
            for position, member in enumerate(replica.members)
        ],
        "links": [_link(view, replica, i, link, prediction) for i, link in enumerate(replica.links)],
    }


def _waiting(view: RunView, index: int) -> Record:
    """A replica that has peers and is in no plan: what it lacks."""
    return {
        "index": index,
        "doing": shown(view.obstacles.get(index, "the next plan includes it")),
        "is_ready": index not in view.obstacles,
        "members": [{"peer": peer, "stages": str(stages)} for stages, peer in view.waiting[index]],
    }


def _busy(prediction: ReplicaPrediction | None, position: int) -> float | None:
    share = prediction.step.utilization[position] if prediction else 0.0
    return finite(share) or None


def _link(
    view: RunView, replica: Replica, i: int, link: Link, prediction: ReplicaPrediction | None
) -> Record:
    upper, lower = replica.members[i].peer, replica.members[i + 1].peer
    slowest = prediction.step.bottleneck if prediction else None
    failed = view.state.failed_links.get((upper, lower)) or view.state.failed_links.get((lower, upper))
    return {
        "k": link.k,
        "dialer": link.dialer.value,
        "down": _rate(view, upper, lower),
        "up": _rate(view, lower, upper),
        "delay": finite(view.survey.delay(upper, lower)) or None,
        "bytes": sum(prediction.link_bytes[i]) if prediction else None,
        "is_slowest": bool(
            slowest and slowest.kind != "computing" and {slowest.position, slowest.other} == {i, i + 1}
        ),
        "failed": shown(f"cannot be opened: {failed.reason}") if failed else "",
    }


def _rate(view: RunView, sender: PeerId, receiver: PeerId) -> float | None:
    """Bytes per second, as measured; null where nothing is."""
    rate: float = view.survey.bandwidth(sender, receiver)
    return rate if math.isfinite(rate) else None


def network_record(view: RunView, predictions: Mapping[int, ReplicaPrediction]) -> dict[str, Any]:
    """JSON of the newest measured round of each replica against the prediction of its plan."""
    rows = []
    for replica in view.replicas:
        prediction = predictions.get(replica.index)
        if prediction is None:
            continue
        members = []
        for position, member in enumerate(replica.members):
            measured = view.measured.get(member.peer)
            of_this = measured is not None and measured.replica == replica.index and measured.round_number
            # A member counts what it sends itself: downstream on the link behind it, upstream on that before.
            sends = prediction.link_bytes[position][0] if position < len(prediction.link_bytes) else 0
            sends += prediction.link_bytes[position - 1][1] if position else 0
            members.append(
                {
                    "peer": member.peer,
                    "stages": str(member.stages),
                    "round": measured.round_number if measured and of_this else 0,
                    "link_bytes": measured.link_bytes_sent if measured and of_this else None,
                    "link_dense": measured.link_bytes_dense if measured and of_this else None,
                    "link_predicted": sends,
                    "payload_bytes": measured.payload_bytes if measured and of_this else None,
                    "payload_dense": measured.payload_bytes_dense if measured and of_this else None,
                }
            )
        last = view.last_measured.get(replica.index)
        rows.append(
            {
                "index": replica.index,
                "k": [link.k for link in replica.links],
                "members": members,
                "links": [{"down": down, "up": up} for down, up in prediction.link_bytes],
                "inner_seconds": finite(last.inner_seconds) if last and last.round_number else None,
                "inner_predicted": finite(view.status.spec.inner.steps * prediction.step.seconds) or None,
                "slowest": shown(str(prediction.bottleneck or "")),
            }
        )
    return {"run": view.status.run, "round": view.round_number, "replicas": rows}
