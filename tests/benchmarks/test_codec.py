"""The benchmark of the codec, on a stage that takes no time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import codec
from protocol.run_files.resolve import resolve
from protocol.spec.outer import OuterSpec
from protocol.spec.run import RunSpec


def test_bytes_per_chunk_and_the_entropy_are_those_of_the_codecs() -> None:
    enumerative = OuterSpec(indices="enumerative")
    assert codec.bytes_per_chunk(OuterSpec()) == 44
    assert codec.bytes_per_chunk(enumerative) == 41.375
    assert math.isclose(codec.entropy_bytes(OuterSpec()), 41.27, abs_tol=0.01)
    assert codec.entropy_bytes(OuterSpec(quantizer="1bit")) == codec.entropy_bytes(enumerative) - 4


@pytest.mark.parametrize("options", codec.VARIANTS, ids=str)
def test_every_codec_has_its_row(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def nano(_: int, options: dict[str, Any]) -> RunSpec:
        return resolve("nano", overrides={f"outer.{key}": value for key, value in options.items()})

    monkeypatch.setattr(codec, "stage_spec", nano)
    cells = codec.row(0, options, 1)
    assert len(cells) == len(codec.COLUMNS)
    assert "nan" not in cells


def test_no_two_rows_are_of_the_same_codec() -> None:
    specs = [codec.stage_spec(20_000_000, options) for options in codec.VARIANTS]
    names = {codec.PayloadLayout(codec.parameter_shapes(spec, 0), spec.outer).codec for spec in specs}
    assert len(names) == len(codec.VARIANTS)
    assert specs[0].outer == OuterSpec()


def test_the_stage_has_about_as_many_parameters_as_were_asked_for() -> None:
    for parameters in (20_000_000, 100_000_000, 500_000_000):
        shapes = codec.parameter_shapes(codec.stage_spec(parameters, {}), 0)
        assert math.isclose(sum(map(math.prod, shapes.values())), parameters, rel_tol=0.05)
