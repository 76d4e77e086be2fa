"""Results of trials: JSON lines in one file, to which lines are only added."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

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


_READ = {
    ("data", "source"): str | list,
    ("data", "text_field"): str,
    ("data", "tokenizer"): str,
    ("data", "tokenizer_sha256"): str,
    ("model", "vocabulary"): int,
    ("swarm", "replicas"): int,
    ("swarm", "pipelines"): int,
}
"""What is read of a specification. Other fields may be unknown to this version."""


class Result(BaseModel):
    """The result of a finished trial: one line of the file.

    Attributes:
        key: of the trial, computed by the version that wrote the line.
        spec: as JSON, without paths of the machine.
        variation: the fields that differ from their defaults.
        train: mean training loss of all replicas, for each round.
        validation: by round, the loss of every replica in its own forward mode.
        plain: validation loss of the final anchor without link compression.
        payload_bytes: of all payloads of the whole run.
        link_bytes: of all frames between members in the training of the whole run.
        seconds: computing time, without the part that an interruption lost.
        device: description of the device.
        date: of the end.
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
        for (section, name), kind in _READ.items():
            value = spec[section].get(name) if isinstance(spec.get(section), Mapping) else None
            if type(value) not in (get_args(kind) or (kind,)) or (isinstance(value, int) and value < 0):
                raise ValueError(f"{section}.{name} of its specification is {value!r:.40}")
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
        """Final validation loss of every replica in its own forward mode."""
        return self.validation[max(self.validation)]

    @property
    def loss(self) -> float:
        """Mean of :attr:`losses`; NaN if one of them is not finite."""
        return mean(self.losses)

    @property
    def pipeline_loss(self) -> float | None:
        """Mean loss of the pipelines; None if all replicas are full."""
        pipelines = self.losses[self.spec["swarm"]["replicas"] :]  # full replicas come first in a plan
        return mean(pipelines) if pipelines else None

    @property
    def diverged(self) -> bool:
        return math.isnan(self.loss)

    @property
    def trial(self) -> Trial:
        """What was computed. Raises HetnodeError or ValueError if this version cannot represent it."""
        return Trial(RunSpec.from_json(json.dumps(self.spec)), Variation.model_validate(self.variation))

    @property
    def line(self) -> str:
        """JSON on one line, with a newline."""
        return json.dumps(self.model_dump(mode="json"), allow_nan=False, separators=(",", ":")) + "\n"


def mean(losses: Sequence[Loss]) -> float:
    """The mean; NaN if one of the losses is not finite."""
    return math.fsum(math.nan if loss is None else loss for loss in losses) / len(losses)


def perplexity(loss: float) -> float:
    """exp(loss); infinite if it exceeds all floats."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def loss_text(loss: Loss) -> str:
    """Four digits after the point; "diverged" for NaN, "" for None."""
    if loss is None:
        return ""
    return "diverged" if math.isnan(loss) else f"{loss:.3f}"


def read_results(files: Iterable[Path]) -> dict[str, Result]:
    """The results in `files` by the key of their trial. The last of equal trials counts.

    A missing file is empty. Keys are computed again from the line, so a result stays valid when the
    specification gets a new field whose default is the old behaviour. An incomplete last line is ignored; one
    that lacks only its newline counts.

    Raises:
        HetnodeError: RESULTS_UNREADABLE, which names the file and the line.
    """
    found = {}
    for file in files:
        for line_number, line in enumerate(_lines(file), 1):
            if not line.strip():
                continue
            try:
                result = Result.model_validate_json(line)
            except ValueError as error:
                raise _unreadable(
                    file, f"line {line_number} is not a result ({faults_of(error, most=1)})"
                ) from None
            found[_key(result)] = result
    return found


def append(file: Path, result: Result) -> None:
    """Add a line and flush it to the disk. An incomplete last line of an earlier writer is removed.

    Only one process may append at a time.

    Raises:
        HetnodeError: DISK_FULL or RESULTS_UNREADABLE; earlier lines are unchanged.
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
            "Free some disk space and run the same command again: finished trials are not computed again.",
        ) from None


def _lines(file: Path) -> list[bytes]:
    try:
        return _whole(file.read_bytes()).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(file, str(error.strerror or error)) from None


def _whole(content: bytes) -> bytes:
    """`content` without an incomplete last line. A last line that lacks only its newline gets it."""
    head, newline, last = content.rpartition(b"\n")
    try:
        Result.model_validate_json(last)
    except ValueError:
        return head + newline
    return content + b"\n"


def _key(result: Result) -> str:
    try:
        return result.trial.key
    except (HetnodeError, ValueError):
        return result.key


def faults_of(error: Exception, prefix: str = "", most: int | None = None) -> str:
    """The reasons in one sentence. Those of pydantic get `prefix` and the key; at most `most` are named."""
    if not isinstance(error, ValidationError):
        return str(error).rstrip(".")
    faults = error.errors(include_url=False)[:most]
    return "; ".join(f"{prefix}{'.'.join(map(str, each['loc'])) or 'it'}: {each['msg']}" for each in faults)


def _unreadable(file: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RESULTS_UNREADABLE,
        f"The results in {file} cannot be read: {why}.",
        "Correct or remove that line; its trial is then computed again.",
    )
