"""The sentence of each statement, for people; tests/coordinator/ops/explain/sentences.json has examples.

A template names fields and figures in braces; :class:`_Words` says how each is written. What stands in square
brackets is left out if a figure that it names is not there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

from coordinator.base.phrases import counted, listed, short
from coordinator.ops.explain.statements import Code, printable
from coordinator.placement.predict import Bottleneck
from coordinator.status.cause_text import cause_text
from protocol.roles import POLICIES
from protocol.run_files.link_text import width_text
from protocol.status import Statement

MOST_CHARACTERS = 1000
"""Of one sentence, in which a peer's own words may be."""
_OPTIONAL = re.compile(r"\[([^]]*)\]")
_GAIN = (
    ", the inner step of {replica} would take {step} instead of {step_now}, and a round {round} instead of "
    "{round_now} (prediction)"
)
_USUAL = "[; in the rounds before it took {usual} (median)]"
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
    "rests": "rests: its machine lets it take no part for now",
    "drains": "is about to leave",
    "follows": "follows as a {noun} in {replica}, {stages}",
    "spare": "is a spare",
    "waits": "waits for the run to begin",
    "trains": "trains as a {noun} in {replica}, {stages}",
    "relay": "relays",
}
_REMEDIES = {
    "gathering": "'hetnode invite create' lets more peers in",
    "paused": "'hetnode run resume' lets it go on",
    "stalled": "it goes on by itself when such a peer has joined and caught up",
    "excluded": "'hetnode peers unban' lets it in again",
    "gone": "it gets an assignment again when it joins again: 'hetnode join' on its machine",
    "rests": "it comes back by itself: after 'hetnode resume' there, in its hours, or when it is idle",
    "lost": "a peer that vanishes is missed after {seconds} (timing.lost_after), and its round waits until "
    "then; a node that ends with 'hetnode leave' costs no such wait",
    "rejected": "a peer whose payloads are rejected needs the newest hetnode, and sound memory; "
    "'hetnode peers ban' excludes it",
    "offer": "a round waits for slow replicas up to {factor} times the time that half of them need "
    "(timing.straggler); with grouping.balance slow replicas get fewer microbatches from a later round on. "
    "'hetnode explain now' predicts what would be faster",
    "inner": "'hetnode explain now' predicts what would make the inner phase shorter",
    "group": "smaller payloads (outer.top_k, outer.quantizer) or faster lines would shorten the gathering",
}
_FASTER = {
    "computing": "if {peer} ({flops_rate}) computed twice as fast" + _GAIN,
    "sending": "if the line from {peer} to {other} ({line_rate}) carried twice as much" + _GAIN,
    "latency": "if messages between {peer} and {other} took half the time" + _GAIN,
}


def sentence(statement: Statement) -> str:
    """The sentence of a statement: text, all of it printable, without a full stop."""
    template = _TEMPLATES[Code(statement.code)]
    if not isinstance(template, str):
        template = template(statement)
    template = _OPTIONAL.sub(partial(_known, statement), template)
    text = printable(template.format_map(_Words(statement)).rstrip(". "), MOST_CHARACTERS)
    return f"{text[:1].upper()}{text[1:]}"


def _known(statement: Statement, fragment: re.Match[str]) -> str:
    names = re.findall(r"{(\w+)}", fragment[1])
    return fragment[1] if all(name in statement.figures for name in names) else ""


class _Words(dict[str, str]):
    """How the fields and figures of a statement are written. Other figures are durations in seconds."""

    def __init__(self, statement: Statement) -> None:
        super().__init__(detail=statement.detail, replica="its replica", noun="peer")
        rate = statement.figures.get("rate", 0.0)
        self.update(flops_rate=_gigaflops(rate), line_rate=_megabits(rate))
        self.update((name, _figure(statement, name, value)) for name, value in statement.figures.items())
        self.update(peers=listed([short(each) for each in statement.peers]), places="every stage")
        self["stages"] = f"{'stage' if len(statement.stages) == 1 else 'stages'} " + listed(
            [str(each) for each in sorted(statement.stages)], most=8
        )
        if not statement.figures.get("all"):
            self["places"] = self["stages"]
        names = (
            (("peer", "other"), statement.peers, short),
            (("replica", "former"), statement.replicas, "replica-{}".format),
            (("number", "second"), statement.rounds, str),
        )
        for keys, values, text in names:
            self.update(zip(keys, map(cast("Callable[[Any], str]", text), values), strict=False))
        if statement.peers:
            self["id"] = statement.peers[0]
        if statement.cause:
            self["cause"] = cause_text(statement.cause)
        if statement.role:
            self["noun"] = POLICIES[statement.role].noun


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


