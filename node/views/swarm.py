"""The view of a local swarm, from its spec to its summary."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from rich.console import Group
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

from coordinator.api.dashboard import command_for, url_in
from coordinator.status.cause_text import status_text
from node import command_runner
from node.command_runner import TerminalConsole
from node.local_swarm import keep_model, run_swarm
from node.views import run_history
from node.views.spec import spec_view
from node.views.status import replica_table
from node.views.text import duration
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import to_toml
from protocol.spec.run import RunSpec
from protocol.status import RunStatus
from protocol.trust.private_file import write_whole


class SwarmView:
    """Runs a local swarm with live progress, and completes the run folder.

    The folder then holds run.toml, metrics.jsonl, checkpoint/, logs/, nodes/, and loss.png if matplotlib is
    installed.
    """

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self._console = TerminalConsole(highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("inner steps", total=spec.total_steps)
        self._shown_round, self._has_begun = -1, False

    def run(self, listen: str) -> None:
        """Train to the end. Raises as :func:`node.local_swarm.run_swarm`, after writing the plot."""
        spec_file = self.folder / "run.toml"
        write_whole(spec_file, to_toml(self.spec))
        self._console.print(spec_view(self.spec))
        self._console.print(f"run folder {self.folder}", markup=False)
        began = time.monotonic()
        try:
            with Live(self._progress, console=self._console, refresh_per_second=4) as live:
                swarm = run_swarm(
                    self.spec,
                    spec_file,
                    self.folder,
                    listen,
                    lambda status: self._update(live, status),
                    lambda name: self._console.print(f"{name} was killed: starting it again"),
                )
                command_runner.run(swarm)
                self._progress.update(self._task, completed=self.spec.total_steps)
            self._console.print()
        except command_runner.Interrupted:
            self._console.print(
                f"interrupted: every process has ended; 'hetnode swarm up --resume {self.folder}' goes on"
            )
            raise
        finally:
            history = run_history.history_of(run_history.read_events(self.folder / "metrics.jsonl"))
            if history.replicas:
                self._plot(history)
        if status := keep_model(self.spec, self.folder):
            raise SystemExit(status)  # the process has printed the reason
        self._summarise(history, time.monotonic() - began)

    def _plot(self, history: run_history.History) -> None:
        """Write loss.png. Without matplotlib, or on a full disk, the run is complete but for this file."""
        try:
            run_history.plot_losses(history, f"run {self.spec.name}", self.folder / "loss.png")
        except HetnodeError as error:
            if error.code is not ErrorCode.MISSING_EXTRA:
                raise
            self._console.print(f"There is no loss.png: {error.cause} {error.remedy}", markup=False)
        except OSError as error:
            self._console.print(f"There is no loss.png: {error.strerror}.", markup=False)

    def _update(self, live: Live, status: RunStatus) -> None:
        if not self._has_begun:
            self._has_begun = True
            if (dashboard := url_in(self.folder)) is not None:
                self._console.print(f"dashboard {dashboard}", markup=False)
        left = f", {duration(status.remaining_seconds)} left" if status.remaining_seconds else ""
        self.spec = status.spec  # 'hetnode run change' may have changed it
        done, total = status.steps_done, status.spec.total_steps
        self._progress.update(self._task, completed=done, total=total, description=f"inner steps{left}")
        live.update(Group(replica_table(status), status_text(status), self._progress))
        if not self._console.is_terminal:
            self._print_round(status, left)

    def _print_round(self, status: RunStatus, left: str) -> None:
        """Without a terminal: print one line for each round that every replica has measured."""
        measured = {measurement.replica for measurement in status.measurements}
        figures = status.figures
        if not measured or len(figures) < len(measured):
            return
        round_number = min(each.round_number for each in figures.values())
        if round_number > self._shown_round:
            self._shown_round = round_number
            losses = ", ".join(f"replica {i} {each.validation_loss:.4f}" for i, each in figures.items())
            self._console.print(f"round {round_number} of {self.spec.rounds}: val. loss {losses}{left}")

    def _summarise(self, history: run_history.History, seconds: float) -> None:
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
                facts.add_row(
                    name, f"{run_history.size(sent)} sent, {run_history.ratio(dense, sent)} than float32"
                )
        facts.add_row("run folder", str(self.folder))
        self._console.print(Panel(Group(table, facts), title=f"run {self.spec.name} is finished"))
        if history.aborted > history.committed or not all(
            each.last < each.first for each in history.replicas
        ):
            self._console.print(
                f"The loss has not fallen, or most rounds were aborted: 'hetnode explain ROUND --run "
                f"{self.folder}' says what happened in a round. Perhaps inner.learning_rate is too high.",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )
        # To be copied: on lines of their own, which nothing cuts.
        program = sys.argv[0] if Path(sys.argv[0]).name == "hetnode" else "hetnode"
        command = shlex.join([program, "generate", str(self.folder), "--prompt", "def "])
        for text in (f"try it: {command}", f"its pages again: {command_for(self.folder, program)}"):
            self._console.print(text, markup=False, soft_wrap=True)
