"""Terminal views of an experiment: live progress, and the state of a matrix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from node.experiment.estimate import Pace
from node.experiment.matrix import Matrix
from node.experiment.results import Loss, Result, loss_text, mean
from node.experiment.resumable_trial import RoundRecord
from node.experiment.trial import Planned
from node.views.text import duration
from protocol.errors import HetnodeError


@dataclass
class _Running:
    """A trial that a worker computes now."""

    planned: Planned
    done: int
    since: float
    train: Loss = None
    validation: Loss = None


class ExperimentView:
    """Live progress on a terminal, else one line for each trial. An observer of :func:`runner.run_trials`.

    Args:
        console: for the output.
        trials: all trials that will run, each once.
        tables: keys of trials by name of their table.
        results: earlier results by key.
        jobs: number of workers.
    """

    def __init__(
        self,
        console: Console,
        trials: Sequence[Planned],
        tables: Mapping[str, Sequence[str]],
        results: Mapping[str, Result],
        jobs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._jobs, self._clock = console, jobs, clock
        self._tables, self._finished = tables, set(results)
        self._waiting = {planned.trial.key: planned for planned in trials}
        self._running: dict[str, _Running] = {}
        self._pace = Pace(results.values())
        self._rounds = sum(planned.trial.spec.rounds for planned in trials)
        self._count, self._began, self._failed = len(trials), clock(), 0

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show progress inside the block."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self.render, console=self._console, refresh_per_second=2, transient=True):
            yield

    def began(self, planned: Planned, done: int) -> None:
        self._waiting.pop(planned.trial.key, None)
        self._running[planned.trial.key] = _Running(planned, done, self._clock())
        rounds = planned.trial.spec.rounds
        if done:
            self._say(f"{_named(planned)}: goes on after round {done} of {rounds}")
        elif not self._console.is_terminal:
            self._say(f"{_named(planned)}: begins, {rounds} rounds")

    def advanced(self, planned: Planned, round_number: int, record: RoundRecord) -> None:
        running = self._running[planned.trial.key]
        running.done, running.since, running.train = round_number, self._clock(), record.train
        self._pace.learn(planned.trial, 1, record.seconds)
        if record.validation:
            running.validation = mean(record.validation)

    def finished(self, planned: Planned, result: Result) -> None:
        self._running.pop(planned.trial.key, None)
        self._finished.add(planned.trial.key)
        self._say(
            f"{_named(planned)}: loss {loss_text(result.loss)} in {duration(result.seconds)}; "
            f"{self._left_text()}"
        )

    def failed(self, planned: Planned, error: Exception) -> None:
        self._waiting.pop(planned.trial.key, None)
        self._running.pop(planned.trial.key, None)
        self._failed += 1
        reason = error.cause if isinstance(error, HetnodeError) else str(error)
        self._say(f"{_named(planned)}: failed. {reason}")

    def render(self) -> RenderableType:
        """The current state."""
        tables = Table("table", "done", "", box=None, padding=(0, 2, 0, 0))
        for name, keys in self._tables.items():
            done = len(self._finished & set(keys))
            tables.add_row(name, f"{done} of {len(keys)}", ProgressBar(len(keys), done, width=24))
        running = Table(
            "trial", "round", "", "training loss", "validation loss", box=None, padding=(0, 2, 0, 0)
        )
        for each in self._running.values():
            rounds = each.planned.trial.spec.rounds
            running.add_row(
                _named(each.planned),
                f"{each.done} of {rounds}",
                ProgressBar(rounds, each.done, width=24),
                loss_text(each.train),
                loss_text(each.validation),
            )
        done = self._rounds - sum(rounds for _, rounds in self._rounds_left())
        whole = Table.grid(padding=(0, 2, 0, 0))
        whole.add_row(
            f"{self._left_text()}, {duration(self._clock() - self._began)} so far",
            ProgressBar(max(self._rounds, 1), done, width=24),
        )
        return Group(tables, "", running, "", whole)

    def _rounds_left(self) -> list[tuple[Planned, int]]:
        waiting = [(planned, planned.trial.spec.rounds) for planned in self._waiting.values()]
        running = [
            (each.planned, each.planned.trial.spec.rounds - each.done) for each in self._running.values()
        ]
        return running + waiting

    def _left_text(self) -> str:
        trials = len(self._waiting) + len(self._running)
        left = self._pace.left(
            [(planned.trial, rounds) for planned, rounds in self._rounds_left()], self._jobs
        )
        failed = f", {self._failed} failed" if self._failed else ""
        text = f"{trials} of {self._count} trials left{failed}"
        if not trials:
            return text
        return f"{text}, {'time unknown' if left is None else f'about {duration(left)}'}"

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def matrix_view(matrix: Matrix, results: Mapping[str, Result], jobs: int) -> RenderableType:
    """Every row of a matrix with its losses, and the remaining time."""
    shown: list[RenderableType] = []
    for table in matrix.tables:
        rows = Table(
            "row", "mode", "k", *(f"seed {seed}" for seed in matrix.seeds), title=table.section.title
        )
        for row in table.rows:
            found = [results.get(row.trials[seed].trial.key) for seed in matrix.seeds]
            cells = [loss_text(result.loss) if result else "to do" for result in found]
            rows.add_row(row.name, row.mode.value, "" if row.k is None else str(row.k), *cells)
        shown.append(rows)
    left = [planned for planned in matrix.trials if planned.trial.key not in results]
    seconds = Pace(results.values()).left([(each.trial, each.trial.spec.rounds) for each in left], jobs)
    time_left = "time unknown before a similar trial has run" if seconds is None else duration(seconds)
    text = f"{len(left)} of {len(matrix.trials)} trials left: {time_left} with {jobs} at a time"
    return Group(*shown, text if left else "all trials are done")


def _named(planned: Planned) -> str:
    return f"{planned.name}, seed {planned.seed}"
