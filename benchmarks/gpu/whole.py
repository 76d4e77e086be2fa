"""The parts of ``make gpu`` that run whole programs: the tests of CUDA, and a swarm on one card."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.setting import Measured, Setting, command_of
from benchmarks.tables import NotHere, Table
from node.views.run_history import history_of, read_events
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Role
from tests.support.processes import ProcessSwarm

_ROOT = Path(__file__).parents[2]
_WORKER = "tests/node/core/worker"
_TESTS = (f"{_WORKER}/test_cuda.py", f"{_WORKER}/test_compute.py", "tests/node/core/model")
_MEMBERS = {"full": Role.REPLICA, "first": Role.STAGE, "last": Role.STAGE}


def measure_tests(setting: Setting) -> Measured:
    """The tests of what must hold on a GPU."""
    chosen = _TESTS[:1] if setting.toy else _TESTS
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rfs", *chosen]
    done = subprocess.run(command, check=False, cwd=_ROOT, capture_output=True, text=True)
    if "unrecognized arguments" in done.stderr or "No module named" in done.stderr:
        raise NotHere(done.stderr.strip().splitlines()[-1])
    last = done.stdout.strip().splitlines()[-1]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if done.returncode:
        raise RuntimeError(f"The tests failed.\n{done.stdout[-6000:]}\n{done.stderr[-1000:]}")
    rows = tuple((kind, str(count)) for kind, count in counts.items())
    again = f"python -m pytest {' '.join(chosen)}"
    return Table("Tests on the device", again, ("outcome", "tests"), rows), counts


def measure_swarm(setting: Setting) -> Measured:
    """A real swarm on one card: a coordinator, a full replica and a pipeline of two members."""
    for name in ("hivemind", "pydantic", "cryptography"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise NotHere(f"The transport needs {error.name}, which is not installed") from None
    overrides = {"swarm.replicas": 1, "swarm.pipelines": 1, "swarm.stages": 2, "rounds": 4}
    overrides |= {"link.dtype": "dither5"}
    if not setting.toy:
        overrides |= {"model.width": 1024, "model.layers": 12, "model.heads": 8, "model.feed_forward": 2816}
        overrides |= {"model.context": 1024, "link.k": 128, "inner.steps": 20, "inner.microbatches": 4}
        overrides |= {"inner.microbatch_size": 4}
    spec = resolve("nano" if setting.toy else "tiny", overrides=overrides)
    # The folder is short, because the paths of sockets must be.
    with tempfile.TemporaryDirectory(prefix="g-") as folder, _CardSwarm(setting, spec, Path(folder)) as swarm:
        start = time.monotonic()
        swarm.start()
        swarm.wait_over(220)
        seconds = time.monotonic() - start
        events = read_events(swarm.run / "metrics.jsonl")
    history = history_of(events)
    if history.diverged or history.aborted or history.committed != spec.rounds * spec.swarm.stages:
        raise RuntimeError(f"The swarm did not commit every round: {history}.")
    figures = {
        "seconds": seconds,
        "rounds": spec.rounds,
        "tokens": history.tokens,
        "measurements": [event for event in events if event["event"] == "measurement"],
        "losses": {f"replica {replica.index}": replica.losses for replica in history.replicas},
    }
    rows = [("committed decisions", str(history.committed)), ("seconds with the start", f"{seconds:.0f}")]
    rows += [
        (f"validation loss of replica {replica.index}", " ".join(f"{loss:.3f}" for _, loss in replica.losses))
        for replica in history.replicas
    ]
    title = "A swarm on one card: a full replica, a pipeline of two"
    return Table(title, command_of("swarm"), ("what", "figure"), tuple(rows)), figures


class _CardSwarm(ProcessSwarm):
    """Processes whose nodes all compute on one device."""

    def __init__(self, setting: Setting, spec: RunSpec, folder: Path) -> None:
        super().__init__(spec, folder, dict(_MEMBERS))
        self._device = setting.device

    def compute_options(self, name: str) -> Sequence[str]:
        return ("--device", self._device)
