"""The real lm-evaluation-harness on a task of this machine, where the extra is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.checkpoint import global_model
from node.core.model.init import initial_parameters
from node.experiment.harness import run_tasks
from node.hugging_face.export import export
from node.hugging_face.weights import DTYPES
from protocol.errors import ErrorCode, HetnodeError
from tests.builders import spec_of

TASK = """task: tiny
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
metadata:
  version: 1
"""


def test_figures_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("lm_eval", "accelerate"):
        pytest.importorskip(library)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    spec = spec_of(stages=1)
    global_model.write(tmp_path / "model", spec, 0, {0: initial_parameters(spec, 0)})
    export(global_model.verify(tmp_path / "model"), tmp_path / "hf", DTYPES["fp32"], 10**9)
    questions, task = tmp_path / "questions.json", tmp_path / "task.yaml"
    questions.write_text(json.dumps({"q": "def", "choices": [" main", "x"], "gold": 0}) + "\n")
    task.write_text(TASK.format(file=questions))
    (figures,) = run_tasks(tmp_path / "hf", [str(task)], "cpu", 10).values()
    assert figures.keys() == {"acc"}
    with pytest.raises(HetnodeError) as refused:
        run_tasks(tmp_path / "hf", ["no_such_task"], "cpu", 10)
    assert refused.value.code is ErrorCode.BAD_OPTION
