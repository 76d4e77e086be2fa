"""The sentence of each statement, for people; tests/coordinator/ops/explain/sentences.json has examples."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

from coordinator.ops.explain.statements import Code, printable
from coordinator.placement.predict import Bottleneck
from coordinator.run.state.cause_text import cause_text
from coordinator.run.state.text import counted, listed, short
from protocol.roles import POLICIES
from protocol.spec.link import width_text
from protocol.status import Statement

MOST_CHARACTERS = 1000
"""Of one sentence, in which a peer's own words may be."""


def sentence(it: Statement) -> str:
    """The sentence of a statement: text, all of it printable, without a full stop."""
    text = printable(_TEXTS[Code(it.code)](it).rstrip(". "), MOST_CHARACTERS)
    return f"{text[:1].upper()}{text[1:]}"


def duration(seconds: float) -> str:
    """Such as "0.04 s", "4.2 s", "42 s", "3 min 20 s" or "2 h 5 min"."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.{1 if seconds >= 0.995 else 2}f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def _s(it: Statement, name: str = "seconds") -> str:
    """The duration that a figure is."""
    return duration(it.figures.get(name, 0.0))


def _n(it: Statement, name: str) -> int:
    return int(it.figures.get(name, 0))


def _megabits(it: Statement, name: str) -> str:
    return f"{8e-6 * it.figures.get(name, 0.0):,.1f} Mb/s"


def _gigaflops(it: Statement, name: str) -> str:
    return f"{it.figures.get(name, 0.0) / 1e9:,.3g} GFLOP/s"


def _times(factor: float) -> str:
    return f"{factor:.1f} times" if factor < 9.95 else f"{factor:.0f} times"


def _replica(it: Statement, at: int = 0) -> str:
    return f"replica-{it.replicas[at]}" if len(it.replicas) > at else "its replica"


def _stages(it: Statement) -> str:
    noun = "stage" if len(it.stages) == 1 else "stages"
    return f"{noun} {listed([str(each) for each in sorted(it.stages)], most=8)}"


def _peers(it: Statement) -> str:
    return listed([short(each) for each in it.peers])


def _usual(it: Statement) -> str:
    return f"; in the rounds before it took {_s(it, 'usual')} (median)" if "usual" in it.figures else ""


def _bottleneck(it: Statement) -> str:
    return str(Bottleneck(cast(Any, it.detail), *it.peers))


def _event(it: Statement) -> str:
    if not it.events:
        return f"{counted(_n(it, 'count'), 'event')} of the log"
    if "at" in it.figures:
        return f"{datetime.fromtimestamp(it.figures['at'], UTC):%Y-%m-%d %H:%M:%S} UTC: {it.detail}"
    if "ago" in it.figures:
        return f"{_s(it, 'ago')} ago, {it.detail}"
    return f"{_s(it, 'after')} after the round began, {it.detail}"


_REMEDIES: dict[str, str] = {
    "gathering": "'hetnode invite create' lets more peers in",
    "paused": "'hetnode run resume' lets it go on",
    "stalled": "It goes on by itself when such a peer has joined and caught up",
    "excluded": "'hetnode peers unban' lets it in again",
    "gone": "It gets an assignment again when it joins again: 'hetnode join' on its machine",
    "lost": "A peer that vanishes is missed after {seconds:g} s (timing.lost_after), and its round waits "
    "until then; a node that ends with 'hetnode leave' costs no such wait",
    "rejected": "A peer whose payloads are rejected should run the same version of hetnode as the others, on "
    "sound memory; 'hetnode peers ban' excludes it",
    "offer": "A round waits for slow replicas up to {factor:g} times the time that half of them need "
    "(timing.straggler); with grouping.balance slow replicas get fewer microbatches from a later round on. "
    "'hetnode explain now' predicts what would be faster",
    "inner": "'hetnode explain now' predicts what would make the inner phase shorter",
    "group": "Smaller payloads (outer.top_k, outer.quantizer) or faster lines would shorten the gathering",
}
_PHASES = {
    "inner": "training until the first payload was offered",
    "offer": "waiting for the payloads of the other replicas",
    "group": "gathering the payloads",
    "decision": "deciding",
}
_ACTIVITIES = {
    "banned": "is banned",
    "quarantined": "is in quarantine",
    "finished": "has finished its work and left",
    "gone": "is gone",
    "drains": "is about to leave",
    "follows": "follows",
    "spare": "is a spare",
    "waits": "waits for the run to begin",
    "trains": "trains",
    "relay": "relays",
}


def _offered(it: Statement) -> str:
    until = f"; it waits at most {_s(it, 'remaining')} more" if "remaining" in it.figures else ""
    return f"The first payload of this round was offered {_s(it, 'ago')} ago{until}"


def _late(it: Statement) -> str:
    usual = f" and usually needs {_s(it, 'usual')}" if "usual" in it.figures else ""
    step = f"; it is in step {_n(it, 'step')} of {_n(it, 'steps')}" if "step" in it.figures else ""
    return f"{_replica(it)} has trained for {_s(it)}{usual}{step}"


def _aborts(it: Statement) -> str:
    names = listed([str(each) for each in it.rounds], most=8)
    of = f"Of the last {counted(_n(it, 'compared'), 'round')}, {len(it.rounds)} had an aborted stage"
    return f"{of}: {names}; 'hetnode explain {it.rounds[-1]}' says why"


def _idle(it: Statement) -> str:
    spares = f", {_n(it, 'spares')} of them without an assignment" if _n(it, "spares") else ""
    why = f"'hetnode explain {short(it.peers[0])}' says why"
    return f"Here, but not training: {counted(len(it.peers), 'peer')}{spares}: {_peers(it)}; {why}"


def _faster(it: Statement) -> str:
    one, other = (short(each) for each in it.peers)
    match it.detail:
        case "computing":
            what = f"If {one} ({_gigaflops(it, 'rate')}) computed twice as fast"
        case "sending":
            what = f"If the line from {one} to {other} ({_megabits(it, 'rate')}) carried twice as much"
        case _:
            what = f"If messages between {one} and {other} took half the time"
    return f"{what}{_gain(it)}"


def _gain(it: Statement) -> str:
    step = f", the inner step of {_replica(it)} would take {_s(it, 'step')} instead of {_s(it, 'step_now')}"
    return f"{step}, and a round {_s(it, 'round')} instead of {_s(it, 'round_now')} (prediction)"


def _narrower(it: Statement) -> str:
    was = _n(it, "k_now") or "uncompressed activations"
    why = "k is fixed in the specification of this run" if _n(it, "fixed") else "k narrows where that pays"
    ends = " -> ".join(map(short, it.peers))
    return f"With k = {_n(it, 'k')} instead of {was} on the link {ends}{_gain(it)}; {why}"


def _round(it: Statement) -> str:
    is_decided = bool(_n(it, "decided"))
    title = f"Round {it.rounds[0]} {'took' if is_decided else 'has run for'} {_s(it)}"
    if usual := it.figures.get("usual"):
        factor, count = it.figures["seconds"] / usual, _n(it, "compared")
        compared = "about the median" if 0.9 < factor < 1.1 else f"{_times(factor)} the median"
        compared = compared if is_decided or factor > 0.9 else "so far less than the median"
        before = "the round before" if count == 1 else f"the {count} rounds before"
        title += f", {compared} of {before} ({duration(usual)})"
    return title if is_decided else f"{title}, and is not decided"


def _where(it: Statement) -> str:
    return "every stage" if _n(it, "all") else _stages(it)


def _more_time(it: Statement) -> str:
    instead = f"{_s(it)} instead of {_s(it, 'usual')}"
    return f"{_s(it, 'extra')} more than usual went into {_PHASES[it.detail]}: {instead}"


def _time(it: Statement) -> str:
    parts = (f"{_s(it, name)} {text}" for name, text in _PHASES.items() if name in it.figures)
    return f"Its time: {', '.join(parts)}"


def _no_offer(it: Statement) -> str:
    why = f": {it.detail}" if it.detail else f" before the round closed{_usual(it)}"
    return f"{_replica(it)} ({_peers(it)}) offered nothing{why}"


def _last(it: Statement) -> str:
    text = f"offered {_s(it)} after the round began"
    if len(it.replicas) < 2:
        return f"{_replica(it)} {text}{_usual(it)}"
    return f"{_replica(it)} was last: it {text}, {_s(it, 'lag')} after {_replica(it, 1)}{_usual(it)}"


def _last_report(it: Statement) -> str:
    rates = f"{_megabits(it, 'uplink')} up and {_megabits(it, 'downlink')} down"
    line = f"; its line has {rates}" if "downlink" in it.figures else ""
    what = f"{_peers(it)} was the last to report the payloads, {_s(it, 'lag')} after the one before"
    return f"At {_stages(it)}, {what}{line}"


def _peer(it: Statement) -> str:
    noun = f" as a {POLICIES[it.role].noun}" if it.role and it.detail in ("trains", "follows") else ""
    place = f" in {_replica(it)}, {_stages(it)}" if it.replicas and noun else ""
    return f"Peer {it.peers[0]} {_ACTIVITIES[it.detail]}{noun}{place}"


def _assigned(it: Statement) -> str:
    width = _n(it, "width")
    ends = (end for end in ("upstream", "downstream") if end in it.figures)
    links = ", ".join(f"{width_text([_n(it, end)], width)} {end}" for end in ends)
    place = f"Plan {_n(it, 'epoch')}, from round {it.rounds[0]} on, has it in {_replica(it)}"
    return f"{place}{f'; its links: {links}' if links else ''}"


def _behind(it: Statement) -> str:
    have = ", ".join(
        f"of stage {stage} {f'that after round {number}' if number >= 0 else 'none'}"
        for stage, number in zip(it.stages, it.rounds, strict=True)
    )
    attest = f"it has to attest the anchors after round {_n(it, 'least')}"
    has = have or "an anchor that differs from that of the others"
    return f"It must catch up first: {attest}, and has attested {has}"


_TEXTS: dict[Code, Callable[[Statement], str]] = {
    Code.EVENT: _event,
    Code.CAUSE: lambda it: cause_text(it.cause) if it.cause else "",
    Code.REMEDY: lambda it: _REMEDIES[it.detail].format(**it.figures),
    Code.MORE: lambda it: f"{_n(it, 'count')} more would follow",
    Code.RUN: lambda it: it.detail,
    Code.GROUP_CLOSED: lambda it: f"The group of {_stages(it)} was closed {_s(it, 'ago')} ago",
    Code.OFFERED: _offered,
    Code.LATE: _late,
    Code.SILENT: lambda it: (
        f"No sign of life for some time ({_s(it)}) from {_peers(it)}; after {_s(it, 'lost_after')} a peer "
        "counts as lost"
    ),
    Code.ABORTS: _aborts,
    Code.IDLE: _idle,
    Code.UNMEASURED: lambda it: "No speed is measured yet, so nothing can be predicted",
    Code.PREDICTION: lambda it: (
        f"Prediction of the cost model: a round takes {_s(it)}, of which {_s(it, 'inner')} are the inner "
        f"phase, and {_s(it, 'exchange')} the exchange as in the last rounds; it waits most for "
        f"{_bottleneck(it)}, in {_replica(it)}"
    ),
    Code.FASTER: _faster,
    Code.SPARE_INSTEAD: lambda it: (
        f"With the spare {short(it.peers[0])} in the place of {short(it.peers[1])}{_gain(it)}"
    ),
    Code.NARROWER: _narrower,
    Code.ROUND: _round,
    Code.ROLLBACK: lambda it: f"Round {it.rounds[0]} is a rollback to round {it.rounds[1]}",
    Code.COMMITTED: lambda it: f"It was committed at {_where(it)}: {it.detail}",
    Code.ABORTED: lambda it: f"It was ABORTED at {_where(it)}, so nothing counts there: {it.detail}",
    Code.SKIPPED: lambda it: (
        f"It skipped {_where(it)}, without a turn: what was trained there counts in a later round"
    ),
    Code.MORE_TIME: _more_time,
    Code.TIMES: _time,
    Code.RESTARTED: lambda it: (
        f"The coordinator started again, or its machine had stood still: nothing is in the log for {_s(it)} "
        "before that, and deadlines count from there"
    ),
    Code.STOOD_STILL: lambda it: f"{it.detail}; it stood still for {_s(it)}",
    Code.NO_OFFER: _no_offer,
    Code.WITHHELD: lambda it: (
        f"{_replica(it)} ({_peers(it)}) had trained too little of its inner phase to offer a payload"
    ),
    Code.LAST: _last,
    Code.FIRST_ROUND: lambda it: (
        "It was its first round with these members, so they started processes or opened links"
    ),
    Code.COMPUTED: lambda it: (
        f"Of the {_s(it, 'inner')} of its inner phase, {_peers(it)} computed for {_s(it, 'compute')}"
    ),
    Code.ALWAYS_SLOW: lambda it: f"It is always slower than the others, which took {_s(it)}",
    Code.NO_REPORT: lambda it: (
        f"At {_stages(it)} the report of {_peers(it)} never came; the decision came {_s(it)} after the group "
        "was closed"
    ),
    Code.LAST_REPORT: _last_report,
    Code.NOT_COUNTED: lambda it: (
        f"The payload of {_replica(it)} ({_peers(it)}) for {_stages(it)} did not count: {it.detail}"
    ),
    Code.PEER: _peer,
    Code.ENROLLED: lambda it: f"Peer {it.peers[0]} was let into the run and has not joined it",
    Code.ASSIGNED: _assigned,
    Code.NO_VACANCY: lambda it: f"It cannot have {it.detail}",
    Code.RESERVED_SOON: lambda it: "An assignment will be reserved for it at the end of this round",
    Code.BEHIND: _behind,
    Code.FLOPS: lambda it: (
        f"{_peers(it)} computes at {_gigaflops(it, 'own')}; the median of the others of its role is "
        f"{_gigaflops(it, 'usual')}"
    ),
    Code.UPLINK: lambda it: (
        f"The line of {_peers(it)} has {_megabits(it, 'own')} up; the median of the others of its role is "
        f"{_megabits(it, 'usual')}"
    ),
    Code.PACE: lambda it: (
        f"{_replica(it)} needs {_s(it, 'own')} from the beginning of a round to its payload; the median of "
        f"the others is {_s(it, 'usual')}"
    ),
    Code.COUNTED: lambda it: f"Its last payload that counts is in the decision of round {it.rounds[0]}",
}