def _figure(statement: Statement, name: str, value: float) -> str:
    if name in ("uplink", "downlink") or statement.code == Code.UPLINK:
        return _megabits(value)
    if statement.code == Code.FLOPS:
        return _gigaflops(value)
    is_count = name in _COUNTS or (name == "step" and statement.code in (Code.LATE, Code.NONFINITE))
    return f"{value:g}" if is_count else duration(value)


_COUNTS = {"count", "compared", "steps", "done", "spares", "epoch", "least", "factor"}


def _megabits(bytes_per_second: float) -> str:
    return f"{8e-6 * bytes_per_second:,.1f} Mb/s"


def _gigaflops(flops: float) -> str:
    return f"{flops / 1e9:,.3g} GFLOP/s"


def _event(statement: Statement) -> str:
    if not statement.events:
        return "{count} events of the log"
    if "at" in statement.figures:
        return f"{datetime.fromtimestamp(statement.figures['at'], UTC):%Y-%m-%d %H:%M:%S} UTC: {{detail}}"
    return "{ago} ago, {detail}" if "ago" in statement.figures else "{after} after the round began, {detail}"


def _aborts(statement: Statement) -> str:
    names = listed([str(each) for each in statement.rounds], most=8)
    of = f"of the last {{compared}} rounds, {len(statement.rounds)} had an aborted stage"
    return f"{of}: {names}; 'hetnode explain {statement.rounds[-1]}' says why"


def _idle(statement: Statement) -> str:
    spares = ", {spares} of them without an assignment" if statement.figures.get("spares") else ""
    here = f"here, but not training: {counted(len(statement.peers), 'peer')}{spares}"
    return f"{here}: {{peers}}; 'hetnode explain {{peer}}' says why"


def _prediction(statement: Statement) -> str:
    return (
        "prediction of the cost model: a round takes {seconds}, of which {inner} are the inner phase, and "
        "{exchange} the exchange as in the last rounds; it waits most for "
        f"{Bottleneck(cast(Any, statement.detail), *statement.peers)}, in {{replica}}"
    )


def _round(statement: Statement) -> str:
    is_decided = bool(statement.figures.get("decided"))
    title = f"round {{number}} {'took' if is_decided else 'has run for'} {{seconds}}"
    if usual := statement.figures.get("usual"):
        factor = statement.figures["seconds"] / usual
        times = f"{factor:.1f} times" if factor < 9.95 else f"{factor:.0f} times"
        compared = "about the median" if 0.9 < factor < 1.1 else f"{times} the median"
        compared = compared if is_decided or factor > 0.9 else "so far less than the median"
        before = "the round before" if statement.figures["compared"] == 1 else "the {compared} rounds before"
        title += f", {compared} of {before} ({{usual}})"
    return title if is_decided else f"{title}, and is not decided"


def _times(statement: Statement) -> str:
    parts = (f"{{{name}}} {text}" for name, text in _PHASES.items() if name in statement.figures)
    return f"its time: {', '.join(parts)}"


def _last(statement: Statement) -> str:
    text = "offered {seconds} after the round began"
    after = f"was last: it {text}, {{lag}} after {{former}}" if len(statement.replicas) > 1 else text
    return f"{{replica}} {after}{_USUAL}"


def _assigned(statement: Statement) -> str:
    ends = (end for end in ("upstream", "downstream") if end in statement.figures)
    width = int(statement.figures["width"])
    links = ", ".join(f"{width_text([int(statement.figures[end])], width)} {end}" for end in ends)
    place = "plan {epoch}, from round {number} on, has it in {replica}"
    return f"{place}; its links: {links}" if links else place


def _behind(statement: Statement) -> str:
    have = ", ".join(
        f"of stage {stage} {f'that after round {number}' if number >= 0 else 'none'}"
        for stage, number in zip(statement.stages, statement.rounds, strict=True)
    )
    has = have or "an anchor that differs from that of the others"
    attest = "it has to attest the anchors after round {least}"
    return f"it must catch up first: {attest}, and has attested {has}"


