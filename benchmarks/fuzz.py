"""Random bytes at every decoder of peers' bytes.

    python -m benchmarks.fuzz -runs=1000000 [-workers=2] [-seed=1] [-only=link] [-folder=DIR]
    pip install atheris; python -m benchmarks.fuzz -atheris -runs=1000000  (libFuzzer's options)

Inputs are valid ones of a decoder (:mod:`benchmarks.fuzz_targets`) with changes (:mod:`benchmarks.mutate`).
An input that makes a decoder answer in a new way is changed further. A decoder may refuse with a
HetnodeError, or with the ValueError that it documents. Anything else is a bug: another exception, the end of
the process, more than 1 s of processor time, or 256 MiB more memory. Its input is written to DIR, and the
exit status is 1.

Quick decoders get more inputs than slow ones. With -atheris, libFuzzer chooses the
inputs by the coverage of the code.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.mutate import MAX_BYTES, Mutator

BATCH_SECONDS = 0.05
SLOW_SECONDS = 100e-6
"""Decoders that take longer get a fifth of the time, except for entry points."""
MOST_SECONDS = 1.0
"""Processor time of one input."""
MOST_GROWTH_KIB = 256 << 10
_MAX_CORPUS = 300
_REPORT_SECONDS = 60.0


@dataclass
class Outcome:
    """Counters of one decoder."""

    runs: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    answers: set[object] = field(default_factory=set)


class Fuzzer:
    """Runs inputs in this process.

    Args:
        current: shared memory that holds the input that runs: it survives the end of this process.
    """

    def __init__(self, targets: Sequence[Any], seed: int, folder: Path, current: mmap.mmap) -> None:
        self._targets, self._folder, self._current = targets, folder, current
        self._mutator = Mutator(seed)
        self._corpora = [list(target.seeds) for target in targets]
        self._crashes: set[object] = set()
        self.outcomes = [Outcome() for _ in targets]
        self.failures: list[str] = []

    def run(self, runs: int) -> Iterator[int]:
        """Run about `runs` inputs; yield the size of each batch after it."""
        for index in range(len(self._targets)):
            for data in self._targets[index].seeds:
                self._run_one(index, data)
            if not self.outcomes[index].runs > self.outcomes[index].refused:
                self.failures.append(f"{self._targets[index].name}: no seed is valid")
        most = min(4000, 1 + runs // (5 * len(self._targets)))  # so that a short run reaches all
        done = 0
        while done < runs:
            for index, outcome in enumerate(self.outcomes):
                mean = outcome.seconds / max(1, outcome.runs)
                is_rare = mean > SLOW_SECONDS and not self._targets[index].is_entry_point
                seconds = BATCH_SECONDS / 5 if is_rare else BATCH_SECONDS
                batch = min(max(1, int(seconds / max(mean, 1e-6))), most, runs - done)
                self._run_batch(index, batch)
                done += batch
                yield batch

    def _run_batch(self, index: int, batch: int) -> None:
        target, corpus = self._targets[index], self._corpora[index]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(batch):
            self._run_one(index, self._mutator.mutated(corpus, target.message))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown > MOST_GROWTH_KIB:
            self._fail(index, b"", "memory", f"grew by {grown >> 10} MiB")

    def _run_one(self, index: int, data: bytes) -> None:
        target, outcome = self._targets[index], self.outcomes[index]
        self._current[:6] = index.to_bytes(2, "little") + len(data).to_bytes(4, "little")
        self._current[6 : 6 + len(data)] = data
        began = time.process_time()
        answer: object = None
        try:
            target.decode(data)
        except ValueError as error:
            outcome.refused += 1
            answer = _place_of(error)
        except Exception as error:
            if target.is_refusal(error):
                outcome.refused += 1
                answer = _place_of(error)
            else:
                self._fail(index, data, _place_of(error), traceback.format_exc())
        seconds = time.process_time() - began
        outcome.runs += 1
        outcome.seconds += seconds
        outcome.slowest = max(outcome.slowest, seconds)
        if seconds > MOST_SECONDS:
            self._fail(index, data, "slow", f"took {seconds:.1f} s")
        if answer not in outcome.answers and len(self._corpora[index]) < _MAX_CORPUS:
            outcome.answers.add(answer)
            self._corpora[index].append(data)

    def _fail(self, index: int, data: bytes, signature: object, why: str) -> None:
        """Write the input; the same failure is written once."""
        name = self._targets[index].name
        if (index, signature) in self._crashes:
            return
        self._crashes.add((index, signature))
        self.failures.append(f"{_written(self._folder, name, data)}: {why}")
        print(self.failures[-1], flush=True)


def _place_of(error: BaseException) -> object:
    """The kind of an error and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else None
    return type(error).__name__, place


