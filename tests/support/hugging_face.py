"""Hugging Face folders for tests: written, imported and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from node.checkpoint import global_model
from node.cli.main import app
from node.hugging_face.architecture import config_of, published_name
from node.hugging_face.importing import import_model, inspect
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from tests.support.models import PLAIN

GB = 10**9


def wanted_spec(folder: Path, **overrides: Any) -> RunSpec:
    model = {f"model.{name}": value for name, value in inspect(folder).model.items()}
    return resolve("nano", overrides={**model, **overrides})


def imported(folder: Path, out: Path, **overrides: Any) -> RunSpec:
    return import_model(inspect(folder), wanted_spec(folder, **overrides), out)


def stages_of(place: Path) -> dict[int, dict[str, Tensor]]:
    return {stage: dict(tensors) for stage, tensors in global_model.read(place).stages.items()}


def assert_equal(found: dict[int, dict[str, Tensor]], expected: dict[int, dict[str, Tensor]]) -> None:
    flat, wanted = (
        {name: tensor for stage in stages.values() for name, tensor in stage.items()}
        for stages in (found, expected)
    )
    assert flat.keys() == wanted.keys()
    for name, tensor in flat.items():
        assert torch.equal(tensor, wanted[name]), name


def write_folder(folder: Path, stages: dict[int, dict[str, Tensor]], **config: Any) -> Path:
    """A folder with one weight file, as another program would write it."""
    folder.mkdir()
    tensors = {
        published_name(name, PLAIN.model): tensor
        for stage in stages.values()
        for name, tensor in stage.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tree = {**config_of(PLAIN.model, "float32", None), **config}
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def output_of(*arguments: str | Path) -> str:
    """What a command prints, run in this process. Raises as it does."""
    return str(CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout)
