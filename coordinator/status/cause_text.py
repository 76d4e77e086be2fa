"""The sentences of causes (protocol.status.Cause), for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.base.phrases import counted, lacking_text, listed, member_text, short, stages_text
from protocol.status import STALLS, Cause, CauseCode, RunStatus
from protocol.types import Pause, PausedBy, PeerId


def cause_text(cause: Cause) -> str:
    """The sentence of one cause, without a full stop; "" where the code of a run says it all."""
    return _TEXTS[cause.code](cause)


def pause_text(pause: Pause) -> str:
    """By whom a run is paused, and why: such as " by an alarm: the loss has risen"."""
    who = {PausedBy.OPERATOR: "its operator", PausedBy.ALARM: "an alarm"}[pause.by]
    return f" by {who}{': ' if pause.reason else ''}{pause.reason}"


def _no_exchange(hosts: Sequence[PeerId]) -> str:
    return f"{_pair(hosts)} only dial, so their replicas cannot exchange payloads: {_REACHED}"


def _pair(peers: Sequence[PeerId]) -> str:
    return " and ".join(short(each) for each in peers[:2])


_REACHED = (
    "one of these peers must be reached by others (the log of its node says how), or the run needs a relay"
)
_MOST_OBSTACLES = 2
"""Causes that one sentence about a replica names."""


def _nested(cause: Cause) -> str:
    return " and ".join(cause_text(each) for each in cause.causes[:_MOST_OBSTACLES])


def _awaited(cause: Cause) -> str:
    return f"waits for {member_text(cause)}"


def _replicas(cause: Cause) -> str:
    return listed([f"replica-{index}" for index in cause.replicas])


def _digests(cause: Cause) -> str:
    names = [f"of {peer}" for peer in cause.peers]
    return listed(names or [f"of any peer at stage {stage}" for stage in cause.stages])


_TEXTS: dict[CauseCode, Callable[[Cause], str]] = {
    CauseCode.PEERS_LACKING: lambda it: f"waiting for {lacking_text(it.causes)}",
    CauseCode.SPEED_UNKNOWN: lambda it: (
        f"waiting for the measured speed of {listed([*map(short, it.peers)])}"
    ),
    CauseCode.ENDPOINT_LACKING: lambda it: (
        f"waiting for 1 more stage peer with an endpoint: {_pair(it.peers)} have none, so cannot be "
        f"neighbours; {_REACHED}"
    ),
    CauseCode.HOST_LACKING: lambda it: f"waiting for 1 more peer that others reach: {_no_exchange(it.peers)}",
    CauseCode.MEMORY_LACKING: lambda it: f"waiting for more memory: {it.detail}",
    CauseCode.STARTING: lambda it: "about to start",
    CauseCode.TRAINING: lambda it: "",
    CauseCode.OFFERS_LACKING: lambda it: f"waiting for {_replicas(it)} at {stages_text(it.stages)}",
    CauseCode.PAYLOADS_CONTESTED: lambda it: (
        f"fetching {counted(it.count, 'payload')} that too few peers report as held "
        f"at {stages_text(it.stages)}"
    ),
    CauseCode.REPORTS_LACKING: lambda it: (
        f"waiting for the reports of {_replicas(it)} at {stages_text(it.stages)}"
    ),
    CauseCode.DIGESTS_LACKING: lambda it: f"waiting for the last digests {_digests(it)}",
    CauseCode.NO_EXCHANGE: lambda it: f"but nothing can be committed: {_no_exchange(it.peers)}",
    CauseCode.NO_REPLICA: lambda it: (
        f"no complete replica {'is left: ' if it.causes else 'whose payloads count is left'}"
        f"{listed([cause_text(each) for each in it.causes])}"
    ),
    CauseCode.PAUSED: lambda it: "",
    CauseCode.DISK_FULL: lambda it: f"waiting for space on the coordinator's disk: {it.detail.rstrip('.')}",
    CauseCode.FINISHED: lambda it: "",
    CauseCode.OBSTRUCTED: lambda it: (
        f"replica-{it.replicas[0]} {_nested(it)}"
        + (f"; {it.count} of {counted(it.total, 'step')} of this round count" if it.count else "")
    ),
    CauseCode.VACANT: lambda it: f"has no peer for {stages_text(it.stages)}",
    CauseCode.MEMBER_GONE: _awaited,
    CauseCode.MEMBER_DRAINS: _awaited,
    CauseCode.MEMBER_RESTS: _awaited,
    CauseCode.MEMBER_SYNCS: _awaited,
    CauseCode.LINK_CLOSED: lambda it: (
        f"cannot open the link from {short(it.peers[0])} to {short(it.peers[1])} "
        f"at {it.address} ({it.detail})"
    ),
    CauseCode.REPLICA_RESTS: lambda it: (
        f"rests until round {it.round_number}, because its members could not go on"
    ),
    CauseCode.FRAME_REFUSED: lambda it: (
        f"is apart: {short(it.peers[0])} refuses a frame of {short(it.peers[1])} ({it.detail})"
    ),
    CauseCode.NO_PAYLOAD: lambda it: (
        f"{'' if it.peers else f'{_replicas(it)} '}has sent no payload since round {it.round_number}"
        f"{f', so {_pair(it.peers)} are apart' if it.peers else ''}"
    ),
    CauseCode.SPARE: lambda it: (
        "waiting as a spare: for each vacancy it lacks the memory, "
        "or neither it nor a neighbour has an endpoint"
    ),
    CauseCode.FOLLOWS: lambda it: f"following the rounds of {stages_text(it.stages)}: {_nested(it)}",
    CauseCode.SPARES_KEPT: lambda it: (
        f"the run keeps {counted(it.count, 'stage peer')} as spares before another pipeline trains"
    ),
    CauseCode.NEXT_PLAN: lambda it: "the next plan includes it",
    CauseCode.COORDINATOR_BEHIND: lambda it: (
        f"waiting for a coordinator that knows round {it.round_number}: "
        "the folder of this one is an older copy, restore the newest, or see 'hetnode rollback'"
    ),
    CauseCode.DISCOUNTED: lambda _: (
        "its payloads count for nothing until they have agreed with the others, and copied none, for a while"
    ),
    CauseCode.ALARM: lambda it: alarm_text(it.detail, it.count),
}


def run_text(cause: Cause, pause: Pause | None = None, committed: int = 0, aborted: int = 0) -> str:
    """What a run does or waits for, such as "training: round 7 of 30, waiting for replica-1 at stage 0"."""
    paused = pause_text(pause) if pause else ""
    of = f"{cause.round_number} of {cause.total}"
    match cause.code:
        case CauseCode.FINISHED:
            return f"finished: {cause.total} rounds, {committed} commits, {aborted} aborts"
        case CauseCode.PAUSED:
            return f"PAUSED before round {of}{paused}"
        case CauseCode.NO_REPLICA:
            what = f"waiting in round {of}: {cause_text(cause)}"
        case CauseCode.DIGESTS_LACKING:
            what = f"all {cause.total} rounds are decided, {cause_text(cause)}"
        case _ if cause.code in STALLS:
            what = cause_text(cause)
        case _:
            what = f"training: round {of}{', ' if cause_text(cause) else ''}{cause_text(cause)}"
    return f"{what}; then PAUSED{paused}" if pause else what


def alarm_text(reason: str, last_healthy: int) -> str:
    """What an alarm has seen, and what the operator may do."""
    if not last_healthy:
        return reason
    # Anchors are kept of some rounds only.
    offer = "'hetnode rollback' lists the rounds to which the run can go back."
    return f"{reason} The last healthy round was {last_healthy}. {offer}"


def status_text(status: RunStatus) -> str:
    """What the run of `status` does or waits for."""
    committed, aborted = status.stage_rounds_committed, status.stage_rounds_aborted
    return run_text(status.cause, status.pause, committed, aborted)
