"""The cost of compression and overlap in validation loss: links, codecs and overlap on a small model.

    python -m benchmarks.losses                            # all, two seeds: 5 minutes a run, 2 hours
    python -m benchmarks.losses --only links --seeds 0     # three runs
    python -m benchmarks.losses --quick                    # a short schedule, one seed: a minute a run
    python -m benchmarks.losses --report                   # the results so far; measures nothing

Two full replicas and two pipelines of four members train a LLaMA of 0.9M parameters on the builtin corpus, 30
rounds of 10 inner steps, all of it with the production code in one process (node.experiment). Every run is
appended to the results file. A run with a result there is not measured again.

Runs of one seed have the same data and the same start. But training is chaotic, and a different rounding soon
changes all bits: the losses of links in bf16 and fp32 differ by 0.7 %. A smaller difference means little for
one seed; read the mean over seeds together with its range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import Table, machine
from node.experiment.in_process_swarm import LocalSwarm
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec

SETTINGS: Mapping[str, Any] = {
    "swarm.stages": 4,
    "swarm.replicas": 2,
    "swarm.pipelines": 2,
    "inner.microbatches": 1,
    "inner.microbatch_size": 8,
    "outer.top_k": 128,
    "link.k": 16,
    "data.validation_batches": 16,
}
"""The "tiny" preset (d 128, 4 layers, context 128, H 10, learning rate 3e-3) in four replicas."""

RESULTS = Path("runs/losses.jsonl")
_ROUNDS, _QUICK_ROUNDS = 30, 6


@dataclass(frozen=True)
class Run:
    """One run: the differences from :data:`SETTINGS`. They are written with the result."""

    dtype: str = "bf16"
    overlap: int = 0
    quantizer: str = "2bit"
    codebook: str = "tensor"
    seed: int = 0
    rounds: int = _ROUNDS

    @property
    def spec(self) -> RunSpec:
        return resolve(
            "tiny",
            overrides={
                **SETTINGS,
                "link.dtype": self.dtype,
                "outer.overlap": self.overlap,
                "outer.quantizer": self.quantizer,
                "outer.codebook": self.codebook,
                "seed": self.seed,
                "rounds": self.rounds,
            },
        )


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        losses: validation loss at the end, of every replica in its own forward mode, nats per byte.
        train_loss: of the last round, mean over the replicas.
        payload_bytes: of one round, all replicas.
        link_bytes: of one round, both pipelines; payload of the frames.
        seconds: of the whole run.
    """

    run: Run
    losses: tuple[float, ...]
    train_loss: float
    payload_bytes: int
    link_bytes: int
    seconds: float

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)


CASES: Mapping[str, tuple[Run, ...]] = {
    "links": (Run(), Run(dtype="int8"), Run(dtype="fp32")),
    "overlap": (Run(overlap=2), Run(overlap=5), Run(overlap=9)),
    "codecs": (
        Run(codebook="chunk"),
        Run(quantizer="1bit"),
        Run(quantizer="1bit", codebook="chunk"),
        Run(quantizer="none"),
    ),
}
"""All others are compared with the first."""


def measure(run: Run) -> Result:
    """Train the run to its end."""
    began = time.perf_counter()
    swarm = LocalSwarm(run.spec)
    reports = [swarm.train_round() for _ in range(run.rounds)]
    return Result(
        run,
        tuple(swarm.validate()),
        reports[-1].train_loss,
        reports[0].payload_bytes,
        sum(report.link_bytes for report in reports) // run.rounds,
        time.perf_counter() - began,
    )


def known(file: Path) -> dict[Run, Result]:
    """The results in `file`; none if it does not exist."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = (_result(json.loads(line)) for line in lines)
    return {result.run: result for result in found}


def results(runs: Sequence[Run], file: Path) -> dict[Run, Result]:
    """The results of `runs`. Those that `file` does not have are measured and appended."""
    found = known(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    for run in runs:
        if run not in found:
            found[run] = result = measure(run)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(result)) + "\n")
            print(f"{run}: {result.loss:.4f} after {result.seconds:.0f} s", flush=True)
    return {run: found[run] for run in runs}


def table(
    quick: bool,
    groups: Sequence[str] = tuple(CASES),
    seeds: Sequence[int] = (0, 1),
    file: Path = RESULTS,
    report_only: bool = False,
) -> Table:
    """Final losses by case and seed. Missing results are measured, or left out with `report_only`."""
    rounds, seeds = (_QUICK_ROUNDS, seeds[:1]) if quick else (_ROUNDS, seeds)
    base, *_ = CASES["links"]
    cases = list(dict.fromkeys([base, *(case for group in groups for case in CASES[group])]))
    # Seed by seed, so that an incomplete series can be compared.
    runs = [replace(case, seed=seed, rounds=rounds) for seed in seeds for case in cases]
    found = known(file) if report_only else results(runs, file)

    def row(case: Run) -> tuple[str, ...]:
        measured = [found.get(replace(case, seed=seed, rounds=rounds)) for seed in seeds]
        usual = [found.get(replace(base, seed=seed, rounds=rounds)) for seed in seeds]
        excess = [100 * (a.loss / b.loss - 1) for a, b in zip(measured, usual, strict=True) if a and b]
        any_seed = next((result for result in measured if result), None)
        return (
            case.dtype,
            f"{case.quantizer}, {case.codebook}" if case.quantizer != "none" else "none",
            str(case.overlap),
            *(f"{result.loss:.4f}" if result else "" for result in measured),
            f"{statistics.fmean(excess):+.2f} % ({min(excess):+.2f} .. {max(excess):+.2f})" if excess else "",
            f"{any_seed.payload_bytes / 1000:.1f}" if any_seed else "",
            f"{any_seed.link_bytes / 1000:.0f}" if any_seed else "",
        )

    return Table(
        "Validation loss by compression and overlap",
        "python -m benchmarks.losses" + " --quick" * quick,
        (
            "link",
            "quantizer, codebook",
            "overlap (steps)",
            *(f"loss, seed {seed}" for seed in seeds),
            "against the first row (range over seeds)",
            "payloads (kB/round)",
            "links (kB/round)",
        ),
        tuple(map(row, cases)),
        (
            f"Nats per byte of held-out text after {rounds} rounds of 10 inner steps, mean over two full and "
            "two pipeline replicas, each in its own forward mode.",
            f"Measured {machine()}.",
        ),
    )


def _result(fields: Mapping[str, Any]) -> Result:
    return Result(**{**fields, "run": Run(**fields["run"]), "losses": tuple(fields["losses"])})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines; not measured again")
    parser.add_argument("--report", action="store_true", help="of the results there are; measure nothing")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(table(given.quick, given.only, given.seeds, given.results, given.report).markdown)


if __name__ == "__main__":
    main()
