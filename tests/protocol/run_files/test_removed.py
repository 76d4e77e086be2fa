"""What all runs have alike: it is in the hash, no run file gives it, and another value is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.removed import REMOVED
from protocol.run_files.resolve import resolve
from protocol.spec.fixed import FIXED, REMOVED_VALUES, with_fixed, without_fixed
from protocol.spec.run import RunSpec


def changed(spec: RunSpec, name: str, value: Any) -> str:
    """The JSON of `spec` with another value of a field."""
    tree = spec.tree
    section, _, field = name.rpartition(".")
    (tree[section] if section else tree)[field] = value
    return json.dumps(tree)


def refused_settings(error: HetnodeError) -> set[str]:
    assert error.code is ErrorCode.SETTING_REMOVED
    return {name for name in FIXED if name in error.cause}


@pytest.mark.parametrize("name", FIXED)
def test_a_run_file_does_not_give_what_all_runs_have(name: str, tmp_path: Path) -> None:
    entry = FIXED[name]
    with pytest.raises(HetnodeError) as caught:
        resolve("nano", overrides={name: 1 if entry.value is None else entry.value})
    assert refused_settings(caught.value) == {name}
    assert REMOVED[name].instead in caught.value.remedy


def test_one_message_names_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[outer]\nlayout = "tiles"\n[grouping]\nmargin = 0.2\n[link]\ndtype = "int8"\n')
    with pytest.raises(HetnodeError) as caught:
        resolve("nano", file)
    assert refused_settings(caught.value) == {"outer.layout", "grouping.margin"}
    assert 'link.dtype = "int8"' in caught.value.cause


@pytest.mark.parametrize(("name", "value"), sorted(REMOVED_VALUES), ids=str)
def test_a_value_that_went_is_refused_in_run_files_and_in_json(name: str, value: str) -> None:
    for give in (
        lambda: resolve("nano", overrides={name: value}),
        lambda: RunSpec.from_json(changed(resolve("nano"), name, value)),
    ):
        with pytest.raises(HetnodeError) as caught:
            give()
        assert caught.value.code is ErrorCode.SETTING_REMOVED


@pytest.mark.parametrize("name", FIXED)
def test_json_may_have_the_value_of_all_runs_and_no_other(name: str) -> None:
    overlaps = {"outer.overlap": 1, "grouping.batch": "constant", "grouping.global_batch": 8}
    spec = resolve("nano", overrides=overlaps)
    assert RunSpec.from_json(changed(spec, name, FIXED[name].value)) == spec
    with pytest.raises(HetnodeError) as caught:
        RunSpec.from_json(changed(spec, name, "another"))
    assert refused_settings(caught.value) == {name}


def test_an_overlap_that_was_not_eager_is_another_run() -> None:
    tree = resolve("nano", overrides={"outer.overlap": 1}).tree
    del tree["outer"]["eager"]
    with pytest.raises(HetnodeError) as caught:
        RunSpec.from_tree(tree)
    assert refused_settings(caught.value) == {"outer.eager"}


def test_the_json_has_what_the_hash_covers_and_settings_do_not() -> None:
    settings = resolve("nano").model_dump(mode="json")
    full = with_fixed(settings)
    assert without_fixed(full) == settings
    assert full["grouping"]["margin"] == full["grouping"]["reserve"] == 0.1
    assert full["outer"]["layout"] == "flat"
    assert not {"margin", "reserve"} & settings["grouping"].keys()
    assert "selection" not in full["outer"]
    assert "longest_phase" not in full["grouping"], "the batch is variable"
