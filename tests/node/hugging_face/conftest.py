"""A run's folder, and a Hugging Face folder exported from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.checkpoint import global_model
from node.hugging_face.export import export
from node.hugging_face.weights import DTYPES
from tests.support.models import PLAIN, write_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("run"), PLAIN)


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    export(global_model.verify(run), tmp_path / "hf", DTYPES["fp32"], 100_000)
    return tmp_path / "hf"
