"""Runs to be asked about: by name, what has happened, and the question.

``python -m tests.coordinator.ops.explain.scenarios`` writes the sentences of all answers to sentences.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from coordinator.run.state.commands import (
    Attest,
    Ban,
    Drain,
    Heartbeat,
    Leave,
    Offer,
    PauseRun,
    RaiseAlarm,
    Report,
    ResumeRun,
    Retreat,
    RollBack,
    Start,
    Tick,
    UpdateAddresses,
)
from protocol.status import Explanation, Measurement
from protocol.types import PausedBy, Reachability, Role
from tests.builders import spec_of
from tests.support.coordinator_run import (
    Run,
    join,
    measure,
    pass_time,
    play_rounds,
    started,
    started_and_attested,
)
from tests.support.explaining import Asked
from tests.support.timed_rounds import A, B, C, D, E, timed_round, usual_rounds

GOLDEN = Path(__file__).with_name("sentences.json")
USUAL, SLOW_B = {A: 10.0, B: 10.5, C: 10.2}, {A: 10.0, B: 19.0, C: 10.2}
Asking = tuple[Run, object, tuple[Measurement, ...]]
SCENARIOS: dict[str, Callable[[], Asking]] = {}


def scenario(make: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    def asking() -> Asking:
        run, question, *measured = make()
        return run, question, tuple(measured)

    SCENARIOS[make.__name__] = asking
    return make


@cache
def answer(name: str) -> tuple[Asked, Explanation]:
    run, question, measured = SCENARIOS[name]()
    ask = Asked(run.state, run.events, run.now)
    return ask, ask(question, measured)


def sentences() -> dict[str, list[str]]:
    found = {name: answer(name)[1] for name in sorted(SCENARIOS)}
    return {name: [each.title.text, *(it.text for it in each.statements)] for name, each in found.items()}


def usual(**settings: Any) -> Run:
    run = started(3, rounds=20, **settings)
    usual_rounds(run)
    return run


def offers(run: Run, *peers: Any) -> None:
    for peer in peers:
        for stage in (0, 1):
            run.accept(Offer(peer.peer, peer.payload(run.spec, stage, 5)))


@scenario
def slow_replica() -> Any:
    run = usual()
    timed_round(run, SLOW_B)
    busy = Measurement(B.peer, 5, 1, 0, inner_seconds=18.0, compute_seconds=3.0)
    return run, 5, busy


@scenario
def slow_machine() -> Any:
    run = started(3, rounds=20, grouping__balance=False)
    for peer, flops in ((A, 4e9), (B, 1e9), (C, 4e9)):
        measure(run, peer, flops=flops)
    for _ in range(4):
        timed_round(run, {A: 10.0, B: 18.0, C: 10.2})
    return run, 4


@scenario
def lost_member() -> Any:
    run = usual(timing__lost_after=15.0)
    pass_time(run, 20.0, A, C)
    timed_round(run, {A: 1.0, C: 1.2})
    return run, 5


@scenario
def moved_member() -> Any:
    run = usual()
    run.accept(UpdateAddresses(B.peer, "h:2", Reachability.OPEN, "h:2", ""))
    timed_round(run, SLOW_B)
    return run, 5


@scenario
def rejected_payload() -> Any:
    run = usual()
    timed_round(run, USUAL, rejected=B)
    return run, 5


@scenario
def aborted_round() -> Any:
    run = usual()
    run.now += 10
    run.accept(Offer(A.peer, A.payload(run.spec, 0, 5)))
    run.accept(Report(A.peer, 0, 5, (A.payload(run.spec, 0, 5),)))
    pass_time(run, 600.0, A, B, C)
    return run, 5


@scenario
def after_an_abort() -> Any:
    return aborted_round()[0], "now"


@scenario
def restarted_coordinator() -> Any:
    run = usual()
    run.now += 90
    run.accept(Start())
    timed_round(run, USUAL)
    return run, 5


@scenario
def slow_gathering() -> Any:
    run = started(2, rounds=20, stages=1)
    for _ in range(4):
        timed_round(run, {A: 10.0, B: 10.5}, reports=0.5)
    payloads = tuple(peer.payload(run.spec, 0, 5) for peer in (A, B))
    run.now += 10
    for payload in payloads:
        run.accept(Offer(payload.owner, payload))
    run.accept(Report(A.peer, 0, 5, payloads))
    run.now += 8
    run.accept(Report(B.peer, 0, 5, payloads))
    return run, 5


@scenario
def missing_report() -> Any:
    run = usual()
    run.now += 10
    offers(run, A, B, C)
    for stage in (0, 1):
        payloads = tuple(peer.payload(run.spec, stage, 5) for peer in (A, B, C))
        for peer in (A, B):
            run.accept(Report(peer.peer, stage, 5, payloads))
    pass_time(run, 600.0, A, B, C)
    return run, 5


@scenario
def new_plan() -> Any:
    run = started_and_attested(2, 1, rounds=20)
    play_rounds(run, 2)
    run.accept(Leave(C.peer, "the owner needs the machine"))
    play_rounds(run, 1)
    return run, 3


@scenario
def open_round() -> Any:
    run = usual()
    run.now += 30
    return run, 5


@scenario
def first_round() -> Any:
    run = started(3, rounds=20)
    timed_round(run, USUAL)
    return run, 1


@scenario
def skipped_stage() -> Any:
    run = started(rounds=9, outer__turns=2, outer__overlap=1)
    play_rounds(run, 3)
    return run, 2


def _alarm() -> Run:
    run = started_and_attested(2, rounds=9)
    play_rounds(run, 2)
    run.accept(RaiseAlarm(2, 1, "the loss rose to 9.0.", False))
    return run


@scenario
def alarm_now() -> Any:
    return _alarm(), "now"


@scenario
def alarm_in_a_round() -> Any:
    return _alarm(), 3


@scenario
def rollback() -> Any:
    run = started_and_attested(2, rounds=9, recovery__checkpoint_every=1)
    for number in range(5):
        for peer in (A, B):
            run.accept(Attest(peer.peer, 0, number, "embedding", f"{number:064x}"))
        play_rounds(run, int(number < 4))
    for peer in (A, B):
        run.accept(Heartbeat(peer.peer, 1, 0, kept=(2,)))
    run.accept(RollBack(2, "the loss has risen"))
    return run, 5


def _paused() -> Run:
    run = usual()
    run.accept(PauseRun(PausedBy.OPERATOR, "the loss has risen"))
    timed_round(run, USUAL)
    run.now += 600
    return run


@scenario
def paused_now() -> Any:
    return _paused(), "now"


@scenario
def after_a_pause() -> Any:
    run = _paused()
    run.accept(ResumeRun())
    timed_round(run, USUAL)
    return run, 6


@scenario
def waiting_now() -> Any:
    run = usual()
    run.now += 10
    offers(run, A)
    run.now += 3
    return run, "now"


@scenario
def late_now() -> Any:
    run = usual()
    run.now += 10
    offers(run, A, C)
    run.now += 8
    return run, "now"


@scenario
def gathering_payloads_now() -> Any:
    run = usual()
    run.now += 10
    offers(run, A, B, C)
    run.now += 2
    return run, "now"


@scenario
def slow_machine_now() -> Any:
    run = started(3, rounds=20)
    for peer, flops in ((A, 4e6), (B, 1e6), (C, 4e6)):
        measure(run, peer, flops=flops, bandwidth=1e6)
    play_rounds(run, 1)
    return run, "now"


@scenario
def slow_line_now() -> Any:
    run = started_and_attested(1, 1, rounds=20, link__k=16)
    for peer in (A, B, C):
        measure(run, peer, flops=1e9, bandwidth=1e6)
    measure(run, B, flops=1e9, bandwidth=1e4)
    play_rounds(run, 1)
    join(run, D)
    measure(run, D, flops=1e9, bandwidth=1e6)
    return run, "now"


def _uncompressed(**settings: Any) -> Run:
    run = started_and_attested(1, 1, rounds=20, link__k=0, **settings)
    for peer in (A, B, C):
        measure(run, peer, flops=1e9, bandwidth=1e4)
    return run


@scenario
def uncompressed_now() -> Any:
    return _uncompressed(), "now"


@scenario
def adaptive_now() -> Any:
    return _uncompressed(link__least_k=4, link__most_k=8, link__uncompressed=True), "now"


@scenario
def uncompressed_peer() -> Any:
    return _uncompressed(), B.peer


@scenario
def stalled_now() -> Any:
    run = started_and_attested(0, 1, rounds=20)
    play_rounds(run, 1)
    run.accept(Leave(A.peer, "no power"))
    run.now += 6
    run.accept(Tick())
    return run, "now"


def _gathering() -> Run:
    run = Run(spec_of(2, 3))
    run.accept(Start())
    run.accept(A.join(run.spec))
    run.now += 30
    return run


@scenario
def before_the_run_now() -> Any:
    return _gathering(), ""


@scenario
def before_the_run_peer() -> Any:
    return _gathering(), A.peer


@scenario
def finished_now() -> Any:
    run = started(3, rounds=2)
    usual_rounds(run, 2)
    run.accept(Tick())
    return run, "now"


@scenario
def training_peer() -> Any:
    return usual(), B.peer[-8:]


@scenario
def banned_peer() -> Any:
    run = usual()
    run.accept(Ban(B.peer, "it sends rubbish"))
    return run, f"..{B.peer[-6:]}"


@scenario
def quarantined_peer() -> Any:
    run = started(3, rounds=20)
    for _ in range(3):
        timed_round(run, USUAL, rejected=B)
    return run, B.peer


def _gone() -> Run:
    run = usual(timing__lost_after=15.0)
    run.accept(Leave(C.peer, "no power"))
    pass_time(run, 20.0, A)
    return run


@scenario
def lost_peer() -> Any:
    return _gone(), B.peer


@scenario
def left_peer() -> Any:
    return _gone(), C.peer


@scenario
def draining_peer() -> Any:
    run = started(3, rounds=20)
    run.accept(Drain(B.peer, "a test"))
    return run, B.peer


def _mixed(rounds: int = 1, replicas: int = 1) -> Run:
    run = started_and_attested(replicas, 1, rounds=20)
    play_rounds(run, rounds)
    return run


@scenario
def spare_without_memory() -> Any:
    run = _mixed()
    run.accept(E.join(run.spec, Role.STAGE, memory_bytes=1000))
    return run, E.peer


@scenario
def spare_without_neighbours() -> Any:
    run = _mixed()
    run.accept(D.join(run.spec, Role.STAGE, endpoint=""))
    run.accept(E.join(run.spec, Role.STAGE, endpoint=""))
    return run, E.peer


@scenario
def follower() -> Any:
    run = _mixed(4)
    run.accept(D.join(run.spec, Role.STAGE))
    run.accept(E.join(run.spec, Role.STAGE))
    return run, E.peer


@scenario
def retreated_peer() -> Any:
    run = _mixed(2, replicas=2)
    run.accept(Retreat(C.peer, 1, "the neighbour does not answer"))
    return run, C.peer


@scenario
def slow_peer() -> Any:
    run = started(3, rounds=20, grouping__balance=False)
    for peer, flops, bandwidth in ((A, 4e9, 4e6), (B, 1e9, 1e6), (C, 4e9, 4e6)):
        measure(run, peer, flops=flops, bandwidth=bandwidth)
    for _ in range(3):
        timed_round(run, SLOW_B)
    return run, B.peer


@scenario
def events_of_the_log() -> Any:
    return started(3, rounds=20), "event 1, 2"


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(sentences(), indent=1, ensure_ascii=False) + "\n")
