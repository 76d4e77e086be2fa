"""The report on a matrix: how its results were made, its tables, verdicts and figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from node.experiment.comparison import MEAN, Claim, SeedAnswer, behind_of, deltas_of, interval_of, verdicts_of
from node.experiment.figures import Figure
from node.experiment.matrix import Matrix, MatrixRow, Table, fraction_of
from node.experiment.results import Result, loss_text, mean

_HOW_TO_READ = """\
**How to read it.** Losses are nats per token of held-out text, the mean of all replicas, *each in its own
forward mode*; "uncompressed" is of the same parameters without links. "Delta" is the excess over the row
compared with: the mean, and the range over two seeds, or the 95 % interval of more (Student's t). "Behind"
says how many rounds before its end that row had the final loss of this one. Below 0, this row had the final
loss of that one so early. MB (10^6 bytes) are of all replicas. Of the paper compare only orders."""


def report_of(
    matrix: Matrix,
    results: Mapping[str, Result],
    source: Path,
    figures: Sequence[tuple[Figure, str]] = (),
    out: Path | None = None,
) -> str:
    """The whole report in GitHub Markdown.

    Args:
        matrix: the tables.
        results: by key of their trial; the report says which are missing.
        source: the matrix file, as a path for commands.
        figures: each with its link.
        out: the folder of the results, as a path for commands; by default one in runs.
    """
    used = [results[each.trial.key] for each in matrix.trials if each.trial.key in results]
    parts = [f"# {matrix.file.title}", *matrix.file.text, _made(matrix, used, source, out), _HOW_TO_READ]
    verdicts = {table.name: verdicts_of(table, results) for table in matrix.tables if table.section.orderings}
    if verdicts:
        # If two tables make the same claim about the same rows, it counts once.
        once = {
            (verdict.claim, str(verdict.answers)): verdict for each in verdicts.values() for verdict in each
        }
        parts += ["## Verdicts", _summary(list(once.values()))]
    for table in matrix.tables:
        section = table.section
        parts += [f"## {section.title}", *([section.text] if section.text else [])]
        parts += [_table(table, matrix.seeds, results)]
        parts += [_verdict_table(verdicts[table.name], matrix.seeds)] if table.name in verdicts else []
        parts += ["\n".join(f"- {note}" for note in section.notes)] if section.notes else []
        parts += [f"![{figure.caption}]({link})" for figure, link in figures if figure.table == table.name]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _made(matrix: Matrix, used: Sequence[Result], source: Path, out: Path | None) -> str:
    """What was run on which devices, and how to run it again."""
    out = out or Path("runs", source.stem)
    again = matrix.file.made_with or (
        f"hetnode experiment run {source} --out {out}\n"
        f"    hetnode experiment report {source} --results {out}/results.jsonl \\\n"
        f"        --write {out}/page.md --figures {out}/figures"
    )
    planned = len(matrix.trials)
    if not used:
        return f"**How it was made.** None of {planned} trials was run yet. To run them:\n\n    {again}"
    dates = sorted({result.date for result in used})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    versions = sorted({", ".join(map(" ".join, result.versions.items())) for result in used})
    hours = sum(result.seconds for result in used) / 3600
    count = f"{len(used)} of {planned}" if len(used) < planned else f"All {planned}"
    devices = "; ".join(sorted({result.device for result in used}))
    return (
        f"**How it was made.** {count} trials were run, {when}, on {devices} ({'; '.join(versions)}): "
        f"{hours:.1f} hours of computing. The replicas of a trial run in one process, with the code of real "
        f"members. To repeat or continue it:\n\n    {again}"
    )


def _summary(verdicts: Sequence[Claim]) -> str:
    known = [verdict for verdict in verdicts if verdict.is_known]
    false = [verdict for verdict in known if not verdict.holds]
    lines = []
    if known:
        holding = len(known) - len(false)
        lines.append(f"{holding} of {len(known)} orderings hold, for every seed and on the mean.")
    for verdict in false:
        failing = [_seed_name(seed) for seed, answer in verdict.answers.items() if not answer.holds]
        lines.append(f"**It does not hold** that {verdict.claim}: {', '.join(failing)}.")
    lines += [
        f"Not known yet, since trials are missing or diverged: {verdict.claim}."
        for verdict in verdicts
        if not verdict.is_known
    ]
    return "\n".join(f"- {line}" for line in lines)


def _verdict_table(verdicts: Sequence[Claim], seeds: Sequence[int]) -> str:
    columns = ["ordering", *(f"seed {seed}" for seed in seeds), "mean over seeds"]
    keys: list[int | str] = [*seeds, MEAN]
    rows = [[verdict.claim, *(_answer(verdict.answers.get(key)) for key in keys)] for verdict in verdicts]
    return markdown_table(columns, rows)


def _answer(answer: SeedAnswer | None) -> str:
    if answer is None:
        return "not known"
    return "holds" if answer.holds else f"**does not hold** ({answer.numbers})"


def _table(table: Table, seeds: Sequence[int], results: Mapping[str, Result]) -> str:
    found = [results.get(planned.trial.key) for row in table.rows for planned in row.trials.values()]
    hidden = set()
    if not any(result is not None and _is_mixed(result) for result in found):
        hidden.add("of pipelines")
    if not any(row.paper for row in table.rows):
        hidden.add("paper")
    if not any(behind_of(table, row, seeds, results) for row in table.rows):
        hidden.add("behind")
    if len(seeds) == 1:
        hidden.add("loss")  # it is that of the seed
    rows = [_cells(table, row, seeds, results) for row in table.rows]
    names = [name for name in rows[0] if name not in hidden]
    return markdown_table(names, [[row[name] for name in names] for row in rows])


def _cells(
    table: Table, row: MatrixRow, seeds: Sequence[int], results: Mapping[str, Result]
) -> dict[str, str]:
    """The row of the report by column."""
    found = [results.get(row.trials[seed].trial.key) for seed in seeds]
    measured = [result for result in found if result is not None]
    losses = [result.loss for result in measured]
    by_seed = zip(seeds, found, strict=True)
    return {
        "row": row.name,
        "k/d": "" if row.k is None else fraction_of(row.k, row.width),
        "loss": _mean(losses, seeds),
        **{f"seed {seed}": loss_text(result.loss) if result else "" for seed, result in by_seed},
        "delta %": _delta(table, row, seeds, results),
        "behind": _behind(table, row, seeds, results),
        "of pipelines": _mean(
            [loss for result in measured if (loss := result.pipeline_loss) is not None], seeds
        ),
        "uncompressed": _mean([mean([result.plain]) for result in measured], seeds),
        "links + payloads (MB/round)": _megabytes(measured),
        "paper": row.paper,
    }


def _delta(table: Table, row: MatrixRow, seeds: Sequence[int], results: Mapping[str, Result]) -> str:
    deltas = list(deltas_of(table, row, seeds, results).values())
    if not deltas:
        return ""
    low, high = interval_of(deltas) or (min(deltas), max(deltas))
    spread = f" ({low:+.1f} .. {high:+.1f})" if len(deltas) > 1 else ""
    against = "" if row.baseline == _usual_baseline(table) else f" over {row.baseline}"
    return f"{statistics.fmean(deltas):+.1f}{spread}{against}{_share(deltas, seeds)}"


def _behind(table: Table, row: MatrixRow, seeds: Sequence[int], results: Mapping[str, Result]) -> str:
    found = list(behind_of(table, row, seeds, results).values())
    if not found:
        return ""
    rounds = statistics.fmean(each.rounds for each in found)
    # A mean with a bound in it is one, too.
    more = (">" if rounds > 0 else "<") if any(each.is_bound for each in found) else ""
    return f"{more}{rounds:.1f}{_share([each.rounds for each in found], seeds)}"


def _usual_baseline(table: Table) -> str:
    """The baseline of all rows of the table; "" if they have different ones."""
    named = {row.baseline for row in table.rows if row.baseline != row.name}
    return named.pop() if len(named) == 1 else ""


def _is_mixed(result: Result) -> bool:
    """Whether it has full and pipeline replicas, whose forward modes differ."""
    swarm = result.spec["swarm"]
    return bool(swarm["replicas"] and swarm["pipelines"])


def _mean(losses: Sequence[float], seeds: Sequence[int]) -> str:
    """The mean of `losses`, and their number if seeds are missing."""
    return loss_text(statistics.fmean(losses)) + _share(losses, seeds) if losses else ""


def _share(found: Sequence[float], seeds: Sequence[int]) -> str:
    return "" if len(found) == len(seeds) else f" ({len(found)} of {len(seeds)} seeds)"


def _megabytes(measured: Sequence[Result]) -> str:
    """What is sent in a round over links, and in payloads."""
    if not measured:
        return ""
    links = statistics.fmean(result.link_bytes / result.rounds for result in measured)
    payloads = statistics.fmean(result.payload_bytes / result.rounds for result in measured)
    return f"{links / 1e6:.3f} + {payloads / 1e6:.3f}"


def _seed_name(seed: int | str) -> str:
    return "the mean over seeds" if seed == MEAN else f"seed {seed}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with the first column left-aligned and the others right-aligned."""
    rule = ["-", *["-:"] * (len(columns) - 1)]
    escaped = [[cell.replace("|", "\\|") for cell in cells] for cells in (columns, rule, *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)
