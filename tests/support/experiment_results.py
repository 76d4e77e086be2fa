"""A small matrix of trials, and invented results of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from node.experiment.matrix import Matrix, build_matrix, read_matrix_file
from node.experiment.results import Loss, Result
from node.experiment.trial import Planned

MATRIX = """
title = "A test"
preset = "nano"
replicas = 2
seeds = [0, 1]
validate_every = 1
spec = { rounds = 2, inner.microbatches = 1 }

[[table]]
name = "orderings"
title = "All modes"
baseline = "sparseloco"
orderings = true

[[table.row]]
name = "sparseloco"
mode = "sparseloco"

[[table.row]]
name = "uniform"
mode = "uniform"
k = [8, 4]

[[table]]
name = "ablation"
title = "Ablation"
baseline = "uniform"

[[table.row]]
name = "uniform"
mode = "uniform"
k = 8

[[table.row]]
name = "frozen"
mode = "uniform"
k = 8
variation = { adaptation = false }
"""


def matrix_of(folder: Path, text: str = MATRIX) -> Matrix:
    file = folder / "matrix.toml"
    file.write_text(text)
    return build_matrix(file, read_matrix_file(file), {})


def result_of(planned: Planned, *losses: Loss, plain: Loss = 2.0, seconds: float = 10.0) -> Result:
    """Of `planned`, with these validation losses of its replicas at the end."""
    trial, rounds = planned.trial, planned.trial.spec.rounds
    return Result(
        key=trial.key,
        name=planned.name,
        mode=planned.mode.value,
        seed=planned.seed,
        spec=trial.portable_spec,
        variation=trial.variation.changes,
        train=tuple(5.0 - 2 * done / rounds for done in range(rounds)),
        validation={rounds: losses},
        plain=plain,
        payload_bytes=1000 * rounds,
        link_bytes=2_000_000 * rounds,
        seconds=seconds,
        device="a processor, 1 thread of 2",
        versions={"hetnode": "0.1.0", "torch": "2", "python": "3.11"},
        date="2026-01-02",
    )


def by_key(results: Iterable[Result]) -> dict[str, Result]:
    return {result.key: result for result in results}
