"""Digests of what virtual swarms have trained, and of an exported model: :func:`trained` computes them.

A process of its own computes them, whose libraries use the instructions that every x86-64 has, so that the
digests do not depend on the processor.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def trained() -> Mapping[str, Any]:
    """The digests: by swarm and stage those of the last anchors, and one of the exported tensors."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.frozen.trained"],
        cwd=ROOT,
        env=os.environ | PORTABLE,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: Mapping[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _computed(folder: Path) -> Mapping[str, Any]:
    from tests.support.fault_script import Action, Moment  # noqa: PLC0415
    from tests.support.faults import FaultPlan  # noqa: PLC0415
    from tests.virtual.scenario import (  # noqa: PLC0415
        FULL,
        MIXED,
        SPARSE,
        Play,
        return_after,
        roll_back_and_resume,
    )
    from tests.virtual.swarm import VirtualSwarm  # noqa: PLC0415

    def final(swarm: VirtualSwarm) -> Mapping[str, str]:
        return {str(stage): digest for stage, digest in sorted(swarm.anchors("a").items())}

    def play(name: str) -> Callable[..., VirtualSwarm]:
        plan = FaultPlan(folder / name / "faults")
        if name == "killed":
            plan.fail_at("q", None, 3, Moment.INNER_STEP, Action.KILL)
        return Play(folder / name, plan).to_the_end

    momentum = {**SPARSE, "link.dtype": "dither5", "outer.optimizer": "nesterov"}
    killed = play("killed")(lambda swarm: return_after(swarm, "q", 5), MIXED, 5, **momentum)
    back = play("back")(
        lambda swarm: roll_back_and_resume(swarm, 3, 1), FULL, 4, **SPARSE, **{"recovery.checkpoint_every": 1}
    )
    return {
        "killed": final(killed),
        "rolled back": final(back),
        "late updates": final(play("late")(None, MIXED, 3, **SPARSE, **{"outer.overlap": 1})),
        "exported": _exported(folder),
    }


def _exported(folder: Path) -> Mapping[str, str]:
    from safetensors.torch import load_file  # noqa: PLC0415

    from node.checkpoint import global_model  # noqa: PLC0415
    from node.hugging_face.export import export  # noqa: PLC0415
    from node.hugging_face.weights import DTYPES  # noqa: PLC0415
    from tests.support.models import PLAIN, write_model  # noqa: PLC0415

    export(global_model.verify(write_model(folder, PLAIN)), folder / "hf", DTYPES["fp32"], 10**9)
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "hf" / "model.safetensors").items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
    return {"tensors": digest.hexdigest()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(_computed(Path(temporary))))
