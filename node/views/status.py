"""The status of a run as tables, as wide as the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import isfinite

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from coordinator.base.phrases import change_text
from coordinator.status.cause_text import cause_text, status_text
from node.views.run_history import ratio, size
from node.views.text import as_text, bar, count, duration, plain, short_id
from protocol.group.batch import batch_of
from protocol.run_files.link_text import k_text
from protocol.spec.link import width_order
from protocol.spec.run import RunSpec
from protocol.status import (
    Cause,
    CauseCode,
    PeerStatus,
    ReplicaStatus,
    RunPhase,
    RunStatus,
    StageHealth,
    TrainingHealth,
    Waiting,
)
from protocol.types import Estimates, Lifecycle, Replica

_WIDE = 110
"""Columns from which measured speeds and connections have their own columns."""
_MOST_NOTES, _MOST_STAGES, _MOST_FINDINGS = 12, 8, 6
"""Sentences about peers, stages and findings. More would push the run off the screen."""
_ALARM_CHARACTERS = 1000

STATE_STYLES = {
    Lifecycle.TRAINING: "green",
    Lifecycle.READY: "cyan",
    Lifecycle.SYNCING: "yellow",
    Lifecycle.DRAINING: "yellow",
    Lifecycle.GONE: "bright_black",
}


def as_of_note(status: RunStatus, now: float, why: str = "The coordinator is not running.") -> Text:
    """What to say above a status that was read from a folder, and `why` it was. `now` is Unix time."""
    if not status.time:
        return Text(f"{why} Nothing has happened in this run yet.", "bold yellow")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.time))
    ago = duration(max(0.0, now - status.time))
    return Text(f"{why} This is as of {when}, {ago} ago.", "bold yellow")


def status_view(status: RunStatus, live: bool = True, notes: Sequence[RenderableType] = ()) -> RenderableType:
    """The run, its replicas and its peers. `notes` stand above all. `live`: as for :class:`PeerTable`."""
    return Group(
        *notes,
        as_text(f"run {status.run}", "bold"),
        as_text(status_text(status)),
        *alarm_line(status),
        progress_line(status),
        Text(rounds_line(status), "" if status.anchors_agree else "bold red"),
        *(as_text(f"changed: {change_text(each)}") for each in status.changes[-_MOST_NOTES:]),
        "",
        replica_table(status),
        *(["", *found] if (found := list(health_view(status.health))) else ()),
        "",
        PeerTable(status, live),
        *(["", *found] if (found := [*replica_notes(status.replicas), *peer_notes(status.peers)]) else ()),
        *waiting_lines(status.waiting),
    )


def progress_line(status: RunStatus, width: int = 12) -> Text:
    """Rounds, the time of the open round, and the time to the end of the run."""
    total, decided = status.spec.rounds, status.rounds_decided
    line = Text(f"{decided}/{total} rounds ").append_text(bar(decided / total, width))
    parts = []
    if status.phase is RunPhase.TRAINING and status.round_number <= total:
        expected = status.expected_round_seconds
        of = "" if expected is None else f" of about {duration(expected)}"
        parts.append(f"this round {duration(status.round_seconds)}{of}")
    if status.phase is not RunPhase.FINISHED:
        end = status.remaining_seconds
        parts.append("end unknown" if end is None else f"end in {duration(end)}")
    return line.append(f" {', '.join(parts)}")


def rounds_line(status: RunStatus) -> str:
    """How the rounds went, the tokens of those that are committed, and the speed."""
    parts = [status.rounds_message]
    if status.tokens_committed:
        parts.append(f"{count(status.tokens_committed)} tokens")
    if (speed := status.tokens_per_second) and isfinite(speed):
        parts.append(f"{count(speed)} tokens/s")
    if status.plan is not None:
        parts.append(batch_part(status.spec, status.plan.replicas))
    return ", ".join(parts)


def batch_part(spec: RunSpec, replicas: Sequence[Replica]) -> str:
    """The samples of all replicas in an inner step, against those that the run wants; "batch 48 of 64"."""
    wanted = f" of {spec.global_batch:,}" if spec.grouping.batch == "constant" else ""
    return f"batch {batch_of(spec, replicas):,}{wanted}"


def replica_notes(replicas: Sequence[ReplicaStatus]) -> Iterator[Text]:
    """A line for each replica that trains and delivers nothing."""
    notes = [each.cause for each in replicas if each.cause and each.cause.code is CauseCode.NO_PAYLOAD]
    yield from (as_text(cause_text(cause), "yellow") for cause in notes[:_MOST_NOTES])


def waiting_lines(waiting: Sequence[Waiting]) -> Iterator[Text]:
    """The peers without an invite that wait for their turn, the first at first."""
    for each in waiting[:_MOST_NOTES]:
        when = "" if each.seconds is None else f", about {duration(each.seconds)} at the present pace"
        yield Text.assemble(
            (short_id(each.peer), "bold"), f" place {each.place} of {len(waiting)} in the waiting list{when}"
        )


def peer_notes(peers: Sequence[PeerStatus]) -> Iterator[Text]:
    """A line for each thing to know about a peer; problems first."""
    notes = [(peer, peer.problem, "red") for peer in peers if peer.problem]
    notes += [(peer, *_cause_note(peer.cause)) for peer in peers if peer.cause]
    notes += [(peer, f"is called {peer.name}", "") for peer in peers if peer.name]
    notes += [(peer, f"{peer.role}, {peer.role_reason}", "") for peer in peers if peer.role_reason]
    for peer, sentence, style in notes[:_MOST_NOTES]:
        yield Text.assemble((short_id(peer.peer), "bold"), " ", (plain(sentence), style))
    if len(notes) > _MOST_NOTES:
        yield Text(f"and {len(notes) - _MOST_NOTES} more: 'hetnode status --json' has all", "bright_black")


def _cause_note(cause: Cause) -> tuple[str, str]:
    return cause_text(cause), "red" if cause.code is CauseCode.LINK_CLOSED else "yellow"


def alarm_line(status: RunStatus) -> Iterator[Text]:
    """What the alarm has seen, if there is one."""
    if status.alarm:
        yield as_text(f"ALARM: {cause_text(status.alarm)}", "bold red", _ALARM_CHARACTERS)


def health_view(health: TrainingHealth | None) -> Iterator[RenderableType]:
    """How far payloads agree, by stage, and what is unusual; nothing before a round was judged."""
    if health is None:
        return
    share = "" if health.error_share is None else f", error feedback {health.error_share:.0%}"
    usual = "" if health.findings else ": nothing unusual"
    yield as_text(f"training in round {health.round_number}{share}{usual}")
    for finding in health.findings[:_MOST_FINDINGS]:
        yield as_text(finding.sentence, "yellow")
    if hidden := len(health.findings) - _MOST_FINDINGS:
        yield from [Text(f"and {hidden} more", "yellow")] * (hidden > 0)
    if any(stage.payloads > 1 for stage in health.stages):
        yield _agreement_table(health.stages)


def _agreement_table(stages: Sequence[StageHealth]) -> Table:
    """The stages whose payloads agree least, in their order."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    table.add_column("stage")
    for name in ("payloads", "agree", "least", "full", "pipeline", "same kind", "other", "norm"):
        table.add_column(name, justify="right", no_wrap=True)
    by_cosine = sorted(stages, key=lambda each: 1.0 if each.least_cosine is None else each.least_cosine)
    for each in sorted(by_cosine[:_MOST_STAGES], key=lambda each: each.stage):
        cosines = (each.cosine, each.least_cosine, each.full_cosine, each.pipeline_cosine)
        pairs = (each.alike, each.unlike)
        table.add_row(
            str(each.stage), str(each.payloads), *map(_cosine, (*cosines, *pairs)), f"{each.norm:.3g}"
        )
    if len(stages) > _MOST_STAGES:
        table.caption = f"the {_MOST_STAGES} of {len(stages)} stages that agree least"
    return table


