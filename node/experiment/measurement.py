"""One trial under way in this process: it may be killed at any moment, and goes on where it was saved."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from node.checkpoint.global_model import Checkpoint
from node.data.stream import SampleStream, open_stream
from node.experiment.in_process_swarm import LocalSwarm
from node.experiment.options import ComputeOptions, device_name
from node.experiment.results import Loss, Result, finite
from node.experiment.trial import Planned, Trial
from node.generate import validation_loss
from node.worker.compute import Compute
from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)

_SAVE_SECONDS = 60.0
_SAVE_SHARE = 0.05


class RoundRecord(BaseModel):
    """What one round has come to. `validation` is that of every replica, where it was due."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: Loss
    payload_bytes: int
    link_bytes: int
    seconds: float
    validation: tuple[Loss, ...] = ()


class _History(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    rounds: tuple[RoundRecord, ...]


class Measurement:
    """A trial from where it was saved last, or from its start.

    `folder` belongs to this trial alone: the saved swarm, and the history up to it or further. Both are
    replaced whole, so that a process that is killed at any moment leaves a state from which the trial comes
    to the same bits.

    Args:
        planned: the trial.
        folder: made where it is not there. It may go once the result is safe.
        options: how it is computed. Other ones than before may give other bits.
        stream: its samples; opened here by default.
        clock: seconds.

    Raises:
        HetnodeError: as :class:`LocalSwarm`.
    """

    def __init__(
        self,
        planned: Planned,
        folder: Path,
        options: ComputeOptions,
        stream: SampleStream | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._planned, self._folder, self._options, self._clock = planned, folder, options, clock
        self._stream = stream or open_stream(self._trial.spec)
        folder.mkdir(parents=True, exist_ok=True)
        self._swarm = self._open()
        self._next_save = clock() + _SAVE_SECONDS
        self.rounds: list[RoundRecord] = []
        self._resume()

    @property
    def done(self) -> bool:
        """Whether :meth:`result` can be asked for."""
        return len(self.rounds) == self._trial.spec.rounds

    def advance(self) -> RoundRecord:
        """One round, its validation where that is due, and the state on the disk where that is due.

        Raises:
            HetnodeError: DISK_FULL; the state that was saved before is as it was.
        """
        began = self._clock()
        report = self._swarm.train_round()
        done = report.round_number
        is_due = done % self._planned.validate_every == 0 or done == self._trial.spec.rounds
        losses = tuple(map(finite, self._swarm.validate())) if is_due else ()
        record = RoundRecord(
            train=finite(report.train_loss),
            payload_bytes=report.payload_bytes,
            link_bytes=report.link_bytes,
            seconds=self._clock() - began,
            validation=losses,
        )
        self.rounds.append(record)
        if not self.done and self._save_is_due(done):
            self._save()
        return record

    def result(self) -> Result:
        """What the whole trial has come to."""
        assert self.done, "the trial is under way"
        trial, rounds = self._trial, self.rounds
        return Result(
            key=trial.key,
            name=self._planned.name,
            mode=self._planned.mode.value,
            seed=self._planned.seed,
            spec=trial.portable_spec,
            variation=trial.variation.changes,
            train=tuple(record.train for record in rounds),
            validation={
                number: record.validation for number, record in enumerate(rounds, 1) if record.validation
            },
            plain=finite(self._plain_loss()),
            payload_bytes=sum(record.payload_bytes for record in rounds),
            link_bytes=sum(record.link_bytes for record in rounds),
            seconds=round(sum(record.seconds for record in rounds), 3),
            device=device_name(self._options),
            versions={
                "hetnode": version("hetnode"),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            date=datetime.now(UTC).date().isoformat(),
        )

    @property
    def _trial(self) -> Trial:
        return self._planned.trial

    @property
    def _history_file(self) -> Path:
        return self._folder / "history.json"

    @property
    def _swarm_folder(self) -> Path:
        return self._folder / "swarm"

    def _open(self) -> LocalSwarm:
        trial, options = self._trial, self._options
        return LocalSwarm(
            trial.spec,
            Compute(options.device, options.compile, options.activation_checkpointing, options.precision),
            self._stream,
            variation=trial.variation,
            resident=options.resident,
            # Those that wait are no better off in the memory that those which compute need.
            parked=self._folder if options.device == "cpu" else None,
        )

    def _save_is_due(self, done: int) -> bool:
        every = self._options.save_every
        return done % every == 0 if every else self._clock() >= self._next_save

    def _save(self) -> None:
        """The history goes first: it may be longer than the swarm has come, never shorter."""
        began = self._clock()
        history = _History(key=self._trial.key, rounds=tuple(self.rounds))
        partial = self._history_file.with_suffix(".partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(json.dumps(history.model_dump(mode="json"), allow_nan=False))
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._history_file)
        except OSError as error:
            raise HetnodeError(
                ErrorCode.DISK_FULL,
                f"{self._planned.name} cannot be kept in {self._folder}: {error.strerror or error}.",
                "Make room and run the same command again: the trial goes on from where it was saved.",
            ) from None
        self._swarm.save(self._swarm_folder)
        now = self._clock()
        self._next_save = now + max(_SAVE_SECONDS, (now - began) / _SAVE_SHARE)

    def _resume(self) -> None:
        """Go on from what was saved. Where that cannot be used, start anew, with a warning."""
        try:
            history = _History.model_validate_json(self._history_file.read_bytes())
            if history.key != self._trial.key:
                raise ValueError("it is of another trial")
            if self._swarm.restore(self._swarm_folder):
                self.rounds = list(history.rounds[: self._swarm.position])
                if len(self.rounds) != self._swarm.position:
                    raise ValueError("its history is shorter than the swarm has come")
        except FileNotFoundError:
            return
        except (OSError, ValueError, ValidationError, HetnodeError) as error:
            log.warning("%s starts anew: %s", self._planned.name, error)
            self.rounds = []
            self._swarm = self._open()

    def _plain_loss(self) -> float:
        """Of the final anchor in the uncompressed forward mode."""
        spec, first = self._trial.spec, self._swarm.replicas[0]
        anchors = {
            stage: {
                name: value.to(self._options.device)
                for name, value in first.host_of(stage).outer[stage].anchor.items()
            }
            for stage in range(spec.swarm.stages)
        }
        checkpoint = Checkpoint(spec, spec.rounds, anchors)
        return validation_loss(checkpoint, self._stream, spec.data.validation_batches)
