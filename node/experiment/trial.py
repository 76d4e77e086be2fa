"""One trial of an experiment: a run specification, how it departs from the algorithm, and the key of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from node.experiment.variation import Variation, check
from protocol.spec.run import RunSpec


class Mode(StrEnum):
    """Which replicas a trial has, and what they exchange."""

    DATA_PARALLEL = "data-parallel"
    """AdamW on gradients that all replicas average in every step: H = 1, dense."""
    SPARSELOCO = "sparseloco"
    """All replicas are full: no link compresses anything."""
    UNIFORM = "uniform"
    """All replicas are pipelines."""
    HETEROGENEOUS = "heterogeneous"
    """A fraction of the replicas is full, half of them by default."""


@dataclass(frozen=True)
class Trial:
    """What is computed: equal trials give equal bits on one machine.

    Attributes:
        spec: the run. Files that it names must be there when the trial runs; its tokenizer is pinned by hash.
        variation: no part of a real run.
    """

    spec: RunSpec
    variation: Variation = field(default_factory=Variation)

    @cached_property
    def portable_spec(self) -> dict[str, Any]:
        """The spec as JSON, without places of this machine.

        A tokenizer file is its name without ".json" beside its hash; the source is a :func:`portable_source`.
        That of a portable spec is the same again.
        """
        tree = self.spec.model_dump(mode="json")
        data = tree["data"]
        if data["tokenizer"] != "byte":
            data["tokenizer"] = Path(data["tokenizer"]).name.removesuffix(".json")
        data["source"] = portable_source(data["source"])
        return tree

    @cached_property
    def key(self) -> str:
        """sha-256 (hex) of what the trial computes. A later field of Variation does not change it."""
        tree = {"spec": self.portable_spec, "variation": self.variation.changes}
        return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def portable_source(source: str) -> str:
    """A data source without places of this machine.

    Of one at an absolute path the last part is left, and a mark that tells it from others of the same name.
    """
    kind, _, place = source.partition(":")
    if not Path(place).is_absolute():
        return source
    return f"{kind}:{Path(place).name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Planned:
    """A trial that is to be run, under the name by which people know it.

    Attributes:
        validate_every: rounds between two measurements of the validation loss; there is one at the end.
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
        spec: with the H and the rounds of the modes that exchange pseudo-gradients. In data parallel
            training a round is one inner step, of which there are as many.
        replicas: M.
        fraction: of full replicas, where the mode leaves that open: 0 to 1. By default half of them in
            heterogeneous mode, all in data parallel training.
        changes: fields of :class:`Variation`.

    Raises:
        ValueError: the mode does not take that fraction, it makes no whole number of replicas, a field of
            `changes` is wrong, or as :func:`node.experiment.variation.check`.
        HetnodeError: BAD_SPEC.
    """
    full = _full_replicas(mode, replicas, fraction)
    tree = spec.model_dump(mode="json")
    tree["swarm"] |= {"replicas": full, "pipelines": replicas - full}
    if mode is Mode.DATA_PARALLEL:
        tree["rounds"] = spec.total_steps
        tree["inner"]["steps"] = 1
        tree["outer"] |= {"top_k": 0, "quantizer": "none", "overlap": 0}
        changes = {"average_gradients": True, **changes}
    trial = Trial(RunSpec.from_json(json.dumps(tree)), Variation.model_validate(changes))
    check(trial.spec, trial.variation)
    return trial


def _full_replicas(mode: Mode, replicas: int, fraction: float | None) -> int:
    match mode:
        case Mode.SPARSELOCO | Mode.UNIFORM if fraction is not None:
            raise ValueError(f"mode {mode.value} takes no fraction of full replicas")
        case Mode.SPARSELOCO:
            return replicas
        case Mode.UNIFORM:
            return 0
        case Mode.HETEROGENEOUS:
            fraction = 0.5 if fraction is None else fraction
        case Mode.DATA_PARALLEL:
            fraction = 1.0 if fraction is None else fraction
    full = round(fraction * replicas)
    if abs(full - fraction * replicas) > 0.01 or not 0 <= full <= replicas:
        raise ValueError(f"a fraction of {fraction:g} makes no whole number of {replicas} replicas")
    if mode is Mode.HETEROGENEOUS and full in (0, replicas):
        raise ValueError(
            f"mode heterogeneous needs replicas of both kinds, not {full} of {replicas} full ones"
        )
    return full
