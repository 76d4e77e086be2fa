"""Tasks of lm-evaluation-harness for an exported model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from node.extras import Extra, needed, require
from protocol.errors import ErrorCode, HetnodeError


def require_harness() -> None:
    """Raise HetnodeError MISSING_EXTRA if the libraries are not installed. Imports nothing."""
    for library in ("lm_eval", "transformers", "accelerate"):
        require(library, Extra.EVAL)


def run_tasks(
    folder: Path, tasks: Sequence[str], device: str, separator: int
) -> Mapping[str, Mapping[str, float]]:
    """The figures of each task, by metric, of the model in a Hugging Face folder.

    A task is a name that the library knows, or the path of a YAML file; the library fetches its data.
    Of a group of tasks, the group alone counts. `separator`: the token that precedes each document.

    Raises HetnodeError: MISSING_EXTRA; BAD_OPTION for whatever the library raises.
    """
    with needed(Extra.EVAL):
        from lm_eval import simple_evaluate  # noqa: PLC0415
    try:
        found = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32", "prefix_token_id": separator},
            tasks=list(tasks),
            device=device,
            log_samples=False,
            bootstrap_iters=0,
        )
    except Exception as error:
        raise HetnodeError(
            ErrorCode.BAD_OPTION, f"The tasks failed: {error}", "Check the names of --tasks."
        ) from None
    parts = {part for group in found.get("group_subtasks", {}).values() for part in group} - {*tasks}
    return {task: _figures(values) for task, values in found["results"].items() if task not in parts}


def _figures(values: Mapping[str, object]) -> dict[str, float]:
    """Of keys such as "acc,none"; the errors of the estimates are left out."""
    return {
        key.partition(",")[0]: float(value)
        for key, value in values.items()
        if "," in key and "_stderr" not in key and isinstance(value, float) and math.isfinite(value)
    }
