"""Lines of results: which trial they belong to, and which damage is mended or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from node.experiment.results import append, read_results
from protocol.errors import ErrorCode, HetnodeError
from tests.support.experiment_results import matrix_of, result_of


def test_results_are_found_again_by_what_was_computed(tmp_path: Path) -> None:
    file, matrix = tmp_path / "results.jsonl", matrix_of(tmp_path)
    written = [result_of(planned, 2.0, 3.0) for planned in matrix.trials[:3]]
    for result in written:
        append(file, result)
    found = read_results([file, tmp_path / "none.jsonl"])
    assert list(found.values()) == written
    assert all(found[planned.trial.key].loss == 2.5 for planned in matrix.trials[:3])
    assert found[matrix.trials[0].trial.key].trial == matrix.trials[0].trial


def test_a_field_that_the_specification_got_later_changes_no_result(tmp_path: Path) -> None:
    planned = matrix_of(tmp_path).trials[0]
    line = json.loads(result_of(planned, 2.0).line)
    del line["spec"]["outer"]["overlap"]
    line["key"] = "0" * 64
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    assert planned.trial.key in read_results([tmp_path / "results.jsonl"])


def test_a_result_of_another_version_stands_under_its_own_key(tmp_path: Path) -> None:
    line = json.loads(result_of(matrix_of(tmp_path).trials[0], 2.0).line)
    line["spec"]["outer"]["magic"] = True
    line["key"] = "0" * 64
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    assert read_results([tmp_path / "results.jsonl"]).keys() == {"0" * 64}


@pytest.mark.parametrize("torn", [b'{"format":1,"key":"12', b"\xf0\x9f"])
def test_a_torn_last_line_is_passed_over_and_mended(tmp_path: Path, torn: bytes) -> None:
    file, trials = tmp_path / "results.jsonl", matrix_of(tmp_path).trials
    for earlier in ([], [result_of(trials[0], 2.0)]):
        file.write_bytes(b"".join(result.line.encode() for result in earlier) + torn)
        assert len(read_results([file])) == len(earlier)
        append(file, result_of(trials[1], 3.0))
        assert list(read_results([file]).values()) == [*earlier, result_of(trials[1], 3.0)]


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    append(file, result_of(matrix_of(tmp_path).trials[0], 2.0))
    with file.open("a") as lines:
        lines.write('{"format":1}\n')
    with pytest.raises(HetnodeError, match=r"results\.jsonl.*line 2") as caught:
        read_results([file])
    assert caught.value.code is ErrorCode.RESULTS_UNREADABLE


@pytest.mark.parametrize(
    "change",
    [
        {"validation": {"2": []}},
        {"validation": {"3": [1.0]}},
        {"validation": {"1": [1.0]}},
        {"spec.data": "builtin"},
        {"spec.data.tokenizer": ["a"]},
        {"spec.data.source": None},
        {"spec.model": {}},
        {"spec.swarm": None},
        {"seconds": float("inf")},
    ],
    ids=str,
)
def test_a_line_without_what_is_read_of_it_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "results.jsonl"
    good = result_of(matrix_of(tmp_path).trials[0], 2.0).line
    ((place, value),) = change.items()
    *sections, field = place.split(".")
    tree = json.loads(good)
    section = tree
    for name in sections:
        section = section[name]
    section[field] = value
    file.write_text(f"{good}{json.dumps(tree)}\n{good}")
    with pytest.raises(HetnodeError, match=r"results\.jsonl.*line 2") as caught:
        read_results([file])
    assert caught.value.code is ErrorCode.RESULTS_UNREADABLE


def test_a_last_line_that_lacks_only_its_end_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    first, second = (result_of(planned, 2.0) for planned in matrix_of(tmp_path).trials[:2])
    file.write_text(first.line.rstrip("\n"))
    assert list(read_results([file]).values()) == [first]
    append(file, second)
    assert file.read_text() == first.line + second.line


def test_infinity_in_a_line_counts_as_diverged(tmp_path: Path) -> None:
    line = result_of(matrix_of(tmp_path).trials[0], 2.5).line.replace("[2.5]", "[Infinity]")
    (tmp_path / "results.jsonl").write_text(line)
    (found,) = read_results([tmp_path / "results.jsonl"]).values()
    assert found.diverged


def test_a_loss_that_is_not_finite_is_null_and_counts_as_diverged(tmp_path: Path) -> None:
    result = result_of(matrix_of(tmp_path).trials[0], 2.0, None, plain=None)
    assert result.diverged
    assert json.loads(result.line)["validation"] == {"2": [2.0, None]}
    append(tmp_path / "results.jsonl", result)
    assert next(iter(read_results([tmp_path / "results.jsonl"]).values())).diverged
