"""What trials have come to: JSON lines in one file, which only grows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.experiment.tokenizers import TokenizerFile
from node.experiment.trial import Trial
from node.experiment.variation import Variation
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec import RunSpec

Loss = float | None
"""Nats per token; None where it is not a finite number."""


class Result(BaseModel):
    """One line: a trial that has come to its end.

    Attributes:
        key: of the trial, as of the version that wrote the line.
        spec: as JSON, without places of the machine.
        variation: the fields that are not at their defaults.
        train: mean training loss of all replicas, by round.
        validation: by round, of every replica in its own forward mode.
        plain: validation loss of the final anchor without any link compression.
        payload_bytes: of all payloads of the whole run.
        link_bytes: of all frames between members in training, likewise.
        seconds: of computing, without those that were lost in an interruption.
        device: what computed, in words.
        date: on which it ended.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1] = 1
    key: str
    name: str
    mode: str
    seed: int
    spec: Mapping[str, Any]
    variation: Mapping[str, Any] = Field(default_factory=dict)
    train: tuple[Loss, ...] = Field(min_length=1)
    validation: Mapping[int, tuple[Loss, ...]] = Field(min_length=1)
    plain: Loss
    payload_bytes: int
    link_bytes: int
    seconds: float
    device: str
    versions: Mapping[str, str]
    date: str

    @property
    def rounds(self) -> int:
        return len(self.train)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """At the end, of every replica in its own forward mode."""
        return self.validation[max(self.validation)]

    @property
    def loss(self) -> float:
        """Mean of :attr:`losses`; NaN where one of them is not finite."""
        return mean(self.losses)

    @property
    def pipeline_loss(self) -> float | None:
        """Mean of the pipelines' losses; None where all replicas are full."""
        pipelines = self.losses[self.spec["swarm"]["replicas"] :]  # full replicas come first in a plan
        return mean(pipelines) if pipelines else None

    @property
    def diverged(self) -> bool:
        return math.isnan(self.loss)

    @property
    def trial(self) -> Trial:
        """What was computed. Raises HetnodeError or ValueError where this version knows no such trial."""
        return Trial(RunSpec.from_json(json.dumps(self.spec)), Variation.model_validate(self.variation))

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """Raises ValueError."""
        return cls.model_validate_json(line)

    @property
    def line(self) -> str:
        """JSON on one line, with its end."""
        return json.dumps(self.model_dump(mode="json"), allow_nan=False, separators=(",", ":")) + "\n"


def finite(loss: float) -> Loss:
    return loss if math.isfinite(loss) else None


def mean(losses: Sequence[Loss]) -> float:
    """NaN where one of them is not finite."""
    return math.fsum(math.nan if loss is None else loss for loss in losses) / len(losses)


def read_results(files: Iterable[Path]) -> dict[str, Result]:
    """The results in `files` by the key of their trial; of equal trials the last. A missing file has none.

    Keys are made anew from what stands in the line, so that a field that was added to the specification since
    changes nothing, as long as its default is what was done before. A last line that was never completed is
    passed over.

    Raises:
        HetnodeError: RESULTS_UNREADABLE, which names the file and the line.
    """
    found = {}
    for file in files:
        for number, line in enumerate(_lines(file), 1):
            if not line.strip():
                continue
            try:
                result = Result.of_line(line)
            except ValueError as error:
                raise _unreadable(file, f"line {number} is no result ({_first_fault(error)})") from None
            found[_key(result)] = result
    return found


def tokenizers_of(results: Iterable[Result]) -> dict[str, TokenizerFile]:
    """The tokenizers that `results` were made with, by name; the files need not be on this machine."""
    found = {}
    for result in results:
        data, model = result.spec.get("data", {}), result.spec.get("model", {})
        if data.get("tokenizer_sha256"):
            name = data["tokenizer"]
            found[name] = TokenizerFile(Path(f"{name}.json"), data["tokenizer_sha256"], model["vocabulary"])
    return found


def append(file: Path, result: Result) -> None:
    """Add a line, on the disk when this returns. A torn last line of a former writer is cut off.

    Only one process may append at a time.

    Raises:
        HetnodeError: DISK_FULL or RESULTS_UNREADABLE; the lines before are as they were.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as lines:
            whole = len(file.read_bytes().rpartition(b"\n")[0]) + 1 if lines.tell() else 0
            lines.truncate(whole if whole > 1 else 0)
            lines.write(result.line.encode())
            lines.flush()
            os.fsync(lines.fileno())
    except OSError as error:
        raise HetnodeError(
            ErrorCode.DISK_FULL,
            f"The result of {result.name} cannot be added to {file}: {error.strerror or error}.",
            "Make room and run the same command again: what is finished is not computed anew.",
        ) from None


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(file, str(error.strerror or error)) from None


def _key(result: Result) -> str:
    try:
        return result.trial.key
    except (HetnodeError, ValueError):
        return result.key


def _first_fault(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, fault['loc'])) or 'the line'}: {fault['msg']}"
    return str(error)


def _unreadable(file: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RESULTS_UNREADABLE,
        f"The results in {file} cannot be read: {why}.",
        "Mend or remove that line; its trial is then computed again.",
    )