def _cosine(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


class PeerTable:
    """One row per peer; speeds and connections only where there is room for them.

    Args:
        live: heartbeats are known, as they are while the coordinator runs.
    """

    def __init__(self, status: RunStatus, live: bool = True) -> None:
        self._status, self._live = status, live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        table = _table(*(("peer", 8), ("role", 8), ("state", 8), ("place", 15)))
        table.add_column("round", justify="right", no_wrap=True)
        if self._live:
            table.add_column("step", justify="right", no_wrap=True)
            table.add_column("seen", justify="right", no_wrap=True)
        # It gets what the others leave, and they keep their widths.
        table.add_column(
            "waits for" if self._live else "", ratio=1, min_width=9, no_wrap=True, overflow="ellipsis"
        )
        table.expand = True
        if wide:
            table.add_column("computes", no_wrap=True)
            table.add_column("reached", no_wrap=True)
            table.add_column("connection", ratio=2)
        for peer in self._status.peers:
            table.add_row(*self._row(peer, wide))
        yield table

    def _row(self, peer: PeerStatus, wide: bool) -> Iterator[RenderableType]:
        yield Text(short_id(peer.peer))
        yield f"{peer.role.value}{'*' if peer.role_reason else ''}"
        state = "paused" if peer.rests else peer.lifecycle.value
        yield Text(state, STATE_STYLES.get(peer.lifecycle, ""))
        yield as_text(place_of(peer.assignment))
        yield str(peer.round_number)
        if self._live:
            yield f"{peer.inner_step}/{self._status.spec.inner.steps}"
            yield duration(peer.seconds_since_seen)
        yield Text(", ".join(peer.waits))
        if wide:
            yield _speed(peer.estimates)
            yield peer.reachability.value
            yield Text(_connection(peer.estimates))


def place_of(assignment: str) -> str:
    """The assignment in few characters: "replica-1, stages 0-3" as "r1 stages 0-3"."""
    return assignment.replace("replica-", "r", 1).replace(",", "", 1)


def replica_table(status: RunStatus) -> Table:
    """One row per replica, from the newest measurements of its members."""
    table = _table(("replica", 12))
    for name in ("round", "val. loss", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("links per round", no_wrap=True)
    table.add_column("payloads per round", no_wrap=True)
    table.add_column("k", no_wrap=True)
    links = {each.index: each.links for each in status.plan.replicas} if status.plan else {}
    for index, replica in status.figures.items():
        # Most pipelines have one k for all links, and some have hundreds of links.
        ks = sorted({link.k for link in links.get(index, ())}, key=width_order)
        members = "full" if replica.members == 1 else f"{replica.members} members"
        table.add_row(
            f"{index} ({members})",
            str(replica.round_number),
            f"{replica.validation_loss:.4f}",
            f"{replica.tokens_per_second:,.0f}" if replica.tokens_per_second else "",
            _traffic(replica.link_bytes_sent, replica.link_bytes_dense) or "no link",
            _traffic(replica.payload_bytes, replica.payload_bytes_dense),
            ", ".join(map(k_text, ks)),
        )
    return table


def _table(*columns: tuple[str, int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold underline")
    for name, width in columns:
        table.add_column(name, min_width=width, no_wrap=True, overflow="ellipsis")
    return table


def _traffic(sent: int, dense: int) -> str:
    return f"{size(sent)}  {ratio(dense, sent)}" if sent else ""


def _speed(estimates: Estimates) -> str:
    """The measured speed of the peer; "" before it has measured."""
    lines = []
    if estimates.capacity.flops:
        lines.append(f"{estimates.capacity.flops / 1e9:,.1f} GFLOP/s")
    if estimates.microbatch_seconds:
        lines.append(f"{estimates.microbatch_seconds * 1000:,.0f} ms/microbatch")
    return "\n".join(lines)


def _connection(estimates: Estimates) -> str:
    """The measured speed of the peer's connection and links; "" before it has measured."""
    lines = []
    capacity = estimates.capacity
    if capacity.uplink:
        up, down = capacity.uplink * 8e-6, capacity.downlink * 8e-6
        lines.append(f"{up:,.1f} Mb/s up, {down:,.1f} down, {capacity.round_trip * 1000:.0f} ms")
    for link in estimates.links:
        if rate := link.incoming or link.bandwidth:
            direction = "from" if link.incoming else "to"
            lines.append(f"{rate * 8e-6:,.1f} Mb/s {direction} {plain(link.peer[-6:])}")
    return "\n".join(lines)
