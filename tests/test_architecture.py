"""The layering of the house: every room imports downward only, and pure rooms stay pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Longest prefix wins. L0 words, L1 wire and math, L2 pure decisions, L3 IO, L4 roots, L5 faces.
LAYERS = {
    "protocol.errors": 0,
    "protocol.types": 0,
    "protocol.spec": 0,
    "protocol": 1,
    "node.model": 2,
    "node.optimizer.schedule": 2,
    "node.optimizer.inner": 2,
    "node.optimizer.outer_stage": 2,
    "node.data.shards": 2,
    "coordinator": 2,
    "coordinator.api.access": 3,
    "coordinator.api.admin": 3,
    "coordinator.api.rpc_handling": 3,
    "coordinator.authority": 3,
    "coordinator.api.enrollment": 3,
    "coordinator.store": 3,
    "coordinator.command_loop": 3,
    "coordinator.metrics": 3,
    "coordinator.api.service": 3,
    "node.net": 3,
    "node.data": 3,
    "node.checkpoint.global_model": 3,
    "node.checkpoint.files": 3,
    "node.checkpoint.node_checkpoint": 3,
    "node.checkpoint.parts": 3,
    "node.checkpoint.private_state": 3,
    "node.security.credentials": 3,
    "node.faults": 3,
    "node.folder": 3,
    "node.generate": 3,
    "node.measure.hardware": 3,
    "node.hugging_face": 3,
    "node.security.identity": 3,
    "node.checkpoint.initial": 3,
    "node.measure.measure": 3,
    "coordinator.app": 4,
    "node.experiment.evaluate": 4,
    "node.experiment": 4,
    "node.train": 4,
    "node.runtime": 4,
    "node.__main__": 5,
    "node.cli.main": 5,
    "node.cli.admin": 5,
    "node.cli.experiment": 5,
    "node.cli.leave": 5,
    "node.cli.doctor": 5,
    "node.cli.model": 5,
    "node.cli.plan": 5,
    "node.cli.spec": 5,
    "node.cli.swarm": 5,
    "node.cli.known_runs": 5,
    "node.command_runner": 5,
    "node.views.run_history": 5,
    "node.local_swarm": 5,
    "node.views": 5,
}
IMPURE = {"asyncio", "grpc", "time", "random", "socket", "subprocess", "threading"}
# The refusals of gRPC calls are translated next to the other wire formats; it is the one room of L1 that
# knows gRPC, and neither it nor protocol.pb is imported by anything pure.
GRPC_ROOMS = {"protocol.wire.rpc_errors", "protocol.pb"}


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("protocol", "coordinator", "node"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not name.startswith("protocol.pb"):
                yield name, path


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    for size in range(len(parts), 0, -1):
        if (layer := LAYERS.get(".".join(parts[:size]))) is not None:
            return layer
    return None


MODULES = dict(modules())


def is_module(name: str) -> bool:
    return name in MODULES or any(module.startswith(f"{name}.") for module in MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    own = layer_of(module)
    if module in ("node", "coordinator", "protocol"):
        return
    assert own is not None, f"{module} has no layer: add it to LAYERS"
    for imported in imports_of(MODULES[module]):
        if is_module(imported) and imported not in ("node", "coordinator", "protocol"):
            layer = layer_of(imported)
            assert layer is not None
            assert layer <= own, f"{module} (L{own}) imports {imported} (L{layer})"


@pytest.mark.parametrize("module", MODULES)
def test_sides_meet_only_in_the_faces(module: str) -> None:
    imported = imports_of(MODULES[module])
    if module.startswith("coordinator"):
        assert not [
            name for name in imported if name.split(".")[0] in ("node", "torch", "hivemind", "datasets")
        ]
    if module.startswith("protocol"):
        assert not [name for name in imported if name.split(".")[0] in ("node", "coordinator", "hivemind")]
    if module.startswith("node") and layer_of(module) != 5:
        assert not [name for name in imported if name.split(".")[0] == "coordinator"]


@pytest.mark.parametrize("module", [name for name in MODULES if (layer_of(name) or 0) <= 2])
def test_pure_rooms_know_neither_time_nor_network(module: str) -> None:
    if module in GRPC_ROOMS:
        return
    assert not {name.split(".")[0] for name in imports_of(MODULES[module])} & IMPURE


@pytest.mark.parametrize("module", MODULES)
def test_hivemind_lives_in_one_room_and_pickle_nowhere(module: str) -> None:
    roots = {name.split(".")[0] for name in imports_of(MODULES[module])}
    if not module.startswith("node.hive"):
        assert "hivemind" not in roots
    assert not roots & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    assert "torch.load" not in MODULES[module].read_text()


def test_the_main_process_of_a_node_imports_neither_torch_nor_hivemind() -> None:
    """They live in its children; the event loop must start fast and never share their state."""
    check = "import sys, node.runtime; sys.exit(bool({'torch', 'hivemind'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, cwd=ROOT).returncode == 0


def test_the_committed_protobuf_code_is_fresh(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / ".ci" / "generate-protobuf"), str(tmp_path)]
    subprocess.run(command, check=True, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"})
    generated = sorted((tmp_path / "protocol" / "pb").iterdir())
    assert len(generated) == 6
    for path in generated:
        assert path.read_text() == (ROOT / "protocol" / "pb" / path.name).read_text(), path.name
