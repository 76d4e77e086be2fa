"""Runs of full replicas whose rounds are timed by hand."""

from __future__ import annotations

from coordinator.run.state.commands import (
    Attest,
    Offer,
    Report,
)
from protocol.types import Rejection
from tests.builders import Keyed, anchor_of, keyed
from tests.support.coordinator_run import (
    Run,
)

A, B, C, D, E = (keyed(i) for i in range(5))


def timed_round(
    run: Run, offers: dict[Keyed, float], reports: float = 1.0, rejected: Keyed | None = None
) -> None:
    """A round of full replicas that offer so many seconds after its begin; then they report and attest."""
    number, began = run.state.current_round, run.now
    stages = range(run.spec.swarm.stages)
    payloads = {
        (peer, stage): peer.payload(run.spec, stage, number, epoch=run.state.plans[-1].epoch)
        for peer in offers
        for stage in stages
    }
    for peer, seconds in sorted(offers.items(), key=lambda each: each[1]):
        run.now = began + seconds
        for stage in stages:
            run.accept(Offer(peer.peer, payloads[peer, stage]))
    run.now += reports
    for stage in stages:
        all_of_stage = [payloads[peer, stage] for peer in offers]
        held = tuple(each for each in all_of_stage if rejected is None or each.owner != rejected.peer)
        for peer in offers:
            own = peer is rejected
            bad = (
                ()
                if rejected is None or own
                else (Rejection(payloads[rejected, stage], "its values are not finite"),)
            )
            report = Report(peer.peer, stage, number, tuple(all_of_stage) if own else held, bad)
            run.send(report)  # refused after a quarantine
    for peer in offers:
        for stage in stages:
            run.send(Attest(peer.peer, stage, number, "stage", anchor_of(stage, number)))


def usual_rounds(run: Run, count: int = 4) -> None:
    for _ in range(count):
        timed_round(run, {A: 10.0, B: 10.5, C: 10.2})