_TEMPLATES: Mapping[Code, str | Callable[[Statement], str]] = {
    Code.EVENT: _event,
    Code.CAUSE: "{cause}",
    Code.REMEDY: lambda statement: _REMEDIES[statement.detail],
    Code.MORE: "{count} more would follow",
    Code.RUN: "{detail}",
    Code.GROUP_CLOSED: "the group of {stages} was closed {ago} ago",
    Code.OFFERED: "the first payload of this round was offered {ago} ago[; it waits at most {remaining} "
    "more]",
    Code.LATE: "{replica} has trained for {seconds}[ and usually needs {usual}][; it is in step {step} of "
    "{steps}]",
    Code.SILENT: "no sign of life for some time ({seconds}) from {peers}; after {lost_after} a peer counts "
    "as lost",
    Code.ABORTS: _aborts,
    Code.IDLE: _idle,
    Code.UNMEASURED: "no speed is measured yet, so nothing can be predicted",
    Code.PREDICTION: _prediction,
    Code.FASTER: lambda statement: _FASTER[statement.detail],
    Code.ROUND: _round,
    Code.ROLLBACK: "round {number} is a rollback to round {second}",
    Code.COMMITTED: "it was committed at {places}: {detail}",
    Code.ABORTED: "it was ABORTED at {places}, so nothing counts there: {detail}",
    Code.SKIPPED: "it skipped {places}, without a turn: what was trained there counts in a later round",
    Code.MORE_TIME: lambda statement: (
        f"{{extra}} more than usual went into {_PHASES[statement.detail]}: {{seconds}} instead of {{usual}}"
    ),
    Code.TIMES: _times,
    Code.RESTARTED: "the coordinator started again, or its machine had stood still: nothing is in the log "
    "for {seconds} before that, and deadlines count from there",
    Code.STOOD_STILL: "{detail}; it stood still for {seconds}",
    Code.NO_OFFER: lambda statement: (
        "{replica} ({peers}) offered nothing"
        + (": {detail}" if statement.detail else " before the round closed" + _USUAL)
    ),
    Code.WITHHELD: lambda statement: (
        "{replica} ({peers}) had trained too little of its inner phase to offer a payload"
        if statement.figures["known"]
        else "{replica} ({peers}) offered no payload, and has not told yet what it has trained"
    ),
    Code.BROKEN: "{replica} broke in this round: {done} of {steps} steps count, by {peers}, and nothing for "
    "{stages}",
    Code.NONFINITE: "in {replica}, values of {peer} were not finite from step {step} of round {number} on; "
    "steps of this inner phase that count: {done}",
    Code.LAST: _last,
    Code.FIRST_ROUND: "it was its first round with these members, so they started processes or opened links",
    Code.COMPUTED: "of the {inner} of its inner phase, {peers} computed for {compute}",
    Code.ALWAYS_SLOW: "it is always slower than the others, which took {seconds}",
    Code.NO_REPORT: "at {stages} the report of {peers} never came; the decision came {seconds} after the "
    "group was closed",
    Code.LAST_REPORT: "at {stages}, {peers} was the last to report the payloads, {lag} after the one before"
    "[; its line has {uplink} up and {downlink} down]",
    Code.NOT_COUNTED: "the payload of {replica} ({peers}) for {stages} did not count: {detail}",
    Code.PEER: lambda statement: f"peer {{id}} {_ACTIVITIES[statement.detail]}",
    Code.ENROLLED: "peer {id} was let into the run and has not joined it",
    Code.ASSIGNED: _assigned,
    Code.NO_VACANCY: "it cannot have {detail}",
    Code.RESERVED_SOON: "an assignment will be reserved for it at the end of this round",
    Code.BEHIND: _behind,
    Code.FLOPS: "{peers} computes at {own}; the median of the others of its role is {usual}",
    Code.UPLINK: "the line of {peers} has {own} up; the median of the others of its role is {usual}",
    Code.PACE: "{replica} needs {own} from the beginning of a round to its payload; the median of the others "
    "is {usual}",
    Code.COUNTED: "its last payload that counts is in the decision of round {number}",
}
