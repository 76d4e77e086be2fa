"""Terminal views: a spec, a coordinator's status, and a local swarm from start to summary."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from node import checkpoint, lifetime, report
from node.model.init import parameter_count, parameter_shapes
from node.sim import run_swarm
from protocol.pb import hetnode_pb2 as pb
from protocol.spec import RunSpec
from protocol.tensorpack import PayloadLayout

_WIRE_BYTES = {"bf16": 2, "fp32": 4, "int8": 1}


def to_toml(spec: RunSpec) -> str:
    """The spec as a run file. `resolve(file=...)` gives the same spec, and hash, again."""
    tree = spec.model_dump(mode="json")
    # JSON's scalars are TOML's as well, and a spec holds nothing but scalars in sections.
    lines = [f"{key} = {json.dumps(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, fields in tree.items():
        if isinstance(fields, dict):
            lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
    return "\n".join(lines) + "\n"


def link_bytes_per_token(spec: RunSpec) -> int:
    """Bytes that one token takes on a link in one direction, without its id and the framing."""
    width = spec.link.k or spec.model.width
    return width * _WIRE_BYTES[spec.link.dtype] + (4 if spec.link.dtype == "int8" else 0)


def spec_view(spec: RunSpec) -> RenderableType:
    """Parameters, and bytes per stage, link and round."""
    stages = Table("stage", "layers", "parameters", "float32", "payload per round", "against float32")
    total = 0
    for stage in range(spec.swarm.stages):
        parameters = parameter_count(spec, stage)
        payload = PayloadLayout(parameter_shapes(spec, stage), spec.outer).nbytes
        layers = spec.layers_of(stage)
        total += parameters
        stages.add_row(
            str(stage),
            f"{layers.start}-{layers.stop - 1}",
            f"{parameters:,}",
            report.size(4 * parameters),
            report.size(payload),
            report.ratio(4 * parameters, payload),
        )
    tokens = spec.samples_per_step * spec.model.context
    per_token = link_bytes_per_token(spec)
    link = Table("link", "per token and direction", "per inner step and direction", "against float32")
    link.add_row(
        f"k {spec.link.k or 'none'} of d {spec.model.width}, {spec.link.dtype}",
        f"{per_token} B",
        report.size(per_token * tokens),
        report.ratio(4 * spec.model.width, per_token),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", spec.run_id)
    facts.add_row("spec hash", spec.hash)
    facts.add_row("parameters", f"{total:,}")
    facts.add_row(
        "shape", f"{spec.swarm.replicas} full + {spec.swarm.pipelines} pipelines of {spec.swarm.stages}"
    )
    facts.add_row(
        "tokens", f"{tokens:,} per replica and inner step, H {spec.inner.steps}, {spec.rounds} rounds"
    )
    facts.add_row("data", f"{spec.data.source}, tokenizer {spec.data.tokenizer}")
    return Group(Panel(facts, title=f"preset {spec.preset}"), stages, link)


def status_view(status: pb.StatusReply) -> RenderableType:
    """What the run does, its replicas and its peers."""
    spec = RunSpec.from_json(status.spec_json)
    peers = Table("peer", "role", "state", "place", "round", "step", "seen", title=f"run {status.run}")
    for peer in status.peers:
        peers.add_row(
            peer.peer[-12:],
            peer.role,
            peer.lifecycle,
            peer.place,
            str(peer.round),
            f"{peer.inner_step}/{spec.inner.steps}",
            f"{peer.seen_seconds_ago:.0f} s ago",
        )
    rounds = (
        f"{status.rounds_committed} stage rounds committed, {status.rounds_aborted} aborted, anchors "
        f"{'agree' if status.anchors_agree else 'DIFFER'}"
    )
    return Group(peers, _replica_table(status), status.sentence, rounds)


def _replica_table(status: pb.StatusReply) -> Table:
    """One row per replica, from the newest measurements of its members."""
    table = Table("replica", "round", "validation loss", "tokens/s", "link per round", "payload per round")
    by_replica: dict[int, list[pb.Measurement]] = {}
    for measurement in status.latest:
        by_replica.setdefault(measurement.replica, []).append(measurement)
    for index, members in sorted(by_replica.items()):
        last = next((m for m in members if m.complete), None)
        if last is None:
            continue
        seconds = last.inner_seconds + last.outer_seconds
        link, link_dense, payload, payload_dense = (
            sum(getattr(member, field) for member in members)
            for field in ("link_bytes_sent", "link_bytes_dense", "payload_bytes", "payload_bytes_dense")
        )
        table.add_row(
            f"{index} ({'full' if len(members) == 1 else f'{len(members)} members'})",
            str(last.round),
            f"{last.validation_loss:.4f}",
            f"{last.tokens / seconds:,.0f}" if seconds else "",
            f"{report.size(link)}  {report.ratio(link_dense, link)}" if link else "no link",
            f"{report.size(payload)}  {report.ratio(payload_dense, payload)}" if payload else "",
        )
    return table


class SwarmView:
    """Runs a local swarm with live progress, and leaves the run folder complete.

    The folder then holds run.toml, metrics.jsonl, loss.png, checkpoint/, logs/ and nodes/.
    """

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._console = Console(highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("inner steps", total=spec.total_steps)
        self._shown_round = -1

    def run(self, listen: str) -> None:
        """Train to the end. Raises what :func:`node.sim.run_swarm` raises, with the plot written."""
        spec_file = self._folder / "run.toml"
        spec_file.write_text(to_toml(self._spec))
        self._console.print(spec_view(self._spec))
        self._console.print(f"run folder {self._folder}", markup=False)
        began = time.monotonic()
        try:
            with Live(self._progress, console=self._console, refresh_per_second=4) as live:
                swarm = run_swarm(
                    self._spec, spec_file, self._folder, listen, lambda status: self._update(live, status)
                )
                lifetime.run(swarm)
                self._progress.update(self._task, completed=self._spec.total_steps)
        finally:
            history = report.history_of(report.read_events(self._folder / "metrics.jsonl"))
            if history.replicas:
                report.plot_losses(history, f"run {self._spec.run_id}", self._folder / "loss.png")
        parts = sorted(self._folder.glob("nodes/*/checkpoint/round-*"))
        checkpoint.assemble(parts, self._folder / "checkpoint")
        self._summarise(history, time.monotonic() - began)

    def _update(self, live: Live, status: pb.StatusReply) -> None:
        steps = [
            (peer.round - 1) * self._spec.inner.steps + peer.inner_step for peer in status.peers if peer.round
        ]
        self._progress.update(self._task, completed=min(steps, default=0))
        live.update(Group(_replica_table(status), status.sentence, self._progress))
        if not self._console.is_terminal:
            self._print_round(status)

    def _print_round(self, status: pb.StatusReply) -> None:
        """Where the output is no terminal, one line per round takes the place of the live view."""
        complete = sorted((m for m in status.latest if m.complete), key=lambda m: m.replica)
        replicas = {member.replica for member in status.latest}
        if not complete or len(complete) < len(replicas):
            return
        oldest = min(measurement.round for measurement in complete)
        if oldest > self._shown_round:
            self._shown_round = oldest
            losses = ", ".join(f"replica {m.replica} {m.validation_loss:.4f}" for m in complete)
            self._console.print(f"round {oldest} of {self._spec.rounds}: validation loss {losses}")

    def _summarise(self, history: report.History, seconds: float) -> None:
        table = Table("replica", "validation loss before", "after")
        for replica in history.replicas:
            table.add_row(str(replica.index), f"{replica.first:.4f}", f"{replica.last:.4f}")
        traffic = history.traffic
        facts = Table.grid(padding=(0, 2))
        facts.add_row("time", f"{seconds:.0f} s, {history.tokens / seconds:,.0f} tokens/s")
        facts.add_row(
            "stage rounds",
            f"{history.committed} committed, {history.aborted} aborted, {history.diverged} diverged",
        )
        for name, sent, dense in (
            ("links", traffic.link, traffic.link_dense),
            ("rounds", traffic.payload, traffic.payload_dense),
        ):
            if sent:
                facts.add_row(name, f"{report.size(sent)} sent, {report.ratio(dense, sent)} than float32")
        facts.add_row("run folder", str(self._folder))
        facts.add_row("try it", f"hetnode generate {self._folder} --prompt 'def '")
        self._console.print(Panel(Group(table, facts), title=f"run {self._spec.run_id} is finished"))
