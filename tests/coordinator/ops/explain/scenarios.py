"""Runs to be asked about: by name, what has happened, the question, and what was measured.

``python -m tests.coordinator.ops.explain.scenarios`` writes the sentences of all answers to sentences.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from coordinator.run.state import commands as c
from coordinator.run.state.commands import Offer, Report, Start
from protocol.status import Explanation, Measurement
from protocol.types import PausedBy, Reachability, Role
from tests.builders import Keyed, spec_of
from tests.support.coordinator_run import Run, measure, pass_time, play_rounds, started, started_and_attested
from tests.support.explaining import Asked
from tests.support.timed_rounds import A, B, C, D, E, timed_round, usual_rounds

GOLDEN = Path(__file__).with_name("sentences.json")
USUAL, SLOW = {A: 10.0, B: 10.5, C: 10.2}, {A: 10.0, B: 19.0, C: 10.2}
BUSY = Measurement(B.peer, 5, 1, 0, inner_seconds=18.0, compute_seconds=3.0)
NONFINITE = Measurement(C.peer, 3, 1, 1, steps=6, nonfinite_step=7)
TOO_FEW = Measurement(C.peer, 3, 1, 1)
STAGES = (0, 1)


def after(run: Run, *steps: Any) -> Run:
    """`run` after steps: seconds, times of offers in a round, functions of the run, or commands."""
    for step in steps:
        if isinstance(step, float):
            run.now += step
        elif isinstance(step, dict):
            timed_round(run, step)
        elif callable(step):
            step(run)
        else:
            run.accept(step)
    return run


def full(**settings: Any) -> Run:
    return started(3, rounds=20, **settings)


def usual(**settings: Any) -> Run:
    return after(full(**settings), usual_rounds)


def mixed(*counts: int, rounds: int = 1, **settings: Any) -> Run:
    run = started_and_attested(*counts, rounds=20, **settings)
    play_rounds(run, rounds)
    return run


def measured(*speeds: tuple[Keyed, float, float]) -> Callable[[Run], None]:
    def step(run: Run) -> None:
        for peer, flops, bandwidth in speeds:
            measure(run, peer, flops=flops, bandwidth=bandwidth)

    return step


def offered(*peers: Keyed) -> Callable[[Run], None]:
    def step(run: Run) -> None:
        for peer in peers:
            for stage in STAGES:
                run.accept(Offer(peer.peer, peer.payload(run.spec, stage, 5)))

    return step


def joined(peer: Keyed, **changes: Any) -> Callable[[Run], object]:
    return lambda run: run.accept(peer.join(run.spec, Role.STAGE, **changes))


def silent(seconds: float, *alive: Keyed) -> Callable[[Run], None]:
    return lambda run: pass_time(run, seconds, *alive)


def one_offer_and_report(run: Run) -> None:
    run.now += 10
    payload = A.payload(run.spec, 0, 5)
    after(run, Offer(A.peer, payload), Report(A.peer, 0, 5, (payload,)))


def without_a_report(run: Run) -> None:
    for stage in STAGES:
        payloads = tuple(peer.payload(run.spec, stage, 5) for peer in (A, B, C))
        after(run, *(Report(peer.peer, stage, 5, payloads) for peer in (A, B)))


def withheld_round(run: Run, is_decided: bool = False) -> Run:
    """A pipeline of B and C, beside A, has no payload in round 3; where that is decided, nor has A."""
    number, epoch = run.state.current_round, run.state.plans[-1].epoch
    for stage, peer in [*enumerate((B, C)), *((stage, A) for stage in STAGES if is_decided)]:
        after(run, c.Await(peer.peer, stage, number, epoch=epoch))
    return run


def broken_replica() -> Run:
    """Its first member has finished a half of the round when the second one is gone."""
    run = after(mixed(2, 1), 5.0, lambda run: play_rounds(run, 1), 9.0)
    after(run, c.Retreat(C.peer, 1, "the neighbour does not answer"), c.Leave(D.peer, "no power"))
    for stage in STAGES:
        payloads = [peer.payload(run.spec, stage, 3) for peer in (A, B)]
        payloads += [C.payload(run.spec, stage, 3, weight=0.5)] if stage == 0 else []
        after(run, *(Offer(each.owner, each) for each in payloads[::-1]))
        after(run, *(Report(each.owner, stage, 3, tuple(payloads)) for each in payloads))
    return run


def slow_gathering() -> Run:
    run = started(2, rounds=20, stages=1)
    for _ in range(4):
        timed_round(run, {A: 10.0, B: 10.5}, reports=0.5)
    payloads = tuple(peer.payload(run.spec, 0, 5) for peer in (A, B))
    offers = [Offer(payload.owner, payload) for payload in payloads]
    return after(run, 10.0, *offers, Report(A.peer, 0, 5, payloads), 8.0, Report(B.peer, 0, 5, payloads))


def rolled_back() -> Run:
    run = started_and_attested(2, rounds=9, recovery__checkpoint_every=1)
    for number in range(5):
        after(run, *(c.Attest(each.peer, 0, number, "embedding", f"{number:064x}") for each in (A, B)))
        play_rounds(run, int(number < 4))
    after(run, *(c.Heartbeat(each.peer, 1, 0, kept=(2,)) for each in (A, B)))
    return after(run, c.RollBack(2, "the loss has risen"))


def with_alarm() -> Run:
    run = started_and_attested(2, rounds=9)
    play_rounds(run, 2)
    return after(run, c.RaiseAlarm(2, 1, "the loss rose to 9.0.", False))


def turns() -> Run:
    return after(started(rounds=9, outer__turns=2, outer__overlap=1), lambda run: play_rounds(run, 3))


def gathering() -> Run:
    run = Run(spec_of(2, 3))
    return after(run, Start(), A.join(run.spec), 30.0)


def slow_line() -> Run:
    run = started_and_attested(1, 1, rounds=20, link__k=16)
    after(run, measured((A, 1e9, 1e6), (C, 1e9, 1e6), (B, 1e9, 1e4)), lambda run: play_rounds(run, 1))
    return after(run, joined(D), measured((D, 1e9, 1e6)))


def uncompressed(**settings: Any) -> Run:
    run = started_and_attested(1, 1, rounds=20, link__k=0, **settings)
    return after(run, measured(*((peer, 1e9, 1e4) for peer in (A, B, C))))


PAUSE, GONE_C = c.PauseRun(PausedBy.OPERATOR, "the loss has risen"), c.Leave(C.peer, "no power")
ABORTED = one_offer_and_report, silent(600.0, A, B, C)
REJECTED = partial(timed_round, offers=USUAL, rejected=B)
UNBALANCED = {"grouping__balance": False}
VARIED = measured((A, 4e9, 4e6), (B, 1e9, 1e6), (C, 4e9, 4e6))
WEAK = measured((A, 4e6, 1e6), (B, 1e6, 1e6), (C, 4e6, 1e6))
MOVED = c.UpdateAddresses(B.peer, "h:2", Reachability.OPEN, "h:2", "")
SCENARIOS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "slow_replica": lambda: (after(usual(), SLOW), 5, BUSY),
    "slow_machine": lambda: (after(full(**UNBALANCED), VARIED, *[{A: 10.0, B: 18.0, C: 10.2}] * 4), 4),
    "lost_member": lambda: (
        after(usual(timing__lost_after=15.0), silent(20.0, A, C), {A: 1.0, C: 1.2}),
        5,
    ),
    "moved_member": lambda: (after(usual(), MOVED, SLOW), 5),
    "rejected_payload": lambda: (after(usual(), REJECTED), 5),
    "aborted_round": lambda: (after(usual(), *ABORTED), 5),
    "after_an_abort": lambda: (after(usual(), *ABORTED), "now"),
    "restarted_coordinator": lambda: (after(usual(), 90.0, Start(), USUAL), 5),
    "slow_gathering": lambda: (slow_gathering(), 5),
    "missing_report": lambda: (
        after(usual(), 10.0, offered(A, B, C), without_a_report, silent(600.0, A, B, C)),
        5,
    ),
    "nonfinite_member": lambda: (withheld_round(mixed(1, 1, rounds=2)), 3, NONFINITE),
    "nonfinite_peer": lambda: (withheld_round(mixed(1, 1, rounds=2)), C.peer, NONFINITE),
    "nonfinite_round": lambda: (withheld_round(mixed(1, 1, rounds=2), is_decided=True), 3, NONFINITE),
    "withheld_payload": lambda: (withheld_round(mixed(1, 1, rounds=2)), 3, TOO_FEW),
    "withheld_now": lambda: (withheld_round(mixed(1, 1, rounds=2)), 3),
    "new_plan": lambda: (after(mixed(2, 1, rounds=2), GONE_C, lambda run: play_rounds(run, 1)), 3),
    "broken_replica": lambda: (broken_replica(), 3),
    "open_round": lambda: (after(usual(), 30.0), 5),
    "first_round": lambda: (after(full(), USUAL), 1),
    "skipped_stage": lambda: (turns(), 2),
    "alarm_in_a_round": lambda: (with_alarm(), 3),
    "rollback": lambda: (rolled_back(), 5),
    "after_a_pause": lambda: (after(usual(), PAUSE, USUAL, 600.0, c.ResumeRun(), USUAL), 6),
    "alarm_now": lambda: (with_alarm(), "now"),
    "paused_now": lambda: (after(usual(), PAUSE, USUAL, 600.0), "now"),
    "waiting_now": lambda: (after(usual(), 10.0, offered(A), 3.0), "now"),
    "late_now": lambda: (after(usual(), 10.0, offered(A, C), 8.0), "now"),
    "gathering_payloads_now": lambda: (after(usual(), 10.0, offered(A, B, C), 2.0), "now"),
    "slow_machine_now": lambda: (after(full(), WEAK, lambda run: play_rounds(run, 1)), "now"),
    "slow_line_now": lambda: (slow_line(), "now"),
    "stalled_now": lambda: (after(mixed(0, 1), c.Leave(A.peer, "no power"), 6.0, c.Tick()), "now"),
    "before_the_run_now": lambda: (gathering(), ""),
    "finished_now": lambda: (after(started(3, rounds=2), USUAL, USUAL, c.Tick()), "now"),
    "before_the_run_peer": lambda: (gathering(), A.peer),
    "uncompressed_peer": lambda: (uncompressed(), B.peer),
    "training_peer": lambda: (usual(), B.peer[-8:]),
    "banned_peer": lambda: (after(usual(), c.Ban(B.peer, "it sends rubbish")), f"..{B.peer[-6:]}"),
    "quarantined_peer": lambda: (after(full(), *[REJECTED] * 3), B.peer),
    "lost_peer": lambda: (after(usual(timing__lost_after=15.0), silent(20.0, A, C)), B.peer),
    "left_peer": lambda: (after(usual(), GONE_C, 20.0), C.peer),
    "draining_peer": lambda: (after(full(), c.Drain(B.peer, "a test")), B.peer),
    "leaving_spare": lambda: (
        after(mixed(1, 1), joined(E, memory_bytes=1000), c.Drain(E.peer, "a test")),
        E.peer,
    ),
    "spare_without_memory": lambda: (after(mixed(1, 1), joined(E, memory_bytes=1000)), E.peer),
    "spare_without_neighbours": lambda: (
        after(mixed(1, 1), joined(D, endpoint=""), joined(E, endpoint="")),
        E.peer,
    ),
    "follower": lambda: (after(mixed(1, 1, rounds=4), joined(D), joined(E)), E.peer),
    "retreated_peer": lambda: (
        after(mixed(2, 1, rounds=2), c.Retreat(C.peer, 1, "the neighbour does not answer")),
        C.peer,
    ),
    "slow_peer": lambda: (after(full(**UNBALANCED), VARIED, *[SLOW] * 3), B.peer),
    "events_of_the_log": lambda: (full(), "event 1, 2"),
}


@cache
def answer(name: str) -> tuple[Asked, Explanation]:
    run, question, *measurements = SCENARIOS[name]()
    ask = Asked(run.state, run.events, run.now)
    return ask, ask(question, measurements)


def sentences() -> dict[str, list[str]]:
    found = {name: answer(name)[1] for name in sorted(SCENARIOS)}
    return {name: [each.title.text, *(it.text for it in each.statements)] for name, each in found.items()}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(sentences(), indent=1, ensure_ascii=False) + "\n")
