"""Runs trials in worker processes, several at a time, and stores their results.

OUT/results.jsonl       one line per finished trial, written by this process alone
OUT/trials/KEY/         the state of a trial that is not finished
OUT/tokenizers/         those that the matrix defines, each below what it was made from
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
from node.experiment.measurement import RoundRecord
from node.experiment.options import ComputeOptions
from node.experiment.results import Result, append
from node.experiment.tokenizers import TokenizerFile, tokenizer_file, train_bpe
from node.experiment.trial import Planned
from node.experiment.worker import request_of
from node.folder import lock_folder
from node.ipc.channel import Child, start_child
from node.measure.hardware import available_threads
from protocol.errors import ErrorCode, HetnodeError

_CLOSE_SECONDS = 3.0


class Observer(Protocol):
    """Told what happens, for people to see."""

    def began(self, planned: Planned, done: int) -> None:
        """A worker has the trial, of which `done` rounds were finished before."""

    def advanced(self, planned: Planned, number: int, record: RoundRecord) -> None:
        """Round `number` is over."""

    def finished(self, planned: Planned, result: Result) -> None:
        """The result is on the disk."""

    def failed(self, planned: Planned, error: Exception) -> None:
        """The trial has no result; what was saved of it stays."""


def results_file(out: Path) -> Path:
    return out / "results.jsonl"


def tokenizer_path(out: Path, read: MatrixFile, name: str) -> Path:
    """Where `name` of the matrix is, or will be: another vocabulary or source has another place."""
    vocabulary = read.tokenizers[name].vocabulary
    made_from = hashlib.sha256("\0".join(data_of(read)).encode()).hexdigest()[:8]
    return out / "tokenizers" / f"{vocabulary}-{made_from}" / f"{name}.json"


def trials_left_over(out: Path, known: Collection[str]) -> list[Path]:
    """Saved states of trials whose keys are not among `known`."""
    folders = (out / "trials").glob("*") if (out / "trials").is_dir() else ()
    return sorted(folder for folder in folders if folder.name not in known)


@contextmanager
def sole_use(out: Path) -> Iterator[None]:
    """Keep other runs out of `out`. Raises RUN_FOLDER_IN_USE."""
    try:
        lock = lock_folder(out)
    except HetnodeError:
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"Another 'hetnode experiment' writes to {out}.",
            "Wait for it or end it, or give this one another --out.",
        ) from None
    try:
        yield
    finally:
        lock.close()


def tokenizers_there(read: MatrixFile, out: Path) -> dict[str, TokenizerFile]:
    """Those of the matrix that were trained before. Raises TOKENIZER_UNREADABLE."""
    return {
        name: _tokenizer(path)
        for name in read.tokenizers
        if (path := tokenizer_path(out, read, name)).exists()
    }


def train_tokenizers(read: MatrixFile, out: Path, tables: Sequence[str] = ()) -> dict[str, TokenizerFile]:
    """Those of the matrix that are there, and those that `tables` (all where none is named) need, trained
    where they are not. Raises as :func:`train_bpe`."""
    found = tokenizers_there(read, out)
    source, text_field = data_of(read)
    for name in sorted(tokenizers_used(read, tables) - found.keys()):
        path = tokenizer_path(out, read, name)
        found[name] = train_bpe(path, read.tokenizers[name].vocabulary, source, text_field)
    return found


async def run_trials(
    trials: Sequence[Planned], out: Path, options: ComputeOptions, observer: Observer
) -> list[Exception]:
    """Compute `trials`, in their order, and append their results to the file in `out`.

    Every trial has a process of its own, so that it computes the same whatever ran before. One that fails is
    left as it is while the others go on. When this ends, also by cancellation, no process is left.

    Args:
        trials: none of which has a result.
        out: whose sole use the caller has.
        options: with `jobs` processes at a time.
        observer: called from the event loop.

    Returns:
        Why trials have failed.

    Raises:
        HetnodeError: DISK_FULL, where a result cannot be kept.
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


async def _compute(planned: Planned, folder: Path, options: ComputeOptions, observer: Observer) -> Result:
    worker = await _start(options.threads)
    try:
        began = await worker.call("begin", request_of(planned, folder, options))
        done = began.body["done"]
        observer.began(planned, done)
        for number in range(done + 1, planned.trial.spec.rounds + 1):
            reply = await worker.call("advance", {})
            observer.advanced(planned, number, RoundRecord.model_validate(reply.body))
        return Result.model_validate((await worker.call("result", {})).body)
    except HetnodeError as error:
        if error.code is not ErrorCode.WORKER_DIED:
            raise
        raise HetnodeError(
            error.code,
            error.cause,
            "Use fewer --jobs or --resident replicas if the memory is too small. The same command continues.",
        ) from None
    finally:
        await worker.close(_CLOSE_SECONDS)


async def _start(threads: int) -> Child:
    return await start_child(
        "node.experiment.worker",
        name="trial's",
        died=ErrorCode.WORKER_DIED,
        environment={"HETNODE_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)},
    )


def _tokenizer(path: Path) -> TokenizerFile:
    try:
        return tokenizer_file(path)
    except (OSError, ValueError) as error:
        raise HetnodeError(
            ErrorCode.TOKENIZER_UNREADABLE,
            f"The tokenizer {path} cannot be read: {error}.",
            "Remove it: it is trained again. Trials that were made with another one are not known then.",
        ) from None