def _written(folder: Path, name: str, data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"crash-{name.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def _work(runs: int, seed: int, only: str, folder: Path, current: mmap.mmap, results: Connection) -> None:
    """One worker process: sends its outcomes by the name of the decoder every minute, and at its end."""
    from benchmarks.fuzz_targets import targets  # noqa: PLC0415 - after the fork: torch starts threads

    chosen = [target for target in targets() if only in target.name]
    fuzzer = Fuzzer(chosen, seed, folder, current)

    def report(is_over: bool) -> None:
        rows = {
            target.name: (outcome.runs, outcome.refused, outcome.slowest)
            for target, outcome in zip(chosen, fuzzer.outcomes, strict=True)
        }
        results.send((rows, fuzzer.failures, is_over))

    reported = time.monotonic()
    for _ in fuzzer.run(runs):
        if time.monotonic() - reported > _REPORT_SECONDS:
            report(is_over=False)
            reported = time.monotonic()
    report(is_over=True)


def fuzz(runs: int, workers: int = 1, seed: int = 1, only: str = "", folder: Path = Path("crashes")) -> int:
    """Run inputs in worker processes, and print the outcomes. Returns the number of failures."""
    context = multiprocessing.get_context("fork")
    started = []
    for worker in range(workers):
        current = mmap.mmap(-1, MAX_BYTES + 64)
        ours, theirs = context.Pipe(duplex=False)
        share = runs // workers + (worker < runs % workers)
        arguments = (share, seed + worker, only, folder, current, theirs)
        process = context.Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        started.append((process, ours, current))
    total: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    failures = []
    for process, ours, current in started:
        rows: dict[str, tuple[int, int, float]] = {}
        found: list[str] = []
        is_over = False
        with contextlib.suppress(EOFError):
            while not is_over:
                rows, found, is_over = ours.recv()
                print(f"worker {process.pid}: {sum(row[0] for row in rows.values()):,} inputs", flush=True)
        process.join()
        failures += found
        if not is_over:
            index, size = int.from_bytes(current[:2], "little"), int.from_bytes(current[2:6], "little")
            path = _written(folder, f"target-{index}", current[6 : 6 + size])
            failures.append(f"{path}: the process ended with {process.exitcode}")
        for name, row in rows.items():
            total[name] += row[0]
            refused[name] += row[1]
            slowest[name] = max(slowest.get(name, 0.0), row[2])
    print("\n| decoder | inputs | refused | slowest, ms |\n|---|---|---|---|")
    for name, count in total.items():
        print(f"| {name} | {count:,} | {refused[name]:,} | {1000 * slowest[name]:.1f} |")
    print(f"\n{sum(total.values()):,} inputs, {len(failures)} failures")
    print("\n".join(failures))
    return len(failures)


def _fuzz_with_atheris(arguments: Sequence[str]) -> None:
    import atheris  # noqa: PLC0415 - not a dependency of hetnode

    with atheris.instrument_imports(include=["protocol", "coordinator", "node"]):
        from benchmarks.fuzz_targets import targets  # noqa: PLC0415
    all_targets = targets()

    def run_one(data: bytes) -> None:
        if not data:
            return
        target = all_targets[data[0] % len(all_targets)]
        try:
            target.decode(data[1:])
        except Exception as error:
            if not (isinstance(error, ValueError) or target.is_refusal(error)):
                raise

    with tempfile.TemporaryDirectory() as folder:
        for index, target in enumerate(all_targets):
            for number, data in enumerate(target.seeds):
                (Path(folder) / f"{index}-{number}").write_bytes(bytes([index]) + data)
        atheris.Setup([sys.argv[0], *arguments, folder], run_one)
        atheris.Fuzz()


def main() -> None:
    arguments = sys.argv[1:]
    if "-atheris" in arguments:
        arguments.remove("-atheris")
        _fuzz_with_atheris(arguments)
        return
    given = dict(argument.lstrip("-").split("=", 1) for argument in arguments)
    failures = fuzz(
        int(given.pop("runs", "100000")),
        int(given.pop("workers", "1")),
        int(given.pop("seed", "1")),
        given.pop("only", ""),
        Path(given.pop("folder", "crashes")),
    )
    if given:
        sys.exit(f"unknown options: {', '.join(given)}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
