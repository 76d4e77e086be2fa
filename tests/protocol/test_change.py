"""Changes of a run, as specifications."""

from __future__ import annotations

import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.sources import sources_text
from protocol.spec.change import CHANGEABLE, changed, restored, settings_text
from protocol.spec.data import PastData
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
    tree = SPEC.model_dump() | {"inner": SPEC.inner.__dict__, "data": SPEC.data.__dict__}
    for name in CHANGEABLE:
        section, _, field = name.rpartition(".")
        assert field in (tree[section] if section else tree), name


def test_a_specification_tells_how_much_came_from_which_data_before() -> None:
    mixture = [{"name": "web", "source": "text:web"}, {"name": "code", "source": "text:code", "weight": 3}]
    told = settings_text({"data.source": mixture, "data.validation": "text:kept"})
    first = changed(SPEC, [RunChange(3, told, "", first_sample=80)])
    assert first.data.past == (PastData(source="builtin", samples=80),)
    assert sources_text(first.data) == "25 % web (text:web), 75 % code (text:code)"
    second = changed(SPEC, [RunChange(3, told, "", 80), RunChange(4, ("inner.steps=7",), "", 120)])
    assert second.data == first.data
    third = changed(first, [RunChange(5, ('data.source="builtin"',), "", first_sample=100)])
    was = PastData(source="builtin", samples=80), PastData(source=first.data.source, samples=20)
    assert third.data.past == was
    back = restored(first, SPEC)
    assert back == ('data.source="builtin"', 'data.validation=""')
    assert changed(first, [RunChange(5, back, "", 100)]).data.source == "builtin"
    assert restored(third, first)[0] == told[0]
    for each in (first, third):
        assert RunSpec.from_json(each.canonical_json) == each


def test_a_change_before_the_first_sample_is_as_if_the_run_had_begun_so() -> None:
    assert changed(SPEC, [RunChange(1, ('data.source="text:x"',), "")]).data.past is None


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "=1",
        "rounds",
        "rounds=",
        "rounds=1e9",
        "model.width=64",
        "began_as=1",
        "rounds=[1]",
        "data.source=[]",
        "data.source=5",
        f"data.source={'[' * 3000}",
    ],
)
def test_what_is_no_change_is_refused(setting: str) -> None:
    with pytest.raises(HetnodeError) as raised:
        changed(SPEC, [change(setting)])
    assert raised.value.code is ErrorCode.BAD_SPEC


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        settings_text({"inner.learning_rate": float("nan")})
