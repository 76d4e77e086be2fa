"""What is made of results: deltas, verdicts, a page with figures, and the progress of a run."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from node.experiment.comparison import MEAN, Behind, behind_of, deltas_of, interval_of, verdicts_of
from node.experiment.estimate import Pace
from node.experiment.figures import draw_figures
from node.experiment.matrix import Matrix, build_matrix, read_matrix_file
from node.experiment.report import report_of
from node.experiment.results import Result
from node.experiment.resumable_trial import RoundRecord
from node.views.experiment import ExperimentView, matrix_view
from tests.support.experiment_results import by_key, result_of

MATRIX = """
title = "A page"
text = ["What was run."]
preset = "nano"
replicas = 2
seeds = [0, 1]
spec = { rounds = 4, inner.microbatches = 1 }

[[table]]
name = "orderings"
title = "All modes"
baseline = "sparseloco"
orderings = true
notes = ["A note."]

[[table.row]]
name = "sparseloco"
mode = "sparseloco"
paper = "2.73"

[[table.row]]
name = "heterogeneous"
mode = "heterogeneous"
k = [16, 2]

[[table.row]]
name = "uniform"
mode = "uniform"
k = [16, 2]

[[table]]
name = "ablation"
title = "Ablation"

[[table.row]]
name = "uniform"
mode = "uniform"
k = 16

