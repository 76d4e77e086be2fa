"""A run's history for programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hetnode
from coordinator.store.history_tables import TABLES
from hetnode import ErrorCode, HetnodeError
from tests.support.coordinator_run import play_rounds, started_and_attested
from tests.support.history import stored, write_history


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run = started_and_attested(2, 1)
    play_rounds(run, 3)
    write_history(folder / "history.sqlite", run.spec, stored(run.events))
    return folder


def test_every_table_has_its_rows_in_order_with_plain_values(folder: Path) -> None:
    run = hetnode.open_run(folder)
    assert tuple(record.TABLE for record in TABLES) == hetnode.TABLES
    rows = {table: run.rows(table) for table in hetnode.TABLES}
    assert [row["round_number"] for row in rows["rounds"]] == [1, 2, 3, 4]
    keys = [(row["round_number"], row["stage"]) for row in rows["stage_rounds"]]
    assert keys == sorted(keys)
    assert {row["peer"] for row in rows["contributions"]} <= {row["peer"] for row in rows["peers"]}
    found = {type(value) for table in rows.values() for row in table for value in row.values()}
    assert found <= {bool, int, float, str, type(None)}


def test_a_history_is_a_data_frame_or_without_pandas_a_list(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hetnode.open_run(folder)
    frame = run.history("rounds")
    assert list(frame["round_number"]) == [1, 2, 3, 4]
    assert list(run.history().columns)[:2] == ["replica", "round_number"], "also where there is no row"
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run.history("rounds") == run.rows("rounds")


def test_what_is_not_there_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(HetnodeError, match=r"'losses'.*replica_rounds") as caught:
        hetnode.open_run(folder).rows("losses")
    assert caught.value.code is ErrorCode.BAD_OPTION
    for ask in (lambda: hetnode.open_run("no such run"), lambda: hetnode.open_run(tmp_path).rows()):
        with pytest.raises(HetnodeError) as caught:
            ask()
        assert caught.value.code is ErrorCode.NO_HISTORY
