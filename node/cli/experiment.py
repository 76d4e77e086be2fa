"""Questions about the algorithm, answered in one process per trial: ``hetnode experiment``."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from node import command_runner
from node.cli.options import option, panel, records_as_options
from node.cli.spec import SpecOptions, pinned
from node.command_runner import bad_option
from node.folder import make_usable

if TYPE_CHECKING:
    from node.experiment.matrix import Matrix
    from node.experiment.results import Result
    from node.experiment.trial import Planned, TrialOptions

experiment_app = typer.Typer(
    help="Train all replicas of a run on this machine, to compare algorithms. No network takes part.",
    no_args_is_help=True,
)

MatrixArgument = Annotated[Path, typer.Argument(metavar="MATRIX.toml", help="Tables and their trials.")]
Out = Annotated[Path, option("Folder of results.jsonl and of trials under way.")]
OnlyTables = Annotated[list[str] | None, option("Only this table of the matrix; may be repeated.", "--table")]
OnlySeeds = Annotated[list[int] | None, option("Only this seed of the matrix; may be repeated.", "--seed")]
_computing = panel("Computing")
Jobs = Annotated[int | None, _computing("Trials at a time, each in its own process.", min=1)]


@dataclass(frozen=True)
class ComputeOverrides:
    """Fields of :class:`node.experiment.trial.TrialOptions`; None leaves a value to the matrix."""

    jobs: Jobs = None
    threads: Annotated[
        int | None,
        _computing(
            "CPU threads of each; 0 shares the cores among them. One each with as many jobs as cores "
            "is the fastest for small models.",
            min=0,
        ),
    ] = None
    device: Annotated[str | None, _computing("Torch device, such as cpu or cuda.")] = None
    compile: Annotated[bool | None, _computing("Use torch.compile.")] = None
    activation_checkpointing: Annotated[
        bool | None,
        _computing(
            "Compute activations again in the backward pass: less memory, more time.",
            "--activation-checkpointing/--no-activation-checkpointing",
        ),
    ] = None
    precision: Annotated[str | None, _computing("auto, fp32 or bf16. Auto: bf16 on a GPU.")] = None
    resident: Annotated[
        int | None,
        _computing(
            "Replicas in the device's memory at a time, 0: all. The others wait in main memory, or on the "
            "disk where the device has no other.",
            min=0,
        ),
    ] = None
    save_every: Annotated[
        int | None,
        _computing(
            "Rounds between two saved states of a trial. 0: once a minute, at most 5 % of the time.", min=0
        ),
    ] = None

    def over(self, base: TrialOptions) -> TrialOptions:
        """`base` with the options that were given. Raises BAD_OPTION for a value out of range."""
        from node.experiment.results import faults_of  # noqa: PLC0415

        chosen = {name: value for name, value in vars(self).items() if value is not None}
        try:
            return base.model_validate({**base.model_dump(), **chosen})
        except ValueError as error:
            raise bad_option(f"{faults_of(error)}.", "See 'hetnode experiment run --help'.") from None


_OUT = Path("runs/experiment")


@experiment_app.command("run")
@records_as_options()
def experiment_run(
    matrix: MatrixArgument,
    computing: ComputeOverrides,
    out: Out = _OUT,
    table: OnlyTables = None,
    seed: OnlySeeds = None,
) -> None:
    """Run the trials of a matrix that have no result yet, and go on with those that were interrupted.

    Results are added to OUT/results.jsonl, one line each, and the same trial in several tables is run once.
    Ctrl-C, or anything worse, loses what came after a trial was saved last, which is done once a minute or
    so, between two rounds: the same command goes on.
    """
    from node.experiment.matrix import build_matrix, read_matrix_file  # noqa: PLC0415
    from node.experiment.runner import sole_use, train_tokenizers, trials_left_over  # noqa: PLC0415

    read = read_matrix_file(matrix)
    build_matrix(matrix, read, {}).narrowed(table or (), seed or ())  # what is wrong is said at once
    options = computing.over(read.compute)
    with sole_use(make_usable(out, "--out")):
        whole = build_matrix(matrix, read, train_tokenizers(read, out, table or ()))
        built = whole.narrowed(table or (), seed or ())
        keys = {
            table.name: [planned.trial.key for row in table.rows for planned in row.trials.values()
                         if planned.seed in built.seeds]
            for table in built.tables
        }  # fmt: skip
        if left := trials_left_over(out, {planned.trial.key for planned in whole.trials}):
            text = f"{len(left)} saved in {out / 'trials'}, of trials that are not in this matrix (any more)"
            Console(highlight=False).print(text, markup=False, soft_wrap=True)
        _run(built.trials, keys, out, options)


@experiment_app.command("one")
@records_as_options(spec_options=("replicas", "pipelines"), computing=("jobs",))
def experiment_one(
    spec_options: SpecOptions,
    computing: ComputeOverrides,
    mode: Annotated[str, option("data-parallel, sparseloco, uniform or heterogeneous.")] = "heterogeneous",
    fraction: Annotated[
        float | None,
        option("Of full replicas. Default: half of them, or all in data parallel training.", min=0, max=1),
    ] = None,
    replicas: Annotated[int, option("M, replicas of both kinds together.", min=1)] = 4,
    variation: Annotated[
        list[str] | None, option("A departure from the algorithm; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    validate_every: Annotated[
        int, option("Rounds between two measurements of the validation loss.", min=1)
    ] = 10,
    out: Out = _OUT,
) -> None:
    """Run one trial without a matrix file, and print what came of it. One that is known is not run again."""
    from node.experiment.results import faults_of  # noqa: PLC0415
    from node.experiment.runner import results_file, sole_use  # noqa: PLC0415
    from node.experiment.trial import Mode, Planned, TrialOptions, trial_in_mode  # noqa: PLC0415

    spec = pinned(spec_options.spec())
    chosen = command_runner.one_of(Mode, mode, "--mode")
    try:
        changes: dict[str, Any] = {}
        for each in variation or ():
            changes |= tomllib.loads(each)
        trial = trial_in_mode(spec, chosen, replicas, fraction, changes)
    except ValueError as error:
        raise bad_option(
            f"There is no such trial: {faults_of(error)}.", "See 'hetnode experiment one --help'."
        ) from None
    options = computing.over(TrialOptions())
    planned = Planned(trial, chosen.value, chosen, validate_every)
    with sole_use(make_usable(out, "--out")):
        found = _run([planned], {chosen.value: [trial.key]}, out, options)
    _show(found[trial.key], results_file(out))


@experiment_app.command("list")
def experiment_list(
    matrix: MatrixArgument,
    out: Out = _OUT,
    results: Annotated[list[Path] | None, option("Other results files; may be repeated.")] = None,
    table: OnlyTables = None,
    seed: OnlySeeds = None,
    jobs: Jobs = None,
) -> None:
    """Show the rows of a matrix, their losses where they are known, and how long what is left will take."""
    from node.experiment.results import read_results  # noqa: PLC0415
    from node.experiment.runner import results_file  # noqa: PLC0415
    from node.views.experiment import matrix_view  # noqa: PLC0415

    files = [results_file(out), *_existing(results or ())]
    known = read_results(files)
    built, jobs_of_matrix = _matrix_of(matrix, known)
    Console().print(matrix_view(built.narrowed(table or (), seed or ()), known, jobs or jobs_of_matrix))


@experiment_app.command("report")
def experiment_report(
    matrix: MatrixArgument,
    results: Annotated[
        list[Path] | None,
        option("Results to read; may be repeated. Default: results.jsonl in runs/experiment."),
    ] = None,
    write: Annotated[Path | None, option("Markdown file. Default: standard output.")] = None,
    figures: Annotated[Path | None, option("Folder of the figures, PNG.")] = None,
) -> None:
    """Make the tables, verdicts and figures of a matrix from its results."""
    from node.experiment.figures import draw_figures  # noqa: PLC0415
    from node.experiment.report import report_of  # noqa: PLC0415
    from node.experiment.results import read_results  # noqa: PLC0415
    from node.experiment.runner import results_file  # noqa: PLC0415

    files = _existing(results or [results_file(_OUT)])
    known = read_results(files)
    built, _ = _matrix_of(matrix, known)
    if write is not None:
        if write.is_dir():
            raise bad_option(f"--write {write} is a folder.", f"Give a file, such as {write}/page.md.")
        make_usable(write.parent, "--write")
    place = _link(figures, write) if figures else ""  # before anything is drawn
    drawn = draw_figures(built, known, make_usable(figures, "--figures")) if figures else []
    links = [(figure, f"{place}/{figure.path.name}") for figure in drawn]
    text = report_of(built, known, _below_here(matrix), links, _out_of(files))
    if write is None:
        sys.stdout.write(text)
    else:
        write.write_text(text, encoding="utf-8")


def _run(
    trials: Sequence[Planned], tables: dict[str, list[str]], out: Path, options: TrialOptions
) -> dict[str, Result]:
    """Run those that have no result, and return all results. Raises a trial's failure at the end."""
    from node.experiment.results import read_results  # noqa: PLC0415
    from node.experiment.runner import results_file, run_trials  # noqa: PLC0415
    from node.views.experiment import ExperimentView  # noqa: PLC0415

    console = Console(highlight=False)
    known = read_results([results_file(out)])
    left = [planned for planned in trials if planned.trial.key not in known]
    console.print(f"{len(trials) - len(left)} of {len(trials)} trials are done, in {out}", markup=False)
    if not left:
        return known
    view = ExperimentView(console, left, tables, known, min(options.jobs, len(left)))
    try:
        with view.live():
            failures = command_runner.run(run_trials(left, out, options, view))
    except command_runner.Interrupted:
        console.print("interrupted: the same command goes on where it was")
        raise
    if failures:
        raise failures[0]
    return read_results([results_file(out)])


