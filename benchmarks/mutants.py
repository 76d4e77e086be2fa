"""Faults planted in the core, one at a time: each must make the named tests fail.

    python -m benchmarks.mutants                 # all of them, some minutes
    python -m benchmarks.mutants --only sampling quorum

The tree is copied once. A mutant replaces one expression in the copy, and the tests that guard this
expression run there. The exit status is 1 if a mutant survives. A test keeps this table fresh: each
expression occurs once in its file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_STAGE = "node/core/optimizer/outer_stage.py"
_OUTER_TESTS = ("tests/node/core/optimizer", "tests/node/core/worker/test_trainer.py")
_ROUNDS = "coordinator/run/rounds"
_ROUND_TESTS = ("tests/coordinator/run/rounds",)
_MATH_TESTS = ("tests/protocol/math",)


@dataclass(frozen=True)
class Mutant:
    """A planted fault: in `file`, `sound` becomes `faulty`; one of `tests` must fail."""

    file: str
    sound: str
    faulty: str
    tests: tuple[str, ...]


MUTANTS = {
    "direction of progress": Mutant(
        _STAGE,
        "learned = torch.sub(to_device(anchor[run], device), local[run], out=in_place)",
        "learned = torch.sub(local[run], to_device(anchor[run], device), out=in_place)",
        _OUTER_TESTS,
    ),
    "decay of error feedback": Mutant(
        _STAGE, "alpha=self._outer.error_decay)", "alpha=1.0)", ("tests/node/core/optimizer",)
    ),
    "error feedback of a commit without the own payload": Mutant(
        _STAGE,
        'if pending is not None:\n            self.error = pending["error"]',
        'if self.pending is not None:\n            self.error = self.pending["error"]',
        _OUTER_TESTS,
    ),
    "local follows the anchor": Mutant(
        _STAGE,
        "local[name].add_((committed[name] - anchor)",
        "local[name].add_((anchor - committed[name])",
        _OUTER_TESTS,
    ),
    "abort forgets": Mutant(
        _STAGE,
        "        self.pending = None\n        self.received.clear()",
        "        self.received.clear()",
        _OUTER_TESTS,
    ),
    "clipped part stays in the error": Mutant(
        _STAGE,
        "for name, rest in unsent.items() if part > 0.0 else ():",
        "for name, rest in ():",
        _OUTER_TESTS,
    ),
    "reset of the error": Mutant(_STAGE, "            self.error[name].zero_()\n", "", _OUTER_TESTS),
    "mean over weights": Mutant(
        "protocol/math/outer_step.py",
        "total_weight, factors = math.fsum(weights),",
        "total_weight, factors = float(len(weights)),",
        (*_MATH_TESTS, *_OUTER_TESTS),
    ),
    "bound of a radial merge": Mutant(
        "protocol/math/outer_step.py",
        "length = math.sqrt(max(actual, math.fsum(norm * norm for norm in norms)))",
        "length = math.sqrt(actual)",
        _MATH_TESTS,
    ),
    "overflow of the sum": Mutant(
        "protocol/math/outer_step.py",
        "if not all(tensor.isfinite().all() for tensor in (moved[name], *state.values())):",
        "if False:",
        (*_OUTER_TESTS, "tests/protocol/math"),
    ),
    "order of tensors in a digest": Mutant(
        "protocol/math/outer_step.py",
        "for name in sorted(parameters):",
        "for name in parameters:",
        (*_MATH_TESTS, *_OUTER_TESTS, "tests/protocol/codec"),
    ),
    "median of two": Mutant(
        "protocol/math/clipping.py", "(len(positive) - 1) // 2", "len(positive) // 2", _MATH_TESTS
    ),
    "bound of a norm": Mutant(
        "protocol/math/clipping.py", "if norm > bound else 1.0", "if norm < bound else 1.0", _MATH_TESTS
    ),
    "refusal of a norm": Mutant(
        "protocol/math/clipping.py",
        "if norm > REFUSE_FACTOR * median",
        "if norm > REFUSE_FACTOR * norm",
        _MATH_TESTS,
    ),
    "sampling": Mutant(
        "protocol/math/sampling.py",
        "+ sum(sizes[:position])",
        "+ sum(sizes[:position + 1])",
        (*_MATH_TESTS, "tests/coordinator/placement/test_start.py"),
    ),
    "samples of the next plan": Mutant(
        "protocol/math/sampling.py",
        "(next_round - plan.from_round)",
        "(next_round - plan.from_round + 1)",
        _MATH_TESTS,
    ),
    "turns": Mutant(
        "protocol/math/turns.py",
        "stage % turns == round_number % turns",
        "stage % turns != round_number % turns",
        (*_MATH_TESTS, *_ROUND_TESTS),
    ),
    "momentum": Mutant(
        "protocol/math/outer_optimizer.py",
        'state["momentum"].mul(self.momentum)',
        'state["momentum"].mul(1.0)',
        _MATH_TESTS,
    ),
    "what a link cannot carry": Mutant(
        "protocol/math/subspace.py",
        "table_vd - (table_vd @ basis_dk) @ basis_dk.T",
        "table_vd",
        (*_MATH_TESTS, "tests/node/core/model"),
    ),
    "lost table of a link": Mutant(
        "protocol/math/subspace.py",
        " + self.perpendicular_vd[ids_bl]",
        "",
        (*_MATH_TESTS, "tests/node/core/model"),
    ),
    "two payloads for one round": Mutant(
        f"{_ROUNDS}/rounds.py",
        "if offered is not None and contradict(offered, descriptor):",
        "if False and offered is not None:",
        (*_ROUND_TESTS, "tests/coordinator/membership/test_strikes.py"),
    ),
    "payloads of strangers to the plan": Mutant(
        f"{_ROUNDS}/rounds.py",
        "        check_host(transaction.state, descriptor.owner, stage, round_number)\n",
        "",
        (*_ROUND_TESTS, "tests/coordinator/test_decide_machine.py"),
    ),
    "quorum": Mutant(
        f"{_ROUNDS}/rounds.py",
        "if not counts(round_state, holdings, descriptor.owner):",
        "if False:",
        _ROUND_TESTS,
    ),
    "another anchor": Mutant(
        f"{_ROUNDS}/rounds.py", "if descriptor.anchor_digest != expected:", "if False:", _ROUND_TESTS
    ),
    "stalled run": Mutant(
        f"{_ROUNDS}/rounds.py",
        "return is_open and state.opened_at is None and not state.has_complete_replica(round_number)",
        "return False",
        (*_ROUND_TESTS, "tests/coordinator/placement/test_stall.py"),
    ),
    "majority of digests": Mutant(
        f"{_ROUNDS}/attestation.py",
        "if most and (not others or most > others[0][1]):",
        "if most:",
        (*_ROUND_TESTS, "tests/coordinator/membership"),
    ),
}


def survives(mutant: Mutant, tree: Path) -> bool:
    """Whether all tests of a mutant pass in `tree`, which is as it was before when this returns."""
    path = tree / mutant.file
    sound = path.read_text()
    path.write_text(sound.replace(mutant.sound, mutant.faulty))
    try:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            *mutant.tests,
        ]
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(
                f"The tests of {mutant} could not run.\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done.returncode == 0
    finally:
        path.write_text(sound)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MUTANTS, default=list(MUTANTS))
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for name in ("protocol", "coordinator", "node", "hetnode", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for name in parser.parse_args().only:
            is_alive = survives(MUTANTS[name], tree)
            survivors += [name] * is_alive
            print(f"{'SURVIVES' if is_alive else 'killed'}: {name}", flush=True)
    print(f"{len(survivors)} survive")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
