"""What trials have come to: JSON lines in one file, which only grows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from node.experiment.trial import Trial
from node.experiment.variation import Variation
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec


def finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


Loss = Annotated[float | None, AfterValidator(lambda loss: None if loss is None else finite(loss))]
"""Nats per token; None where it is not a finite number."""


class _Read(BaseModel):
    """A part of a specification that is read also where this version does not know the rest of it."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Data(_Read):
    source: str
    text_field: str
    tokenizer: str
    tokenizer_sha256: str


class _Model(_Read):
    vocabulary: int


class _Swarm(_Read):
    replicas: int = Field(ge=0)
    pipelines: int = Field(ge=0)


class _Spec(_Read):
    data: _Data
    model: _Model
    swarm: _Swarm


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
        device: description of the device.
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
    validation: Mapping[int, Annotated[tuple[Loss, ...], Field(min_length=1)]] = Field(min_length=1)
    plain: Loss
    payload_bytes: int
    link_bytes: int
    seconds: float = Field(ge=0, allow_inf_nan=False)
    device: str
    versions: Mapping[str, str]
    date: str

    @field_validator("spec")
    @classmethod
    def _can_be_read(cls, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        _Spec.model_validate(spec)
        return spec

    @model_validator(mode="after")
    def _validated_at_the_end(self) -> Self:
        if min(self.validation) < 1 or max(self.validation) != len(self.train):
            raise ValueError("validation does not end with the last round of train")
        return self

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


def mean(losses: Sequence[Loss]) -> float:
    """NaN where one of them is not finite."""
    return math.fsum(math.nan if loss is None else loss for loss in losses) / len(losses)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is beyond all floats."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def read_results(files: Iterable[Path]) -> dict[str, Result]:
    """The results in `files` by the key of their trial; of equal trials the last. A missing file has none.

    Keys are made anew from what stands in the line, so that a field that was added to the specification since
    changes nothing, as long as its default is what was done before. A last line that was never completed is
    passed over; one that lacks nothing but its end counts.

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


def append(file: Path, result: Result) -> None:
    """Add a line, on the disk when this returns. A torn last line of a former writer is cut off.

    Only one process may append at a time.

    Raises:
        HetnodeError: DISK_FULL or RESULTS_UNREADABLE; the lines before are as they were.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as lines:
            content = file.read_bytes()
            kept = _whole(content)
            lines.truncate(min(len(kept), len(content)))
            lines.write(kept[len(content) :] + result.line.encode())
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
        return _whole(file.read_bytes()).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(file, str(error.strerror or error)) from None


def _whole(content: bytes) -> bytes:
    """The lines without one at the end that is torn. One that lacks only its end gets it."""
    head, newline, last = content.rpartition(b"\n")
    try:
        Result.of_line(last)
    except ValueError:
        return head + newline
    return content + b"\n"


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
