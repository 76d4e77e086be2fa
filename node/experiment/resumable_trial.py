"""Runs one trial in this process. After a kill it continues from its last save."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from node.checkpoint.global_model import Checkpoint
from node.core.worker.compute import Compute, chosen_precision
from node.data.stream import SampleStream, open_stream
from node.experiment.in_process_swarm import LocalSwarm
from node.experiment.results import Loss, Result, finite
from node.experiment.trial import Planned, Trial, TrialOptions
from node.generate import validation_loss
from node.ipc.worker_calls import Precision
from node.machine.devices import gpu_name
from node.measure import hardware
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.version import program_version
from protocol.trust.private_file import write_whole

log = logging.getLogger(__name__)

_SAVE_SECONDS = 60.0
_SAVE_SHARE = 0.05


class RoundRecord(BaseModel):
    """Results of one round. `validation` has the loss of every replica if a validation was due."""

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


class ResumableTrial:
    """A trial that continues from its last save, or starts from the beginning.

    Only this trial uses `folder`. It contains the saved swarm, and the history of at least as many rounds.
    Each is replaced as a whole, so after a kill at any moment the trial continues to the same bits.

    Args:
        planned: the trial.
        folder: created if missing. The caller may delete it after the result is stored.
        options: how to compute. Different options after a restart may change the last bits.
        stream: the samples of the trial; opened here by default.
        clock: returns seconds.

    Raises:
        HetnodeError: as :class:`LocalSwarm`.
    """

    def __init__(
        self,
        planned: Planned,
        folder: Path,
        options: TrialOptions,
        stream: SampleStream | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._planned, self._folder, self._options, self._clock = planned, folder, options, clock
        self._history_file, self._swarm_folder = folder / "history.json", folder / "swarm"
        self._stream = stream or open_stream(self._trial.spec)
        folder.mkdir(parents=True, exist_ok=True)
        self.swarm = self._open()
        self._next_save = clock() + _SAVE_SECONDS
        self.rounds: list[RoundRecord] = []
        self._resume()

    @property
    def done(self) -> bool:
        """Whether the trial is finished and :meth:`result` is available."""
        return len(self.rounds) == self._trial.spec.rounds

    def advance(self) -> RoundRecord:
        """Train one round. Validate and save if due.

        Raises:
            HetnodeError: DISK_FULL; the older save is unchanged.
        """
        began = self._clock()
        report = self.swarm.train_round()
        done = report.round_number
        is_due = done % self._planned.validate_every == 0 or done == self._trial.spec.rounds
        losses = tuple(map(finite, self.swarm.validate())) if is_due else ()
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
        """The result of the finished trial."""
        assert self.done, "the trial is not finished"
        trial, rounds = self._trial, self.rounds
        return Result(
            key=trial.key,
            name=self._planned.name,
            mode=self._planned.mode.value,
            seed=self._planned.seed,
            spec=trial.portable_spec,
            variation=trial.variation.changes,
            train=tuple(record.train for record in rounds),
            validation={n: record.validation for n, record in enumerate(rounds, 1) if record.validation},
            plain=finite(self._plain_loss()),
            payload_bytes=sum(record.payload_bytes for record in rounds),
            link_bytes=sum(record.link_bytes for record in rounds),
            seconds=round(sum(record.seconds for record in rounds), 3),
            device=_device_name(self._options),
            versions={
                "hetnode": program_version(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            date=datetime.now(UTC).date().isoformat(),
        )

    @property
    def _trial(self) -> Trial:
        return self._planned.trial

    def _open(self) -> LocalSwarm:
        trial, options = self._trial, self._options
        return LocalSwarm(
            trial.spec,
            Compute(
                options.device,
                options.compile,
                options.activation_checkpointing,
                Precision(options.precision),
            ),
            self._stream,
            variation=trial.variation,
            resident=options.resident,
        )

    def _save_is_due(self, done: int) -> bool:
        every = self._options.save_every
        return done % every == 0 if every else self._clock() >= self._next_save

    def _save(self) -> None:
        """Save history and swarm. The history first: after a crash it must not be shorter than the swarm."""
        began = self._clock()
        history = _History(key=self._trial.key, rounds=tuple(self.rounds))
        try:
            write_whole(self._history_file, history.model_dump_json())
        except OSError as error:
            raise HetnodeError(
                ErrorCode.DISK_FULL,
                f"{self._planned.name} cannot be saved in {self._folder}: {error.strerror or error}.",
                "Free some disk space and run the same command: the trial continues from its last save.",
            ) from None
        self.swarm.save(self._swarm_folder)
        # The pause between two saves is long enough that saving takes at most _SAVE_SHARE of the time.
        now = self._clock()
        self._next_save = now + max(_SAVE_SECONDS, (now - began) / _SAVE_SHARE)

    def _resume(self) -> None:
        """Continue from the last save. If it is unusable, log a warning and start from the beginning."""
        try:
            history = _History.model_validate_json(self._history_file.read_bytes())
            if history.key != self._trial.key:
                raise ValueError("it belongs to another trial")
            if self.swarm.restore(self._swarm_folder):
                self.rounds = list(history.rounds[: self.swarm.position])
                if len(self.rounds) != self.swarm.position:
                    raise ValueError("its history has fewer rounds than the saved swarm")
        except FileNotFoundError:
            return
        except (OSError, ValueError, ValidationError, HetnodeError) as error:
            log.warning("%s starts from the beginning: %s", self._planned.name, error)
            self.rounds = []
            self.swarm = self._open()

    def _plain_loss(self) -> float:
        """Validation loss of the final anchor without link compression."""
        spec, device, first = self._trial.spec, self._options.device, self.swarm.replicas[0]
        anchors = {}
        for stage in range(spec.swarm.stages):
            anchor = first.host_of(stage).outer[stage].anchor
            anchors[stage] = {name: value.to(device) for name, value in anchor.items()}
        checkpoint = Checkpoint(spec, spec.rounds, anchors)
        return validation_loss(checkpoint, self._stream, spec.data.validation_batches)


def _device_name(options: TrialOptions) -> str:
    """The device and how it computes, for people, without host names and paths."""
    precision = chosen_precision(torch.device(options.device), Precision(options.precision))
    how = [precision] * (precision != Precision.FP32) + ["compiled"] * options.compile
    if options.device.startswith("cuda"):
        device = [gpu_name(torch.device(options.device))]
    else:
        threads = options.threads
        device = [hardware.processor(), f"{threads} thread{'s' * (threads != 1)} of {os.cpu_count()}"]
    return ", ".join(device + how)