[[table.row]]
name = "frozen"
mode = "uniform"
k = 16
baseline = "uniform"
variation = { adaptation = false }
"""
LOSSES = {
    "sparseloco": (2.0, 2.1),
    "heterogeneous 1/2": (2.2, 2.3),
    "heterogeneous 1/16": (2.4, 2.5),
    "uniform 1/2": (2.3, 2.4),
    "uniform 1/16": (2.9, 3.1),
}


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    file = tmp_path / "matrix.toml"
    file.write_text(MATRIX)
    return build_matrix(file, read_matrix_file(file), {})


def results_of(matrix: Matrix, losses: Mapping[str, tuple[float | None, ...]]) -> dict[str, Result]:
    """Loss by name and seed."""
    return by_key(
        result_of(planned, losses[planned.name][planned.seed])
        for planned in matrix.trials
        if planned.name in losses and planned.seed < len(losses[planned.name])
    )


def test_verdicts_are_given_for_every_width_every_seed_and_the_mean(matrix: Matrix) -> None:
    verdicts = verdicts_of(matrix.tables[0], results_of(matrix, LOSSES))
    assert [verdict.claim for verdict in verdicts] == [
        "base < heterogeneous < uniform at k/d 1/2",
        "base < heterogeneous < uniform at k/d 1/16",
        "heterogeneous gains more on uniform at k/d 1/16 than at 1/2",
    ]
    assert all(verdict.holds and list(verdict.answers) == [0, 1, MEAN] for verdict in verdicts)


def test_one_seed_that_is_against_it_is_said(matrix: Matrix) -> None:
    results = results_of(matrix, {**LOSSES, "heterogeneous 1/2": (2.2, 2.45)})
    first, _, _ = verdicts_of(matrix.tables[0], results)
    assert [answer.holds for answer in first.answers.values()] == [True, False, True]
    assert not first.holds
    page = report_of(matrix, results, Path("matrix.toml"))
    assert "2 of 3 orderings hold" in page
    assert "**It does not hold** that base < heterogeneous < uniform at k/d 1/2: seed 1." in page


@pytest.mark.parametrize("uniform", [(2.9,), (2.9, None)], ids=["missing", "diverged"])
def test_what_is_missing_or_diverged_is_not_judged(matrix: Matrix, uniform: tuple[float | None, ...]) -> None:
    results = results_of(matrix, {**LOSSES, "uniform 1/16": uniform})
    _, at_16, advantage = verdicts_of(matrix.tables[0], results)
    assert list(at_16.answers) == list(advantage.answers) == [0]
    assert not at_16.is_known
    page = report_of(matrix, results, Path("matrix.toml"))
    assert "1 of 1 orderings hold" in page
    assert (
        "Not known yet, since trials are missing or diverged: base < heterogeneous < uniform at k/d 1/16."
        in page
    )
    assert ("diverged |" in page) == (len(uniform) == 2)


def test_three_seeds_have_a_confidence_interval_of_their_mean() -> None:
    # By hand: the standard deviation is 1, and Student's t of 2 degrees of freedom at 97.5 % is 4.3027.
    reach = 4.302653 / math.sqrt(3)
    assert interval_of([1.0, 2.0, 3.0]) == pytest.approx((2 - reach, 2 + reach))
    assert interval_of([1.0, 2.0]) is None


def test_the_page_gives_the_interval_for_many_seeds_and_the_range_for_two(tmp_path: Path) -> None:
    def page(seeds: list[int]) -> str:
        file = tmp_path / "matrix.toml"
        file.write_text(MATRIX.replace("seeds = [0, 1]", f"seeds = {seeds}"))
        matrix = build_matrix(file, read_matrix_file(file), {})
        losses = {"uniform 1/2": (2.0, 2.0, 2.0), "frozen": (2.02, 2.04, 2.06)}
        return report_of(matrix, results_of(matrix, losses), file)

    assert "+1.5 (+1.0 .. +2.0)" in page([0, 1])
    assert "+2.0 (-0.5 .. +4.5)" in page([0, 1, 2])


def test_deltas_compare_seed_with_seed_and_a_row_may_name_its_own_baseline(matrix: Matrix) -> None:
    results = results_of(matrix, {**LOSSES, "frozen": (2.53, 2.4)})
    orderings, ablation = matrix.tables
    assert deltas_of(orderings, orderings.row("uniform 1/16"), matrix.seeds, results) == pytest.approx(
        {0: 45.0, 1: 100 * (3.1 / 2.1 - 1)}
    )
    assert deltas_of(ablation, ablation.row("frozen"), matrix.seeds, results) == pytest.approx(
        {0: 10.0, 1: 0.0}
    )
    assert deltas_of(orderings, orderings.row("sparseloco"), matrix.seeds, results) == {}


def test_rows_say_how_many_rounds_they_are_behind_their_baseline_or_ahead(matrix: Matrix) -> None:
    curves = {
        "sparseloco": [{2: (3.0, 3.0), 4: (2.0, 2.0)}, {2: (3.0, 3.0), 4: (2.0, 2.0)}],
        "heterogeneous 1/2": [{2: (4.0, 4.0), 4: (2.25, 2.25)}, {2: (4.0, 4.0), 4: (2.75, 2.75)}],
        "heterogeneous 1/16": [{2: (2.5, 2.5), 4: (1.5, 1.5)}, {2: (3.0, 3.0), 4: (2.0, 2.0)}],
        "uniform 1/2": [{2: (4.0, 4.0), 4: (3.5, 3.5)}, {2: (4.0, 4.0), 4: (None, 2.0)}],
        "uniform 1/16": [{4: (2.5, 2.5)}],
    }
    results = by_key(
        result_of(planned, 2.0).model_copy(update={"validation": curves[planned.name][planned.seed]})
        for planned in matrix.trials
        if planned.seed < len(curves.get(planned.name, ()))
    )
    (table, _), seeds = matrix.tables, matrix.seeds
    assert behind_of(table, table.row("sparseloco"), seeds, results) == {}
    # Linear between rounds 2 and 4: the baseline had 2.25 after 3.5 rounds, and 2.75 after 2.5.
    assert behind_of(table, table.row("heterogeneous 1/2"), seeds, results) == {
        0: Behind(0.5, False),
        1: Behind(1.5, False),
    }
    # Seed 0 had the baseline's last loss after 3 of 4 rounds; equal losses are no difference.
    assert behind_of(table, table.row("heterogeneous 1/16"), seeds, results) == {
        0: Behind(-1.0, False),
        1: Behind(0.0, False),
    }
    # Further behind than the first measured round; and a loss that is not finite is not known.
    assert behind_of(table, table.row("uniform 1/2"), seeds, results) == {0: Behind(2.0, True)}
    assert behind_of(table, table.row("uniform 1/16"), seeds, results) == {0: Behind(1.0, False)}
    page = report_of(matrix, results, Path("m.toml"))
    assert "| heterogeneous 1/2 | 1/2 | 2.500 | 2.250 | 2.750 | +25.0 (+12.5 .. +37.5) | 1.0 |" in page
    assert "| -0.5 |" in page
    assert "| >2.0 (1 of 2 seeds) |" in page
    assert "| behind |" not in report_of(matrix, results_of(matrix, LOSSES), Path("m.toml"))


def test_the_page_says_how_it_was_made_and_has_every_number(matrix: Matrix) -> None:
    page = report_of(matrix, results_of(matrix, LOSSES), Path("benchmarks/matrix.toml"))
    assert page.startswith("# A page\n\nWhat was run.")
    assert "10 of 12 trials were run" in page
    assert "2026-01-02, on a processor, 1 thread of 2" in page
    assert "hetnode experiment run benchmarks/matrix.toml" in page
    assert (
        "| uniform 1/16 | 1/16 | 3.000 | 2.900 | 3.100 | +46.3 (+45.0 .. +47.6) "
        "| 3.000 | 2.000 | 2.000 + 0.001 |  |"
    ) in page
    assert "- A note." in page
    assert "3 of 3 orderings hold" in page


def test_a_mean_over_some_seeds_says_so(matrix: Matrix) -> None:
    page = report_of(matrix, results_of(matrix, {**LOSSES, "uniform 1/16": (2.9,)}), Path("matrix.toml"))
    assert (
        "| uniform 1/16 | 1/16 | 2.900 (1 of 2 seeds) | 2.900 |  | +45.0 (1 of 2 seeds) "
        "| 2.900 (1 of 2 seeds) | 2.000 (1 of 2 seeds) |"
    ) in page


def test_the_page_says_how_it_is_made_again(matrix: Matrix) -> None:
    page = report_of(matrix, results_of(matrix, LOSSES), Path("m.toml"), out=Path("there/out"))
    assert "hetnode experiment run m.toml --out there/out\n" in page
    assert "--results there/out/results.jsonl" in page
    made = replace(matrix, file=matrix.file.model_copy(update={"made_with": "make page"}))
    page = report_of(made, {}, Path("m.toml"), out=Path("there/out"))
    assert "\n    make page\n" in page
    assert "hetnode experiment" not in page


def test_one_seed_is_one_column(tmp_path: Path) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text(MATRIX.replace("seeds = [0, 1]", "seeds = [7]"))
    matrix = build_matrix(file, read_matrix_file(file), {})
    page = report_of(matrix, by_key(result_of(each, 2.5) for each in matrix.trials), file)
    assert "| row | k/d | seed 7 | delta % |" in page
    assert "| loss |" not in page


def test_a_page_without_any_result_says_how_to_get_them(matrix: Matrix) -> None:
    page = report_of(matrix, {}, Path("matrix.toml"))
    assert "None of 12 trials was run yet" in page
    assert "Not known yet" in page


def test_figures_are_small_and_the_same_for_the_same_results(matrix: Matrix, tmp_path: Path) -> None:
    results = results_of(matrix, LOSSES)
    figures = draw_figures(matrix, results, tmp_path)
    names = {figure.path.name for figure in figures}
    assert names == {"orderings-loss.png", "orderings-training.png", "orderings-delta.png"}
    before = {figure.path: figure.path.read_bytes() for figure in figures}
    for figure in draw_figures(matrix, results, tmp_path):
        assert figure.path.read_bytes() == before[figure.path]
        assert figure.path.stat().st_size < 60_000
        with Image.open(figure.path) as image:
            assert image.convert("RGB").getpixel((1, 1)) == (255, 255, 255)
    page = report_of(matrix, results, Path("m.toml"), [(figure, figure.path.name) for figure in figures])
    assert all(f"]({name})" in page for name in names)


def test_figures_without_results_are_not_drawn_and_one_of_before_goes(matrix: Matrix, tmp_path: Path) -> None:
    (tmp_path / "orderings-loss.png").write_bytes(b"old")
    assert draw_figures(matrix, {}, tmp_path) == []
    assert not (tmp_path / "orderings-loss.png").exists()


def test_the_time_left_counts_what_is_left_by_what_was_measured(matrix: Matrix) -> None:
    base, wide = (matrix.tables[0].row(name).trials[0].trial for name in ("sparseloco", "uniform 1/2"))
    pace = Pace()
    assert pace.left([(base, 4)], 1) is None
    pace.learn(base, 4, 8.0)
    assert pace.left([(base, 3)], 1) == pytest.approx(6.0)
    # Nothing is known of pipelines yet: they are taken for as fast as full replicas.
    assert pace.left([(base, 4), (wide, 4)], 2) == pytest.approx(8.0)
    pace.learn(wide, 4, 20.0)
    assert pace.left([(base, 4), (wide, 4)], 2) == pytest.approx(20.0)
    assert pace.left([(base, 4), (wide, 4)], 1) == pytest.approx(28.0)
    assert pace.left([], 1) == 0.0


def test_progress_shows_rounds_tables_and_what_is_left(matrix: Matrix) -> None:
    console = Console(file=io.StringIO(), width=120)
    trials = matrix.trials
    done = results_of(matrix, {"sparseloco": (2.0,)})
    left = [planned for planned in trials if planned.trial.key not in done]
    tables = {
        table.name: [each.trial.key for row in table.rows for each in row.trials.values()]
        for table in matrix.tables
    }
    view = ExperimentView(console, left, tables, done, jobs=2, clock=lambda: 0.0)
    view.began(left[0], 2)
    record = RoundRecord(train=3.25, payload_bytes=1, link_bytes=1, seconds=5.0, validation=(2.5, None))
    view.advanced(left[0], 3, record)
    shown = Console(file=io.StringIO(), width=120)
    shown.print(view.render())
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "1 of 10" in text
    assert "3 of 4" in text
    assert "3.250" in text
    assert "diverged" in text
    assert "11 of 11 trials left, about" in text
    view.finished(left[0], result_of(left[0], 2.25))
    view.failed(left[1], RuntimeError("it broke"))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "goes on after round 2 of 4" in said
    assert "loss 2.250 in 10 s; 10 of 11 trials left, about" in said
    assert "failed. it broke" in said


def test_the_list_shows_what_is_known_and_how_long_the_rest_takes(matrix: Matrix) -> None:
    shown = Console(file=io.StringIO(), width=120)
    shown.print(matrix_view(matrix, results_of(matrix, LOSSES), 2))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "2.900" in text
    assert "to do" in text
    assert "2 of 12 trials left: 10 s with 2 at a time" in text
