"""Which figures a line of the metrics file has."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.ops.tracking.figures import TrackedFigures, figures_of

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    max_leaves=10,
)


def of(event: str, **fields: Any) -> TrackedFigures | None:
    return figures_of(json.dumps({"time": 5.0, "event": event, **fields}).encode())


def test_each_kind_of_line_with_figures() -> None:
    measured = {"peer": "p", "round": 3, "replica": 1, "position": 0, "train_loss": 2.5, "steps": 4}
    last = of("measurement", **measured, complete=True, validation_loss=None, agreements=[{"norm": 1.0}])
    assert last == TrackedFigures(5.0, 3, {"train_loss/replica-1": 2.5, "steps/replica-1": 4})
    assert of("measurement", **measured, complete=False) == TrackedFigures(5.0, 3, {"steps/replica-1.0": 4})
    first = of("measurement", **{**measured, "round": 0}, complete=True, validation_loss=5.5)
    assert first == TrackedFigures(5.0, 0, {"validation_loss/replica-1": 5.5})
    decided = of("decision", stage=0, round=3, committed=True, payload_bytes=7, owners=["p"], next_epoch=1)
    assert decided == TrackedFigures(5.0, 3, {"committed/stage-0": 1, "payload_bytes/stage-0": 7})
    told = of("evaluation", peer="", round=2, name="wiki", figures={"loss": 3.0})
    assert told == TrackedFigures(5.0, 2, {"wiki/loss": 3.0})
    assert of("finished") is of("plan", round=1, epoch=2) is None


@given(st.binary() | _JSON.map(lambda value: json.dumps(value).encode()))
def test_no_line_raises(line: bytes) -> None:
    assert figures_of(line) is None


@given(
    st.dictionaries(st.sampled_from(("time", "event", "round", "complete", "replica", "figures", "x")), _JSON)
)
def test_no_fields_raise(fields: dict[str, Any]) -> None:
    for event in ("measurement", "decision", "evaluation"):
        figures_of(json.dumps({**fields, "event": event}).encode())
