"""Trials run in processes of their own, may be killed at any moment, and come to the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from node.cli.experiment import experiment_app
from node.experiment.matrix import Matrix, build_matrix, read_matrix_file
from node.experiment.results import Result, append, read_results
from node.experiment.resumable_trial import ResumableTrial, RoundRecord
from node.experiment.runner import results_file, run_trials
from node.experiment.trial import Mode, Planned, TrialOptions, trial_in_mode
from node.ipc.template import ForkedProcess
from protocol.errors import ErrorCode, ExitCode, HetnodeError
from protocol.run_files.resolve import resolve
from tests.support import commands
from tests.support.experiment_results import result_of
from tests.support.waiting import wait_until

MATRIX = """
title = "A test"
preset = "nano"
replicas = 2
validate_every = 2
compute = { threads = 1, save_every = 1 }
spec = { rounds = 6, inner.microbatches = 1, data.source = "text:corpus.txt" }

[[table]]
name = "orderings"
title = "All modes"
baseline = "sparseloco"
orderings = true

[[table.row]]
name = "sparseloco"
mode = "sparseloco"

[[table.row]]
name = "heterogeneous"
mode = "heterogeneous"

[[table]]
name = "mixed"
title = "Mixed"

[[table.row]]
name = "heterogeneous"
mode = "heterogeneous"
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(3000)))
    return file


@pytest.fixture
def long_folder(folder: Path) -> Path:
    """Trials with 10 rounds: they still run when the test sees the first save."""
    (folder / "matrix.toml").write_text(MATRIX.replace("rounds = 6", "rounds = 10"))
    return folder


