"""Questions about the algorithm, answered in one process per trial: ``hetnode experiment``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node import command_runner
from node.cli.family import CommandFamily
from node.cli.options import option, records_as_options, settings_of
from node.cli.output import say
from node.cli.spec import SpecOptions
from node.command_runner import TerminalConsole, bad_option
from node.folder import make_usable
from protocol.run_files.resolve import resolve

if TYPE_CHECKING:
    from node.experiment.matrix import Matrix
    from node.experiment.results import Result
    from node.experiment.trial import Planned, TrialOptions

_VARIATION = "variation."
_VALIDATE_EVERY = 10
"""Rounds between two measurements of the validation loss; one more follows at the end."""

experiment_app = typer.Typer(
    cls=CommandFamily,
    help="Train all replicas of a run on this machine, to compare algorithms. No network takes part.",
    no_args_is_help=True,
)

MatrixArgument = Annotated[Path, typer.Argument(metavar="MATRIX.toml", help="Tables and their trials.")]
Compute = Annotated[
    list[str] | None,
    option(
        "How to compute; may be repeated. jobs: trials at a time, each in its own process. threads: CPU "
        "threads of each; 0 shares the cores among them, and one each with as many jobs as cores is the "
        "fastest for small models. device: such as cpu or cuda. compile=true: torch.compile. "
        "activation_checkpointing=true: less memory, more time. precision: auto, fp32 or bf16. resident: "
        "replicas in the device's memory at a time, the others wait in main memory; 0 keeps "
        "all. save_every: rounds between two saved states; 0 saves once a minute.",
        "--compute",
        metavar="NAME=VALUE",
    ),
]


@experiment_app.callback()
def _out(
    context: typer.Context,
    out: Annotated[
        Path, option("Folder of results.jsonl and of trials under way; also behind the name of the command.")
    ] = Path("runs/experiment"),
) -> None:
    context.obj = out


@experiment_app.command("run")
def experiment_run(
    context: typer.Context,
    matrix: MatrixArgument,
    compute: Compute = None,
    table: Annotated[
        list[str] | None,
        option("Only this table of the matrix; may be repeated.", "--table", metavar="TABLE"),
    ] = None,
    seed: Annotated[
        list[int] | None, option("Only this seed of the matrix; may be repeated.", "--seed")
    ] = None,
    only_list: Annotated[
        bool,
        option("Run nothing: show the rows, their losses, and how long what is left will take.", "--list"),
    ] = False,
) -> None:
    """Run the trials of a matrix that have no result yet, and go on with those that were interrupted.

    Results are added to OUT/results.jsonl, one line each, and the same trial in several tables is run once.
    Ctrl-C, or anything worse, loses what came after a trial was saved last, which is done once a minute or
    so, between two rounds: the same command goes on.
    """
    from node.experiment.matrix import build_matrix, read_matrix_file  # noqa: PLC0415
    from node.experiment.runner import sole_use, train_tokenizers, trials_left_over  # noqa: PLC0415

    out: Path = context.obj
    read = read_matrix_file(matrix)
    narrowed = build_matrix(matrix, read, {}).narrowed(table or (), seed or ())  # says at once what is wrong
    options = _computing(read.compute, compute)
    if only_list:
        _list(matrix, out, [each.name for each in narrowed.tables], narrowed.seeds, options.jobs)
        return
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
            TerminalConsole(highlight=False).print(text, markup=False, soft_wrap=True)
        _run(built.trials, keys, out, options)


def _list(matrix: Path, out: Path, tables: Sequence[str], seeds: Sequence[int], jobs: int) -> None:
    from node.experiment.results import read_results  # noqa: PLC0415
    from node.experiment.runner import results_file  # noqa: PLC0415
    from node.views.experiment import matrix_view  # noqa: PLC0415

    known = read_results([results_file(out)])
    TerminalConsole().print(matrix_view(_matrix_of(matrix, known).narrowed(tables, seeds), known, jobs))


@experiment_app.command("one")
@records_as_options(
    spec_options=("data", "rounds", "inner_steps", "replicas", "pipelines", "stages"),
)
def experiment_one(
    context: typer.Context,
    spec_options: SpecOptions,
    compute: Compute = None,
    mode: Annotated[str, option("data-parallel, sparseloco, uniform or heterogeneous.")] = "heterogeneous",
    fraction: Annotated[
        float | None,
        option("Of full replicas. Default: half of them, or all in data parallel training.", min=0, max=1),
    ] = None,
    replicas: Annotated[int, option("M, replicas of both kinds together.", min=1)] = 4,
) -> None:
    """Run one trial without a matrix file, and print what came of it. One that is known is not run again.

    --set variation.NAME=VALUE departs from the algorithm; node/experiment/variation.py describes how.
    """
    from node.data.tokenizer import pinned  # noqa: PLC0415
    from node.experiment.results import faults_of  # noqa: PLC0415
    from node.experiment.runner import results_file, sole_use  # noqa: PLC0415
    from node.experiment.trial import Mode, Planned, TrialOptions, trial_in_mode  # noqa: PLC0415

    out, given = context.obj, spec_options.given
    changes = {name: value for name, value in given.items() if name.startswith(_VARIATION)}
    settings = {name: value for name, value in given.items() if name not in changes}
    spec = pinned(resolve(spec_options.preset, spec_options.config, settings))
    chosen = command_runner.one_of(Mode, mode, "--mode")
    try:
        named = {name.removeprefix(_VARIATION): value for name, value in changes.items()}
        trial = trial_in_mode(spec, chosen, replicas, fraction, named)
    except ValueError as error:
        raise bad_option(
            f"There is no such trial: {faults_of(error)}.", "See 'hetnode experiment one --help'."
        ) from None
    options = _computing(TrialOptions(), compute)
    planned = Planned(trial, chosen.value, chosen, _VALIDATE_EVERY)
    with sole_use(make_usable(out, "--out")):
        found = _run([planned], {chosen.value: [trial.key]}, out, options)
    _show(found[trial.key], results_file(out))


def _computing(base: TrialOptions, given: Sequence[str] | None) -> TrialOptions:
    """`base` with the options that were given. Raises BAD_OPTION, also for a value out of range."""
    from node.experiment.results import faults_of  # noqa: PLC0415

    chosen = settings_of(given or (), "--compute")
    try:
        return base.model_validate({**base.model_dump(), **chosen})
    except ValueError as error:
        raise bad_option(f"--compute: {faults_of(error)}.", "See 'hetnode experiment run --help'.") from None


@experiment_app.command("report")
def experiment_report(
    context: typer.Context,
    matrix: MatrixArgument,
    results: Annotated[
        list[Path] | None,
        option("Results to read; may be repeated. Default: OUT/results.jsonl."),
    ] = None,
    write: Annotated[Path | None, option("Markdown file. Default: standard output.")] = None,
    figures: Annotated[Path | None, option("Folder of the figures, PNG.")] = None,
) -> None:
    """Make the tables, verdicts and figures of a matrix from its results."""
    from node.experiment.figures import draw_figures  # noqa: PLC0415
    from node.experiment.report import report_of  # noqa: PLC0415
    from node.experiment.results import read_results  # noqa: PLC0415
    from node.experiment.runner import results_file  # noqa: PLC0415

    files = _existing(results or [results_file(context.obj)])
    known = read_results(files)
    built = _matrix_of(matrix, known)
    if write is not None:
        if write.is_dir():
            raise bad_option(f"--write {write} is a folder.", f"Give a file, such as {write}/page.md.")
        make_usable(write.parent, "--write")
    place = _link(figures, write) if figures else ""  # before anything is drawn
    drawn = draw_figures(built, known, make_usable(figures, "--figures")) if figures else []
    links = [(figure, f"{place}/{figure.path.name}") for figure in drawn]
    text = report_of(built, known, _below_here(matrix), links, _out_of(files))
    if write is None:
        say(text, end="")
    else:
        write.write_text(text, encoding="utf-8")


def _run(
    trials: Sequence[Planned], tables: dict[str, list[str]], out: Path, options: TrialOptions
) -> dict[str, Result]:
    """Run those that have no result, and return all results. Raises a trial's failure at the end."""
    from node.experiment.results import read_results  # noqa: PLC0415
    from node.experiment.runner import results_file, run_trials  # noqa: PLC0415
    from node.views.experiment import ExperimentView  # noqa: PLC0415

    console = TerminalConsole(highlight=False)
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


def _matrix_of(file: Path, known: dict[str, Result]) -> Matrix:
    """The matrix with those tokenizers that its results were made with."""
    from node.experiment.matrix import build_matrix, read_matrix_file, tokenizers_of  # noqa: PLC0415

    read = read_matrix_file(file)
    return build_matrix(file, read, tokenizers_of(read, known.values()))


def _show(result: Result, file: Path) -> None:
    from rich.table import Table  # noqa: PLC0415

    from node.experiment.results import loss_text, mean, perplexity  # noqa: PLC0415
    from node.views.run_history import size  # noqa: PLC0415
    from node.views.text import duration  # noqa: PLC0415

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
    TerminalConsole().print(facts)


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
