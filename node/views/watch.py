"""What ``hetnode watch`` shows: the run, the swarm as chains, and this machine's own node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.status.cause_text import cause_text, status_text
from coordinator.status.facts import facts_of
from node.home.guest.control import GuestState
from node.home.guest.sensors import Gpu
from node.monitoring.report import NodeReport, Rates
from node.views.run_history import size
from node.views.status import STATE_STYLES, peer_notes, replica_notes, rounds_line
from node.views.text import as_text, bar, count, duration, megabits, plain, short_id
from protocol.group.batch import work_of
from protocol.run_files.link_text import k_text
from protocol.status import PeerStatus, RunPhase, RunStatus
from protocol.types import Lifecycle, Plan, Replica

Losses = Mapping[int, Sequence[tuple[int, float]]]
"""By replica: pairs of round and validation loss, the oldest first."""

_BARS = "▁▂▃▄▅▆▇█"
_DIM = "bright_black"
_MOST_OF_LINE = 1000


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as one line of at most `width` characters, each the mean of its part; "" without a number."""
    finite = [value for value in values if isfinite(value)]
    if not finite or width < 1:
        return ""
    parts = min(width, len(finite))
    edges = [len(finite) * i // parts for i in range(parts + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    least, most = min(means), max(means)
    scale = (len(_BARS) - 1) / (most - least) if most > least else 0.0
    return "".join(_BARS[round((mean - least) * scale)] for mean in means)


def run_view(status: RunStatus, losses: Losses, width: int) -> RenderableType:
    """The run: what it waits for, its progress, its figures and its losses."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style=_DIM)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    room = max(10, min(40, width - 45))
    total, decided = status.spec.rounds, status.rounds_decided
    end = status.remaining_seconds
    when = "finished" if status.phase is RunPhase.FINISHED else f"end in {duration(end)}"
    if end is None:
        when = "end unknown"
    table.add_row("run", bar(decided / total, room), f"{decided} of {total} rounds, {when}")
    if status.phase is RunPhase.TRAINING and status.round_number <= total:
        table.add_row("round", *_round_progress(status, room))
        table.add_row("steps", *_step_progress(status, room))
    return Group(
        as_text(status_text(status), "bold"),
        "",
        table,
        "",
        Text(rounds_line(status), "" if status.anchors_agree else "bold red"),
        "",
        _loss_table(status, losses, width),
        "",
        _facts(status),
        *_samples(status),
    )


def _samples(status: RunStatus) -> Iterator[RenderableType]:
    """What the model made of prompts, as was told last."""
    newest = next((each for each in status.evaluations if each.samples), None)
    if newest is None:
        return
    for each in newest.samples:
        yield ""
        text = "\n".join(plain(line, _MOST_OF_LINE) for line in (each.prompt + each.text).split("\n"))
        yield Text.assemble((f"after round {newest.round_number}  ", _DIM), text)


def _facts(status: RunStatus) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style=_DIM, no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts_of(status).items():
        table.add_row(label, as_text(text))
    return table


def _round_progress(status: RunStatus, width: int) -> tuple[Text, str]:
    expected, spent = status.expected_round_seconds, status.round_seconds
    if not expected:
        return bar(0, width), f"round {status.round_number}: {duration(spent)} so far"
    left = expected - spent
    rest = f"ends in about {duration(left)}" if left > 0 else f"{duration(-left)} longer than expected"
    return bar(spent / expected, width), f"round {status.round_number}: {duration(spent)}, {rest}"


def _step_progress(status: RunStatus, width: int) -> tuple[Text, str]:
    """Of the members of the plan, by their heartbeats: the slowest one, and how many are done."""
    steps, open_round = status.spec.inner.steps, status.round_number
    members = {member.peer for replica in _replicas(status.plan) for member in replica.members}
    done = [_steps_of(peer, open_round, steps) for peer in status.peers if peer.peer in members]
    if not done:
        return bar(0, width), "nobody trains"
    ready = sum(each == steps for each in done)
    return bar(
        sum(done) / len(done) / steps, width
    ), f"{ready} of {len(done)} members done, slowest {min(done)}/{steps}"


def _steps_of(peer: PeerStatus, open_round: int, steps: int) -> int:
    """Inner steps of the open round that the peer has done."""
    if peer.round_number == open_round:
        return min(peer.inner_step, steps)
    return steps if peer.round_number > open_round else 0


def _replicas(plan: Plan | None) -> Sequence[Replica]:
    return plan.replicas if plan else ()


def _loss_table(status: RunStatus, losses: Losses, width: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold underline")
    for name in ("replica", "loss", "best", "tokens/s"):
        table.add_column(name, justify="right" if name != "replica" else "left", no_wrap=True)
    table.add_column("validation loss by round", no_wrap=True)
    measured = status.figures
    for index in sorted(measured.keys() | losses.keys()):
        values = [loss for _, loss in losses.get(index, ()) if isfinite(loss)]
        newest = measured.get(index)
        last = newest.validation_loss if newest else (values[-1] if values else float("nan"))
        table.add_row(
            str(index),
            f"{last:.4f}",
            f"{min(values):.4f}" if values else "",
            count(newest.tokens_per_second) if newest else "",
            Text(sparkline(values, max(10, min(100, width - 34))), "cyan"),
        )
    return table if table.row_count else Text("No replica has measured a loss yet.", _DIM)


def swarm_view(status: RunStatus, own: str = "") -> RenderableType:
    """The replicas as chains, and the peers without a place. `own` is the id of this machine's peer."""
    peers = {str(peer.peer): peer for peer in status.peers}
    lines: list[RenderableType] = []
    if status.plan is None:
        lines.append(as_text(status_text(status)))
    shown = set[str]()
    for replica in _replicas(status.plan):
        lines.append(_replica_line(status, replica))
        for position, member in enumerate(replica.members):
            shown.add(member.peer)
            link = replica.links[position - 1].k if position else None
            stages = f"{'stage' if len(member.stages) == 1 else 'stages'} {member.stages}"
            lines.append(_member_line(status, peers.get(member.peer), member.peer, stages, link, own))
    others = [peer for peer in status.peers if peer.peer not in shown]
    if others:
        lines.append(Text("not in the plan", "bold"))
        for peer in sorted(others, key=lambda each: each.lifecycle is Lifecycle.GONE):
            lines.append(_member_line(status, peer, peer.peer, "", None, own))
    notes = [*replica_notes(status.replicas), *peer_notes(status.peers)]
    return Group(*lines, *(["", *notes] if notes else ()))


def _replica_line(status: RunStatus, replica: Replica) -> Text:
    line = Text(replica.name, "bold").append(" full" if len(replica.members) == 1 else " pipeline", _DIM)
    if (newest := status.figures.get(replica.index)) is not None:
        line.append(f"  round {newest.round_number}, loss {newest.validation_loss:.4f}")
        line.append(f", {count(newest.tokens_per_second)} tokens/s")
        if newest.link_bytes_sent:
            line.append(f", {size(newest.link_bytes_sent)} over links")
    return line


def _member_line(
    status: RunStatus, peer: PeerStatus | None, peer_id: str, stages: str, k: int | None, own: str
) -> Text:
    """One member of a chain; `k` of the link from the member above it, None without one."""
    arrow = "  " if k is None else "└▶"
    line = Text(f" {arrow} ").append(short_id(peer_id), "bold reverse" if own and peer_id == own else "bold")
    if stages:
        line.append(f" {stages}")
    if k is not None:
        line.append(f" k {k}" if k else f" {k_text(k)}", _DIM)
    if peer is None:
        return line.append(" unknown", "red")
    state = "paused" if peer.rests else peer.lifecycle.value
    line.append(f" {peer.role.value} " if not stages else " ").append(
        state, STATE_STYLES.get(peer.lifecycle, "")
    )
    if peer.lifecycle is not Lifecycle.GONE:
        line.append(f" {peer.round_number}:{peer.inner_step}/{status.spec.inner.steps}")
        if (busy := _busy(status, peer_id)) is not None:
            line.append(f" busy {busy:.0%}", _DIM)
        if peer.waits:
            line.append(f" waits for {', '.join(peer.waits)}", "yellow")
    if peer.seconds_since_seen > 3 * status.heartbeat:
        line.append(f" seen {duration(peer.seconds_since_seen)} ago", "red")
    return line


def _busy(status: RunStatus, peer: str) -> float | None:
    """The share of its newest inner phase in which the peer computed."""
    newest = max(
        (each for each in status.measurements if each.peer == peer and each.inner_seconds > 0),
        key=lambda each: each.round_number,
        default=None,
    )
    return newest.compute_seconds / newest.inner_seconds if newest else None


def node_view(
    state: GuestState,
    report: NodeReport,
    rates: Rates,
    gpus: Sequence[Gpu],
    status: RunStatus | None,
    width: int,
) -> RenderableType:
    """This machine's node."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style=_DIM, no_wrap=True)
    table.add_column(overflow="fold")
    for name, what in _node_rows(state, report, rates, status, max(10, min(30, width - 50))):
        table.add_row(name, Text(what) if isinstance(what, str) else what)  # rich would look for markup
    for gpu in gpus:
        table.add_row(f"GPU {gpu.index}", _gpu_text(gpu))
    return table


def _node_rows(
    state: GuestState, report: NodeReport, rates: Rates, status: RunStatus | None, width: int
) -> Iterator[tuple[str, RenderableType]]:
    yield "state", _activity(state, report)
    if state.silent_seconds >= 1:
        yield "", Text(f"the coordinator has not answered it for {duration(state.silent_seconds)}", "red")
    yield (
        "waits for",
        Text(", ".join(map(plain, report.waits)) or "nothing", "yellow" if report.waits else ""),
    )
    if report.round_number:
        total = f" of {report.rounds_total}" if report.rounds_total else ""
        steps = report.steps_per_round
        yield (
            "round",
            Text.assemble(
                bar(report.inner_step / steps if steps else 0, width),
                f" {report.round_number}{total}, step {report.inner_step}" + (f"/{steps}" if steps else ""),
            ),
        )
    yield "share", _share(status, report)
    speed = f"{rates.steps:.2g} steps/s"
    if report.tokens_per_step:
        speed += f", its replica {count(rates.steps * report.tokens_per_step)} tokens/s"
    if report.busy is not None:
        speed += f"; computes {report.busy:.0%} of the time"
    yield "speed", speed
    if report.validation_loss is not None:
        yield "loss", f"{report.validation_loss:.4f} after its last round"
    yield "up", _rate(rates.sent, report.upload_limit, report.sent_bytes, width)
    yield "down", _rate(rates.received, report.download_limit, report.received_bytes, width)
    yield (
        "payloads",
        f"{size(report.payload_bytes)} made in {report.rounds} rounds, {report.inner_steps} steps",
    )
    memory = f", {size(report.memory_bytes)} of its memory" if report.memory_bytes else ""
    yield "device", f"{plain(report.device, 60)}{memory}"
    yield "peer", as_text(report.peer)


def _activity(state: GuestState, report: NodeReport) -> Text:
    if state.reason and not state.is_here:
        return as_text(f"rests: {state.reason}", "yellow")
    if state.reason:
        return as_text(f"leaves for now: {state.reason}", "yellow")
    if report.activity:
        return as_text(report.activity, "green" if report.activity == "training" else "yellow")
    return Text("takes part" if state.has_joined else "starts, or waits for its coordinator")


def _share(status: RunStatus | None, report: NodeReport) -> Text:
    """What part of the run this node carries, by the newest plan."""
    replicas = _replicas(status.plan if status else None)
    for replica in replicas:
        member = next((each for each in replica.members if each.peer == report.peer), None)
        if member is None or status is None:
            continue
        weight = replica.weight / (sum(each.weight for each in replicas) or 1.0)
        work = work_of(status.spec, replica) / sum(work_of(status.spec, each) for each in replicas)
        stages = len(member.stages) / status.spec.swarm.stages
        what = (
            "the whole model" if stages == 1 else f"{len(member.stages)} of {status.spec.swarm.stages} stages"
        )
        has = f"{what} of {replica.name} (weight {weight:.0%})"
        return Text(f"{work * stages:.0%} of the work: {has}")
    own = next((peer for peer in status.peers if peer.peer == report.peer), None) if status else None
    return as_text(cause_text(own.cause) if own and own.cause else "no place in the plan")


def _rate(rate: float, limit: float, total: int, width: int) -> Text:
    line = bar(rate / limit, width).append(" ") if limit else Text()
    line.append(megabits(rate)).append(f" of {megabits(limit)}" if limit else ", no limit")
    return line.append(f"; {size(total)} over links and in probes", _DIM)


def _gpu_text(gpu: Gpu) -> Text:
    parts = [plain(gpu.name, 40)]
    if gpu.temperature is not None:
        parts.append(f"{gpu.temperature:.0f} °C")
    if gpu.power is not None:
        limit = f" of {gpu.power_limit:.0f}" if gpu.power_limit else ""
        parts.append(f"{gpu.power:.0f}{limit} W")
    if gpu.load is not None:
        parts.append(f"load {gpu.load:.0%}")
    if gpu.memory is not None and gpu.memory_total:
        parts.append(f"memory {size(gpu.memory)} of {size(gpu.memory_total)}")
    return Text(", ".join(parts))
