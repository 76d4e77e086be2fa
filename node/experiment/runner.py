"""Runs trials in worker processes, several at a time, and stores their results.

OUT/results.jsonl       one line for each finished trial; only this process writes it
OUT/trials/KEY/         saved state of a trial that is not finished
OUT/tokenizers/         the tokenizers that the matrix defines
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from node.experiment.matrix import MatrixFile, data_of, tokenizers_used
from node.experiment.results import Result, append
from node.experiment.resumable_trial import RoundRecord
from node.experiment.tokenizers import TokenizerFile, tokenizer_file, train_bpe
from node.experiment.trial import Planned, TrialOptions
from node.experiment.worker import Advance, Begin, Finish
from node.folder import lock_folder
from node.ipc.channel import start_child
from node.ipc.worker_client import WorkerClient
from node.measure.hardware import available_threads
from protocol.errors import ErrorCode, HetnodeError

_CLOSE_SECONDS = 3.0


class Observer(Protocol):
    """Shows the progress of trials to the user."""

    def began(self, planned: Planned, done: int) -> None:
        """A worker has started or continued the trial, with `done` finished rounds."""

    def advanced(self, planned: Planned, round_number: int, record: RoundRecord) -> None:
        """A round is finished."""

    def finished(self, planned: Planned, result: Result) -> None:
        """The result is on the disk."""

    def failed(self, planned: Planned, error: Exception) -> None:
        """The trial has no result. Its saved state stays."""


def results_file(out: Path) -> Path:
    return out / "results.jsonl"


def tokenizer_path(out: Path, read: MatrixFile, name: str) -> Path:
    """The file of tokenizer `name`. The path differs for another vocabulary or data source."""
    vocabulary = read.tokenizers[name].vocabulary
    made_from = hashlib.sha256("\0".join(data_of(read)).encode()).hexdigest()[:8]
    return out / "tokenizers" / f"{vocabulary}-{made_from}" / f"{name}.json"


def trials_left_over(out: Path, known: Collection[str]) -> list[Path]:
    """Saved states of trials whose keys are not among `known`."""
    return sorted(folder for folder in (out / "trials").glob("*") if folder.name not in known)


@contextmanager
def sole_use(out: Path) -> Iterator[None]:
    """Keep other runs out of `out`. Raises RUN_FOLDER_IN_USE, BAD_OPTION."""
    try:
        lock = lock_folder(out)
    except HetnodeError as error:
        if error.code is not ErrorCode.RUN_FOLDER_IN_USE:
            raise
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"Another 'hetnode experiment' writes to {out}.",
            "Wait for it or end it, or give this one another --out.",
        ) from None
    with lock:
        yield


def train_tokenizers(read: MatrixFile, out: Path, tables: Sequence[str] = ()) -> dict[str, TokenizerFile]:
    """The tokenizers of the matrix. Those that `tables` (default: all) use are trained if they are missing.

    Raises TOKENIZER_UNREADABLE, or as :func:`train_bpe`.
    """
    paths = {name: tokenizer_path(out, read, name) for name in read.tokenizers}
    found = {name: tokenizer_file(path) for name, path in paths.items() if path.exists()}
    for name in sorted(tokenizers_used(read, tables) - found.keys()):
        found[name] = train_bpe(paths[name], read.tokenizers[name].vocabulary, *data_of(read))
    return found


async def run_trials(
    trials: Sequence[Planned], out: Path, options: TrialOptions, observer: Observer
) -> list[Exception]:
    """Compute `trials` in their order, and append their results to the file in `out`.

    Every trial has its own process, so that earlier trials cannot affect its bits. If a trial fails, the
    others continue. No process is left when this function ends, also if it is cancelled.

    Args:
        trials: trials without a result.
        out: the caller holds :func:`sole_use` of it.
        options: `jobs` is the number of processes.
        observer: called from the event loop.

    Returns:
        The errors of failed trials.

    Raises:
        HetnodeError: DISK_FULL if a result cannot be written.
    """
    jobs = max(1, min(options.jobs, len(trials)))
    options = options.model_copy(update={"threads": options.threads or max(1, available_threads() // jobs)})
    waiting, failures = deque(trials), list[Exception]()

    async def work() -> None:
        while waiting:
            planned = waiting.popleft()
            folder = out / "trials" / planned.trial.key
            try:
                result = await _compute(planned, folder, options, observer)
            except (HetnodeError, RuntimeError) as error:
                failures.append(error)
                observer.failed(planned, error)
                continue
            append(results_file(out), result)
            shutil.rmtree(folder, ignore_errors=True)
            observer.finished(planned, result)

    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(work())
    return failures


async def _compute(planned: Planned, folder: Path, options: TrialOptions, observer: Observer) -> Result:
    threads = str(options.threads)
    child = await start_child(
        f"{__package__}.worker",
        name="trial's",
        died=ErrorCode.WORKER_DIED,
        environment={"HETNODE_THREADS": threads, "OMP_NUM_THREADS": threads},
    )
    worker = WorkerClient(child)
    try:
        done = await worker.call(Begin(planned, folder, options))
        observer.began(planned, done)
        for round_number in range(done + 1, planned.trial.spec.rounds + 1):
            observer.advanced(planned, round_number, await worker.call(Advance()))
        return await worker.call(Finish())
    except HetnodeError as error:
        if error.code is not ErrorCode.WORKER_DIED:
            raise
        remedy = "Use fewer jobs or resident replicas if the memory is too small. The same command continues."
        raise HetnodeError(error.code, error.cause, remedy) from None
    finally:
        await child.close(_CLOSE_SECONDS)
