"""One trial of an experiment: a run specification, its variation of the algorithm, and the key of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from node.data.places import with_places
from node.experiment.variation import UNVARIED, Variation
from protocol.spec.run import RunSpec


class Mode(StrEnum):
    """The kinds of replicas in a trial, and what they exchange."""

    DATA_PARALLEL = "data-parallel"
    """All replicas average their gradients in every step: H = 1, no payload compression."""
    SPARSELOCO = "sparseloco"
    """All replicas are full: no link compression."""
    UNIFORM = "uniform"
    """All replicas are pipelines."""
    HETEROGENEOUS = "heterogeneous"
    """A fraction of the replicas is full, half of them by default."""


@dataclass(frozen=True)
class Trial:
    """What is computed: equal trials give equal bits on one machine.

    Attributes:
        spec: the run, with the hash of its tokenizer. The files that it names must exist when the trial runs.
        variation: how training differs from a real run.
    """

    spec: RunSpec
    variation: Variation = UNVARIED

    @cached_property
    def portable_spec(self) -> dict[str, Any]:
        """The spec as JSON, without paths of this machine. This is idempotent.

        A tokenizer file becomes its name without ".json", next to its hash; the source becomes a
        :func:`portable_source`.
        """
        tree = self.spec.tree
        data = tree["data"] = with_places(tree["data"], lambda source, _: portable_source(source))
        if data["tokenizer"] != "byte":
            data["tokenizer"] = Path(data["tokenizer"]).name.removesuffix(".json")
        return tree

    @cached_property
    def key(self) -> str:
        """sha-256 (hex) of what the trial computes. A new field of Variation does not change it."""
        tree = {"spec": self.portable_spec, "variation": self.variation.changes}
        return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def portable_source(source: str) -> str:
    """A data source without paths of this machine: an absolute path becomes its last part and a hash."""
    kind, _, path = source.partition(":")
    if not Path(path).is_absolute():
        return source
    return f"{kind}:{Path(path).name}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


class TrialOptions(BaseModel):
    """How a machine computes trials. It is not part of a trial's identity."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = "cpu"
    threads: int = Field(0, ge=0, description="of every worker process; 0 shares the cores among them")
    jobs: int = Field(1, ge=1, le=256, description="worker processes, each with one trial at a time")
    compile: bool = Field(False, description="torch.compile")
    activation_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    resident: int = Field(
        0,
        ge=0,
        description="replicas in the device's memory at a time, 0: all; the others are in main memory",
    )
    save_every: int = Field(0, ge=0, description="rounds between two saves; 0: by time, at most 5 % of it")


@dataclass(frozen=True)
class Planned:
    """A trial that is to be run.

    Attributes:
        name: for people.
        validate_every: rounds between two measurements of the validation loss; one more follows at the end.
    """

    trial: Trial
    name: str
    mode: Mode
    validate_every: int

    @property
    def seed(self) -> int:
        return self.trial.spec.seed


def trial_in_mode(
    spec: RunSpec, mode: Mode, replicas: int, fraction: float | None = None, changes: Mapping[str, Any] = {}
) -> Trial:
    """The trial of `spec` in `mode`.

    Args:
        spec: with the H and the rounds of the modes that exchange pseudo-gradients. Data parallel training
            takes the same number of inner steps, with one in each round.
        replicas: M.
        fraction: share of full replicas, 0 to 1, if the mode leaves it open. The default is 0.5 in
            heterogeneous mode and 1 in data parallel training.
        changes: fields of :class:`Variation`.

    Raises:
        ValueError: the fraction does not fit the mode or gives no whole number of replicas; `changes` are
            not valid; or as :meth:`Variation.check`.
        HetnodeError: BAD_SPEC.
    """
    full = _full_replicas(mode, replicas, fraction)
    tree = spec.tree
    tree["swarm"] |= {"replicas": full, "pipelines": replicas - full}
    if mode is Mode.DATA_PARALLEL:
        tree["rounds"] = spec.total_steps
        tree["inner"]["steps"] = 1
        tree["outer"] |= {"top_k": 0, "quantizer": "none", "overlap": 0, "turns": 1, "merge": "mean"}
        changes = {"average_gradients": True, **changes}
    trial = Trial(RunSpec.from_tree(tree), Variation.model_validate(changes))
    trial.variation.check(trial.spec)
    return trial


def _full_replicas(mode: Mode, replicas: int, fraction: float | None) -> int:
    if mode in (Mode.SPARSELOCO, Mode.UNIFORM):
        if fraction is not None:
            raise ValueError(f"mode {mode.value} takes no fraction of full replicas")
        return replicas if mode is Mode.SPARSELOCO else 0
    if fraction is None:
        fraction = 0.5 if mode is Mode.HETEROGENEOUS else 1.0
    full = round(fraction * replicas)
    if abs(full - fraction * replicas) > 0.01 or not 0 <= full <= replicas:
        raise ValueError(f"a fraction of {fraction:g} gives no whole number of {replicas} replicas")
    if mode is Mode.HETEROGENEOUS and full in (0, replicas):
        raise ValueError(
            f"mode heterogeneous needs both kinds of replicas, not {full} full ones of {replicas}"
        )
    return full