@pytest.fixture
def folder(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the matrix, in which commands are run."""
    (tmp_path / "matrix.toml").write_text(MATRIX)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(corpus: Path, mode: Mode = Mode.HETEROGENEOUS, **overrides: Any) -> Planned:
    fields = {"rounds": 4, "inner.microbatches": 1, "data.source": f"text:{corpus}", **overrides}
    return Planned(trial_in_mode(resolve("nano", overrides=fields), mode, 2), mode.value, mode, 2)


def options(**fields: Any) -> TrialOptions:
    return TrialOptions(threads=1, **fields)


def finished(measurement: ResumableTrial) -> Result:
    while not measurement.done:
        measurement.advance()
    return measurement.result()


def bits(result: Result) -> dict[str, Any]:
    """What has to be the same whenever a trial is computed."""
    return result.model_dump(exclude={"seconds", "date"})


class Quiet:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def began(self, planned: Planned, done: int) -> None:
        self.said.append(("began", planned.name))

    def advanced(self, planned: Planned, round_number: int, record: RoundRecord) -> None:
        pass

    def finished(self, planned: Planned, result: Result) -> None:
        self.said.append(("finished", planned.name))

    def failed(self, planned: Planned, error: Exception) -> None:
        self.said.append(("failed", planned.name))


def test_a_result_holds_the_losses_the_bytes_and_how_they_were_computed(corpus: Path, tmp_path: Path) -> None:
    trial = planned(corpus)
    result = finished(ResumableTrial(trial, tmp_path / "trial", options()))
    assert (result.key, result.rounds, result.seed) == (trial.trial.key, 4, 0)
    assert list(result.validation) == [2, 4]
    full, pipeline = result.losses
    assert full != pipeline
    # A full replica is the uncompressed forward mode.
    assert result.plain == pytest.approx(full, rel=1e-6)
    assert result.link_bytes > 0
    assert result.payload_bytes > 0
    assert result.device.endswith(f"1 thread of {os.cpu_count()}")
    assert str(corpus.parent) not in result.line


def test_a_result_says_that_it_was_computed_in_bf16(corpus: Path, tmp_path: Path) -> None:
    result = finished(ResumableTrial(planned(corpus), tmp_path / "trial", options(precision="bf16")))
    assert result.device.endswith(f"1 thread of {os.cpu_count()}, bf16")


def test_a_trial_goes_on_from_where_it_was_saved_to_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    trial = planned(corpus)
    expected = finished(ResumableTrial(trial, tmp_path / "whole", options()))
    halted = ResumableTrial(trial, tmp_path / "halted", options(save_every=2))
    for _ in range(3):
        halted.advance()
    again = ResumableTrial(trial, tmp_path / "halted", options(save_every=2))
    assert again.rounds == halted.rounds[:2]
    assert bits(finished(again)) == bits(expected)


def test_a_history_that_is_ahead_of_the_swarm_is_cut(corpus: Path, tmp_path: Path) -> None:
    """As where the process was killed between the two files."""
    trial, place, early = planned(corpus), tmp_path / "trial", tmp_path / "early"
    halted = ResumableTrial(trial, place, options(save_every=1))
    halted.advance()
    shutil.copytree(place, early)
    halted.advance()
    behind = (early / "history.json").read_bytes()
    shutil.copy(place / "history.json", early)
    assert ResumableTrial(trial, early, options()).rounds == halted.rounds[:1]
    # The other way round cannot happen; the trial starts anew.
    (place / "history.json").write_bytes(behind)
    assert ResumableTrial(trial, place, options()).rounds == []


@pytest.mark.parametrize("damage", ["history", "other trial"])
def test_a_saved_state_that_cannot_be_used_starts_the_trial_anew(
    corpus: Path, tmp_path: Path, damage: str
) -> None:
    trial, place = planned(corpus), tmp_path / "trial"
    ResumableTrial(trial, place, options(save_every=1)).advance()
    if damage == "history":
        (place / "history.json").write_bytes(b"{")
    else:
        trial = planned(corpus, seed=1)
    assert ResumableTrial(trial, place, options()).rounds == []


def test_without_a_number_of_rounds_saving_goes_by_time(corpus: Path, tmp_path: Path) -> None:
    now = 0.0
    measurement = ResumableTrial(planned(corpus), tmp_path / "trial", options(), clock=lambda: now)
    measurement.advance()
    assert not (tmp_path / "trial" / "history.json").exists()
    now = 61.0
    measurement.advance()
    assert (tmp_path / "trial" / "history.json").exists()


def test_a_trial_that_leaves_the_finite_numbers_is_recorded_so(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = ResumableTrial(planned(corpus), tmp_path / "trial", options())
    monkeypatch.setattr(measurement.swarm, "validate", lambda: [2.0, float("nan")])
    result = finished(measurement)
    assert result.diverged
    assert json.loads(result.line)["validation"]["4"] == [2.0, None]


async def test_trials_run_side_by_side_and_one_that_fails_leaves_the_others_alone(
    corpus: Path, tmp_path: Path
) -> None:
    good, lost = planned(corpus, rounds=1), planned(tmp_path / "nowhere.txt", Mode.UNIFORM, rounds=1)
    observer = Quiet()
    failures = await run_trials([lost, good], tmp_path / "out", options(jobs=2), observer)
    assert [error.code for error in failures if isinstance(error, HetnodeError)] == [
        ErrorCode.DATA_UNREADABLE
    ]
    assert read_results([results_file(tmp_path / "out")]).keys() == {good.trial.key}
    assert sorted(observer.said) == [
        ("began", "heterogeneous"),
        ("failed", "uniform"),
        ("finished", "heterogeneous"),
    ]
    assert list((tmp_path / "out" / "trials").glob("*/history.json")) == []


def test_a_run_that_was_killed_goes_on_to_the_same_bits_and_its_workers_end(long_folder: Path) -> None:
    """A real SIGKILL of the parent in mid-trial; the worker ends by itself."""
    folder = long_folder
    only_mixed = ("run", "matrix.toml", "--out", "out", "--table", "mixed")
    running = _command(*only_mixed)
    _saved(folder / "out", running)
    (template,) = psutil.Process(running.pid).children()
    (worker,) = template.children()
    running.kill()
    running.wait()
    worker.wait(timeout=30)
    assert not results_file(folder / "out").exists()
    # The line that a crash has torn is mended as well.
    results_file(folder / "out").write_text('{"format":1,"ke')
    assert "heterogeneous, seed 0: goes on after round" in said(*only_mixed)
    ((key, found),) = read_results([results_file(folder / "out")]).items()
    (planned,) = _matrix(folder).narrowed(["mixed"], []).trials
    assert key == planned.trial.key
    assert not list((folder / "out" / "trials").iterdir())
    assert bits(found) == bits(finished(ResumableTrial(planned, folder / "whole", options())))
    assert said(*only_mixed) == "1 of 1 trials are done, in out\n"


def _matrix(folder: Path) -> Matrix:
    file = folder / "matrix.toml"
    return build_matrix(file, read_matrix_file(file), {})


LOG = Path("log")


def _command(*arguments: str) -> ForkedProcess:
    environment = {**os.environ, **commands.PLAIN}
    return commands.start("experiment", *arguments, log=LOG, environment=environment)


def _saved(out: Path, running: ForkedProcess) -> None:
    """Return as soon as a trial has been saved."""

    def has_saved() -> bool:
        assert running.poll() is None, LOG.read_text()
        return bool(list(out.glob("trials/*/swarm/round-*")))

    wait_until(has_saved, 120, "a saved trial")


def said(*arguments: str) -> str:
    """What a command prints that is run in this process."""
    result = CliRunner().invoke(experiment_app, arguments, env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.output


def refused(code: ErrorCode, *arguments: str) -> str:
    """What the command says that is refused."""
    with pytest.raises(HetnodeError) as caught:
        said(*arguments)
    assert caught.value.code is code
    return f"{caught.value.cause} {caught.value.remedy}"


def test_ctrl_c_ends_a_run_with_all_its_workers_and_says_how_to_go_on(long_folder: Path) -> None:
    folder = long_folder
    running = _command("run", "matrix.toml", "--out", "out", "--table", "mixed")
    _saved(folder / "out", running)
    children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == ExitCode.INTERRUPTED
    words = LOG.read_text()
    assert "interrupted: the same command goes on where it was" in words
    assert "Traceback" not in words
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def test_two_runs_into_one_folder_are_refused(folder: Path) -> None:
    (folder / "out").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD_LOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        for command in (("run", "matrix.toml"), ("one", "--preset", "nano")):
            words = refused(ErrorCode.RUN_FOLDER_IN_USE, *command, "--out", "out")
            assert "Another 'hetnode experiment' writes to out." in words
        holder.communicate("")


_HOLD_LOCK = """
import sys
from pathlib import Path
from node.folder import lock_folder
lock = lock_folder(Path("out"))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_matrix_that_is_wrong_is_refused_before_anything_is_made(folder: Path) -> None:
    (folder / "matrix.toml").write_text(MATRIX.replace("replicas = 2", "replicas = 2\nreplica = 3"))
    words = refused(ErrorCode.BAD_MATRIX, "run", "matrix.toml")
    assert "matrix.toml" in words
    assert "replica:" in words
    assert "none.toml" in refused(ErrorCode.BAD_MATRIX, "run", "--list", "none.toml")
    assert "precision" in refused(
        ErrorCode.BAD_OPTION, "one", "--preset", "nano", "--compute", "precision=fp8"
    )
    assert "none.jsonl" in refused(ErrorCode.BAD_OPTION, "report", "matrix.toml", "--results", "none.jsonl")
    assert not (folder / "runs").exists()


def test_one_trial_needs_no_matrix_and_is_listed_and_reported_like_others(folder: Path) -> None:
    settings = ("rounds=1", "data.source=text:corpus.txt", "variation.weight_projection=true")
    trial = ("--mode", "uniform", "--replicas", "2", *(word for each in settings for word in ("--set", each)))
    one = ("one", "--preset", "nano", *trial, "--compute", "threads=1")
    assert "perplexity" in said(*one, "--out", "out")
    (found,) = read_results([results_file(folder / "out")]).values()
    assert found.variation == {"weight_projection": True}
    assert "1 of 1 trials are done" in said(*one, "--out", "out")
    assert "2 of 2 trials left" in said("run", "--list", "matrix.toml", "--out", "out")
    said("report", "matrix.toml", "--results", "out/results.jsonl", "--write", "docs/page.md",
         "--figures", "docs/page")  # fmt: skip
    assert (folder / "docs" / "page.md").read_text().startswith("# A test")


def test_a_report_that_has_no_place_is_refused_before_anything_is_drawn(folder: Path) -> None:
    results = folder / "out" / "results.jsonl"
    results.parent.mkdir()
    results.touch()
    report = ("report", "matrix.toml", "--results")
    assert "out/results.jsonl" in refused(ErrorCode.BAD_OPTION, *report, "out")
    assert "out/page.md" in refused(ErrorCode.BAD_OPTION, *report, str(results), "--write", "out")
    elsewhere = ("--write", "docs/page.md", "--figures", "figures")
    assert "figures" in refused(ErrorCode.BAD_OPTION, *report, str(results), *elsewhere)
    assert not (folder / "figures").exists()
    assert "hetnode experiment run matrix.toml --out out\n" in said(*report, str(results))


def test_what_is_saved_of_trials_that_are_no_longer_planned_is_mentioned(folder: Path) -> None:
    (planned,) = _matrix(folder).narrowed(["mixed"], []).trials
    append(results_file(folder / "out"), result_of(planned, 2.0))
    other = _matrix(folder).trials[0].trial.key
    (folder / "out" / "trials" / other).mkdir(parents=True)
    only_mixed = ("run", "matrix.toml", "--out", "out", "--table", "mixed")
    assert said(*only_mixed) == "1 of 1 trials are done, in out\n"
    (folder / "out" / "trials" / ("0" * 64)).mkdir()
    assert "1 saved in out/trials, of trials that are not in this matrix" in said(*only_mixed)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--mode", "dense"),
        ("--set", "variation.magic=1"),
        ("--set", "variation.magic"),
        ("--compute", "magic=1"),
        ("--set", "variation.replicas_by_round=[[1,99]]"),
        ("--fraction", "0.3"),
    ],
)
def test_one_trial_that_cannot_be_is_refused(wrong: tuple[str, str], folder: Path) -> None:
    refused(ErrorCode.BAD_OPTION, "one", "--preset", "nano", *wrong)
