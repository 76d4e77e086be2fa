"""Changes of a run, as specifications."""

from __future__ import annotations

import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.change import CHANGEABLE, changed, restored, settings_text
from protocol.spec.run import RunSpec
from protocol.types import RunChange

SPEC = RunSpec.model_validate({"outer": {"optimizer": "nesterov"}})


def change(*settings: str) -> RunChange:
    return RunChange(3, settings, "")


def test_a_changed_run_keeps_its_identity_and_its_name_and_nothing_else_differs() -> None:
    first = changed(SPEC, [change("inner.steps=7", "rounds=90")])
    second = changed(first, [change("inner.steps=8", "outer.momentum=0.5")])
    assert (second.inner.steps, second.rounds, second.outer.momentum) == (8, 90, 0.5)
    assert len({SPEC.hash, first.hash, second.hash}) == 3
    for each in (first, second):
        assert (each.identity, each.name) == (SPEC.hash, SPEC.name)
        assert RunSpec.from_json(each.canonical_json) == each
    together = [change("inner.steps=7", "rounds=90"), change("inner.steps=8", "outer.momentum=0.5")]
    assert changed(SPEC, together) == second
    assert changed(SPEC, []) is SPEC


def test_the_former_values_come_back_but_for_the_rounds() -> None:
    then = changed(SPEC, [change("inner.steps=7", "rounds=90", "timing.link=70.5")])
    back = restored(then, SPEC)
    assert back == ("inner.steps=10", "timing.link=60.0")
    undone = changed(then, [change(*back)])
    assert undone.model_copy(update={"began_as": None, "rounds": SPEC.rounds}) == SPEC
    assert restored(SPEC, SPEC) == ()


def test_each_setting_that_can_change_is_one_of_a_specification() -> None:
    tree = SPEC.model_dump() | {"inner": SPEC.inner.__dict__}
    for name in CHANGEABLE:
        section, _, field = name.rpartition(".")
        assert field in (tree[section] if section else tree), name


@pytest.mark.parametrize(
    "setting", ["", "=1", "rounds", "rounds=", "rounds=1e9", "model.width=64", "began_as=1", "rounds=[1]"]
)
def test_what_is_no_change_is_refused(setting: str) -> None:
    with pytest.raises(HetnodeError) as raised:
        changed(SPEC, [change(setting)])
    assert raised.value.code is ErrorCode.BAD_SPEC


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        settings_text({"inner.learning_rate": float("nan")})
