"""Changed copies of frozen records."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest

from coordinator.base.replacing import replace
from coordinator.run.state.state import State
from protocol.run_files.resolve import resolve


def test_a_copy_equals_that_of_dataclasses_and_leaves_its_record_alone() -> None:
    state = State(resolve("nano"), "run")
    changed = replace(state, current_round=3, own_uplinks={"a": 1.0})
    assert changed == dataclasses.replace(state, current_round=3, own_uplinks={"a": 1.0})
    assert vars(changed).keys() == vars(state).keys()
    assert state == State(resolve("nano"), "run")
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.current_round = 4  # type: ignore[misc]


def test_an_unknown_field_is_refused() -> None:
    wrong: dict[str, Any] = {"no_such_field": 1}
    with pytest.raises(TypeError, match="no_such_field"):
        replace(State(resolve("nano"), "run"), **wrong)


@dataclass(frozen=True)
class Checked:
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("negative")


@dataclass(frozen=True)
class Counted:
    count: int

    @cached_property
    def double(self) -> int:
        return 2 * self.count


@dataclass(frozen=True, slots=True)
class Slotted:
    count: int
    other: list[int] = field(default_factory=list)


def test_records_that_do_more_than_hold_fields_are_made_by_their_constructor() -> None:
    with pytest.raises(ValueError, match="negative"):
        replace(Checked(1), count=-1)
    first = Counted(1)
    assert first.double == 2
    assert replace(first, count=2).double == 4
    assert replace(Slotted(1), count=2) == Slotted(2)