def _existing(files: Sequence[Path]) -> Sequence[Path]:
    """`files`, which are all files. Raises BAD_OPTION."""
    for file in files:
        if not file.exists():
            raise bad_option(f"There are no results at {file}.", "Give --results another file.")
        if file.is_dir():
            raise bad_option(
                f"--results {file} is a folder.", f"Give the file, such as {file}/results.jsonl."
            )
    return files


def _out_of(files: Sequence[Path]) -> Path | None:
    """The --out of a run with these results, if it is below the working folder."""
    from node.experiment.runner import results_file  # noqa: PLC0415

    out = files[0].resolve().parent
    is_one = len(files) == 1 and files[0].resolve() == results_file(out)
    return _below_here(out) if is_one and out.is_relative_to(Path.cwd()) else None


def _matrix_of(file: Path, known: dict[str, Result]) -> tuple[Matrix, int]:
    """The matrix with those tokenizers that its results were made with, and its jobs."""
    from node.experiment.matrix import build_matrix, read_matrix_file, tokenizers_of  # noqa: PLC0415

    read = read_matrix_file(file)
    return build_matrix(file, read, tokenizers_of(read, known.values())), read.compute.jobs


def _show(result: Result, file: Path) -> None:
    from rich.table import Table  # noqa: PLC0415

    from node.experiment.results import loss_text, mean, perplexity  # noqa: PLC0415
    from node.views.experiment import duration  # noqa: PLC0415
    from node.views.run_history import size  # noqa: PLC0415

    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "loss", f"{loss_text(result.loss)} nats per token, mean over the replicas' own forward modes"
    )
    if not result.diverged:
        facts.add_row("perplexity", f"{perplexity(result.loss):.3f}")
    facts.add_row("uncompressed", f"{loss_text(mean([result.plain]))} for the same model without links")
    facts.add_row("links", f"{size(result.link_bytes / result.rounds)} per round")
    facts.add_row("payloads", f"{size(result.payload_bytes / result.rounds)} per round")
    facts.add_row("time", f"{duration(result.seconds)} on {result.device}")
    facts.add_row("kept in", str(file))
    Console().print(facts)


def _below_here(file: Path) -> Path:
    """`file` relative to the working folder, or its name alone: a page holds no absolute path."""
    here = Path.cwd()
    return file.resolve().relative_to(here) if file.resolve().is_relative_to(here) else Path(file.name)


def _link(figures: Path, page: Path | None) -> str:
    """How `page` refers to the folder `figures`. Raises HetnodeError BAD_OPTION."""
    if page is None:
        return figures.as_posix()
    try:
        return figures.resolve().relative_to(page.resolve().parent).as_posix()
    except ValueError:
        raise bad_option(
            f"The figures in {figures} are not below the folder of {page}.", "Give --figures one that is."
        ) from None
