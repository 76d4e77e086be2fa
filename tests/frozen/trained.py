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
from collections.abc import Awaitable, Callable, Mapping
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
    from tests.virtual import swarm as virtual  # noqa: PLC0415
    from tests.virtual.rollback import roll_back_and_end  # noqa: PLC0415
    from tests.virtual.scenario import FULL, MIXED, return_after, swarm_spec  # noqa: PLC0415
    from tests.virtual.swarm import VirtualSwarm  # noqa: PLC0415

    async def undisturbed(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()

    async def killed(swarm: VirtualSwarm) -> None:
        swarm.start()
        await return_after(swarm, "q", 5)
        await swarm.until_over()
        swarm.assert_all_agree()

    async def rolled_back(swarm: VirtualSwarm) -> None:
        await roll_back_and_end(swarm, at=3, restore_round=1)

    def play(
        name: str,
        scenario: Callable[[VirtualSwarm], Awaitable[None]],
        members: Mapping[str, Any],
        rounds: int,
        **overrides: Any,
    ) -> Mapping[str, str]:
        plan = FaultPlan(folder / name / "faults")
        if scenario is killed:
            plan.fail_at("q", None, 3, Moment.INNER_STEP, Action.KILL)

        async def observed(swarm: VirtualSwarm) -> Mapping[str, str]:
            await scenario(swarm)
            return {str(stage): digest for stage, digest in sorted(swarm.anchors("a").items())}

        spec = swarm_spec(members, rounds, **overrides)
        return virtual.play(observed, spec, folder / name, members, plan=plan)

    return {
        "killed": play("killed", killed, MIXED, 5, **{"link.dtype": "int4", "outer.optimizer": "nesterov"}),
        "rolled back": play("back", rolled_back, FULL, 4, **{"recovery.checkpoint_every": 1}),
        "late updates": play("late", undisturbed, MIXED, 3, **{"outer.overlap": 1}),
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
