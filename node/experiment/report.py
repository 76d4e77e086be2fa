"""The page on a matrix: how its results were made, its tables, the verdicts on them, its figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from node.experiment.comparison import MEAN, Verdict, deltas_of, verdicts_of
from node.experiment.figures import Figure
from node.experiment.matrix import Matrix, Row, Table, fraction_of
from node.experiment.results import Result, perplexity

_HOW_TO_READ = """\
**How to read it.** A loss is in nats per token of held-out text after the last round, the mean over all
replicas, *each in its own forward mode*: a full replica computes without compression, a pipeline through
its compressed links; "of pipelines" is the mean over the pipelines alone. "Uncompressed" is the loss of
the same final parameters where no link compresses anything; models that were trained with links expect
them, so that it can be larger. Perplexity is exp(loss) of the mean over seeds. "Delta" is the excess
over the loss of the row that it is compared with, seed by seed: the mean, and in brackets the range over
seeds. Runs of one seed see the same data and start alike, but training is chaotic, and a difference that
is smaller than what seeds differ in says nothing. Bytes count all replicas together: "links" the frames
between members in both directions, "payloads" the pseudo-gradients, each once. MB are 10^6 bytes. What
the paper says is of larger models, other data and longer training; only the order of the rows can be
compared."""


def report_of(
    matrix: Matrix,
    results: Mapping[str, Result],
    source: Path,
    figures: Sequence[tuple[Figure, str]] = (),
    out: Path | None = None,
) -> str:
    """The whole page, GitHub Markdown.

    Args:
        matrix: the tables.
        results: by key of their trial; what is missing is left out and said.
        source: the matrix file, as it is named in commands.
        figures: and how the page refers to each.
        out: the folder of the results, as it is named in commands; by default one in runs.
    """
    used = [results[each.trial.key] for each in matrix.trials if each.trial.key in results]
    parts = [f"# {matrix.title}", *matrix.text, _made(matrix, used, source, out), _HOW_TO_READ]
    verdicts = {table.name: verdicts_of(table, results) for table in matrix.tables if table.orderings}
    if verdicts:
        # A claim that two tables make of the same rows counts once.
        once = {
            (verdict.claim, str(verdict.answers)): verdict for each in verdicts.values() for verdict in each
        }
        parts += ["## Verdicts", _summary(list(once.values()))]
    for table in matrix.tables:
        parts += [f"## {table.title}"]
        parts += [table.text] if table.text else []
        parts += [_table(table, matrix.seeds, results)]
        parts += [_verdict_table(verdicts[table.name], matrix.seeds)] if table.name in verdicts else []
        parts += ["\n".join(f"- {note}" for note in table.notes)] if table.notes else []
        parts += [f"![{figure.caption}]({link})" for figure, link in figures if figure.table == table.name]
    rest = [(figure, link) for figure, link in figures if figure.table is None]
    parts += ["## Figures"] if rest else []
    parts += [f"![{figure.caption}]({link})" for figure, link in rest]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _made(matrix: Matrix, used: Sequence[Result], source: Path, out: Path | None) -> str:
    """What was run, on what, and how to run it again."""
    out = out or Path("runs", source.stem)
    again = (
        f"    {matrix.made_with}"
        if matrix.made_with
        else (
            f"    hetnode experiment run {source} --out {out}\n"
            f"    hetnode experiment report {source} --results {out}/results.jsonl \\\n"
            f"        --write {out}/page.md --figures {out}/figures"
        )
    )
    if not used:
        return (
            f"**How it was made.** None of {len(matrix.trials)} trials was run yet. To run them:\n\n{again}"
        )
    dates = sorted({result.date for result in used})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    versions = sorted(
        {", ".join(f"{name} {number}" for name, number in result.versions.items()) for result in used}
    )
    hours = sum(result.seconds for result in used) / 3600
    count = f"{len(used)} of {len(matrix.trials)}" if len(used) < len(matrix.trials) else f"All {len(used)}"
    devices = "; ".join(sorted({result.device for result in used}))
    return (
        f"**How it was made.** {count} trials were run, {when}, on {devices} ({'; '.join(versions)}): "
        f"{hours:.1f} hours of computing. All replicas of a trial live in one process and are computed one "
        "after the other by the code of real members; what would go over a link or into a round is packed "
        "and unpacked as on the wire. To make it again, or to go on where that was interrupted:"
        f"\n\n{again}"
    )


def _summary(verdicts: Sequence[Verdict]) -> str:
    known = [verdict for verdict in verdicts if verdict.is_known]
    against = [verdict for verdict in known if not verdict.holds]
    unknown = [verdict for verdict in verdicts if not verdict.is_known]
    lines = []
    if known:
        lines.append(
            f"{len(known) - len(against)} of {len(known)} orderings hold, for every seed and on the mean."
        )
    for verdict in against:
        failing = [_seed_name(seed) for seed, answer in verdict.answers.items() if not answer.holds]
        lines.append(f"**It does not hold** that {verdict.claim}: {', '.join(failing)}.")
    for verdict in unknown:
        lines.append(f"Not known yet, since trials are missing or diverged: {verdict.claim}.")
    return "\n".join(f"- {line}" for line in lines)


def _verdict_table(verdicts: Sequence[Verdict], seeds: Sequence[int]) -> str:
    columns = ["ordering", *(f"seed {seed}" for seed in seeds), "mean over seeds"]
    rows = []
    keys: list[int | str] = [*seeds, MEAN]
    for verdict in verdicts:
        cells = []
        for seed in keys:
            answer = verdict.answers.get(seed)
            words = "" if answer is None else "holds" if answer.holds else "**does not hold**"
            cells.append(f"{words} ({answer.numbers})" if answer else "not known")
        rows.append([verdict.claim, *cells])
    return markdown_table(columns, rows)


def _table(table: Table, seeds: Sequence[int], results: Mapping[str, Result]) -> str:
    has_paper = any(row.paper for row in table.rows)
    is_mixed = any(_is_mixed(result) for row in table.rows for result in _known(row, results))
    columns = [
        "row",
        "k/d",
        "loss",
        *(f"seed {seed}" for seed in seeds),
        "perplexity",
        "delta %",
        *(["of pipelines"] if is_mixed else []),
        "uncompressed",
        "links (MB/round)",
        "payloads (MB/round)",
        *(["paper"] if has_paper else []),
    ]
    rows = []
    for row in table.rows:
        found = [results.get(row.trials[seed].trial.key) for seed in seeds]
        measured = [result for result in found if result is not None]
        losses = [result.loss for result in measured]
        rows.append(
            [
                row.name,
                "" if row.k is None else fraction_of(row.k, row.width),
                _mean(losses, seeds),
                *(_loss(None if result is None else result.loss) for result in found),
                _perplexity(losses, seeds),
                _delta(table, row, seeds, results),
                *([_mean(_of_pipelines(measured), seeds)] if is_mixed else []),
                _mean([math.nan if result.plain is None else result.plain for result in measured], seeds),
                _megabytes([result.link_bytes / result.rounds for result in measured]),
                _megabytes([result.payload_bytes / result.rounds for result in measured]),
                *([row.paper] if has_paper else []),
            ]
        )
    return markdown_table(columns, rows)


def _delta(table: Table, row: Row, seeds: Sequence[int], results: Mapping[str, Result]) -> str:
    deltas = list(deltas_of(table, row, seeds, results).values())
    if not deltas:
        return ""
    spread = f" ({min(deltas):+.2f} .. {max(deltas):+.2f})" if len(deltas) > 1 else ""
    against = "" if row.baseline == _usual_baseline(table) else f" over {row.baseline}"
    return f"{statistics.fmean(deltas):+.2f}{spread}{against}{_share(deltas, seeds)}"


def _usual_baseline(table: Table) -> str:
    """What all rows of the table are compared with; "" where they differ in that."""
    named = {row.baseline for row in table.rows if row.baseline != row.name}
    return named.pop() if len(named) == 1 else ""


def _known(row: Row, results: Mapping[str, Result]) -> list[Result]:
    return [results[each.trial.key] for each in row.trials.values() if each.trial.key in results]


def _is_mixed(result: Result) -> bool:
    """Whether it has full and pipeline replicas, whose losses are measured in different modes."""
    swarm = result.spec["swarm"]
    return bool(swarm["replicas"] and swarm["pipelines"])


def _of_pipelines(measured: Sequence[Result]) -> list[float]:
    return [loss for result in measured if (loss := result.pipeline_loss) is not None]


def _mean(losses: Sequence[float], seeds: Sequence[int]) -> str:
    """Of as many as there are, and how many that is where it is not one for every seed."""
    return _loss(statistics.fmean(losses)) + _share(losses, seeds) if losses else ""


def _perplexity(losses: Sequence[float], seeds: Sequence[int]) -> str:
    """Of the mean over all seeds."""
    if len(losses) < len(seeds):
        return ""
    loss = statistics.fmean(losses)
    return "" if math.isnan(loss) else f"{perplexity(loss):.3f}"


def _share(found: Sequence[float], seeds: Sequence[int]) -> str:
    return "" if len(found) == len(seeds) else f" ({len(found)} of {len(seeds)} seeds)"


def _loss(loss: float | None) -> str:
    if loss is None:
        return ""
    return "diverged" if math.isnan(loss) else f"{loss:.4f}"


def _megabytes(each: Sequence[float]) -> str:
    return f"{statistics.fmean(each) / 1e6:.3f}" if each else ""


def _seed_name(seed: int | str) -> str:
    return "the mean over seeds" if seed == MEAN else f"seed {seed}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
                     for cells in [columns, rule, *rows])  # fmt: skip
