"""What a node tells commands and views of its own machine, and the rates between two such reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from node.monitoring.figures import NodeFigures

_WINDOW_SECONDS = 20.0


@dataclass(frozen=True)
class NodeReport:
    """One look at a node. All counts are since its process began.

    Attributes:
        run, peer, device: "" before the node has joined for the first time.
        activity: "starting", "following", "training" or "resting" (node.monitoring.figures.Activity).
        waits: what it waits for now, by the names of protocol.status.Wait.
        place: in the waiting list of an open run, with an estimate; "" while it has none.
        away: seconds for which the coordinator has not answered, beyond what is usual.
        round_number, inner_step: where the node is; 0 before it has joined.
        rounds_total, steps_per_round, tokens_per_step: of the run, and of this node's replica; 0 if
            unknown.
        inner_steps, rounds: that this node has trained.
        sent_bytes, received_bytes: over links and in probes.
        payload_bytes: of the payloads that it has made.
        upload_limit, download_limit: bytes per second; 0 is no limit.
        memory_bytes: that the worker held on its device at the end of the last inner phase.
        busy: the share of the last inner phase in which it computed; None before the first.
        train_loss, validation_loss: of the last round, in nats per token; None where this node does not know.
    """

    run: str = ""
    peer: str = ""
    device: str = ""
    activity: str = ""
    waits: tuple[str, ...] = ()
    place: str = ""
    away: float = 0.0
    round_number: int = 0
    inner_step: int = 0
    rounds_total: int = 0
    steps_per_round: int = 0
    tokens_per_step: int = 0
    inner_steps: int = 0
    rounds: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    payload_bytes: int = 0
    upload_limit: float = 0.0
    download_limit: float = 0.0
    memory_bytes: int = 0
    busy: float | None = None
    train_loss: float | None = None
    validation_loss: float | None = None


def report_of(figures: NodeFigures) -> NodeReport:
    """The figures as they are now."""
    membership, spec, newest = figures.membership, figures.spec, figures.newest
    round_number, inner_step = membership.progress if membership else (0, 0)
    per_step = 0
    if spec is not None and membership is not None:
        assignment = membership.run_view.assignment_of(figures.peer, round_number)  # type: ignore[arg-type]
        microbatches = spec.microbatches_of(assignment.replica) if assignment else 0
        per_step = microbatches * spec.inner.microbatch_size * spec.model.context
    losses = (newest.train_loss, newest.validation_loss) if newest and newest.complete else (None, None)
    return NodeReport(
        run=figures.run,
        peer=figures.peer,
        device=figures.device,
        activity=figures.activity.value,
        waits=tuple(wait.value for wait in figures.waits.now),
        place=figures.place,
        away=membership.away if membership else 0.0,
        round_number=round_number,
        inner_step=inner_step,
        rounds_total=spec.rounds if spec else 0,
        steps_per_round=spec.inner.steps if spec else 0,
        tokens_per_step=per_step,
        inner_steps=figures.inner_steps,
        rounds=figures.rounds,
        sent_bytes=figures.sent_bytes,
        received_bytes=figures.received_bytes,
        payload_bytes=figures.payload_bytes,
        upload_limit=figures.line.up.rate,
        download_limit=figures.line.down.rate,
        memory_bytes=figures.memory_bytes,
        busy=newest.compute_seconds / newest.inner_seconds if newest and newest.inner_seconds else None,
        train_loss=_finite(losses[0]) if newest and newest.round_number else None,
        validation_loss=_finite(losses[1]),
    )


def report_from(answer: Mapping[str, Any]) -> NodeReport:
    """The report in a node's answer; the node may be of a former or a later version."""
    known = {field.name for field in fields(NodeReport)}
    found = {name: value for name, value in answer.items() if name in known}
    return NodeReport(**{**found, "waits": tuple(found.get("waits", ()))})


def _finite(number: float | None) -> float | None:
    return number if number is not None and isfinite(number) else None


@dataclass(frozen=True)
class Rates:
    """Per second: bytes sent and received, and inner steps."""

    sent: float = 0.0
    received: float = 0.0
    steps: float = 0.0


class RateMeter:
    """The rates over the last seconds, from reports of one node."""

    def __init__(self, window: float = _WINDOW_SECONDS) -> None:
        self._window = window
        self._seen: deque[tuple[float, NodeReport]] = deque()

    def note(self, at: float, report: NodeReport) -> Rates:
        """Note a report at time `at` (seconds); the rates up to it."""
        if self._seen and report.inner_steps < self._seen[-1][1].inner_steps:
            self._seen.clear()  # another process counts anew
        self._seen.append((at, report))
        while len(self._seen) > 2 and self._seen[1][0] <= at - self._window:
            self._seen.popleft()
        began, first = self._seen[0]
        if (seconds := at - began) <= 0:
            return Rates()
        return Rates(
            max(0, report.sent_bytes - first.sent_bytes) / seconds,
            max(0, report.received_bytes - first.received_bytes) / seconds,
            (report.inner_steps - first.inner_steps) / seconds,
        )
