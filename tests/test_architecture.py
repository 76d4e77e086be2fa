"""The layers of the house: a folder is a layer, and imports only go down.

Each package lists its layers from the lowest to the highest. A module may import from its own folder and from
folders in lower lines, never from a folder beside it in the same line or above.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

LAYERS = (
    "protocol.errors protocol.types",
    "protocol.spec",
    "protocol.roles",
    "protocol.pb protocol.algorithm protocol.trust protocol.status",
    "protocol.wire",
    # the coordinator: pure decisions, then IO, then its composition root
    "coordinator.state",
    "coordinator.placement",
    "coordinator.membership",
    "coordinator.forecast coordinator.rounds",
    "coordinator.decide coordinator.status",
    "coordinator.authority coordinator.metrics coordinator.store",
    "coordinator.command_loop",
    "coordinator.api",
    "coordinator.app",
    # a node: pure rooms, then IO, then training, then its composition root
    "node.hooks node.security node.model",
    "node.ipc node.data node.optimizer",
    "node.checkpoint",
    "node.generate node.transport node.folder",
    "node.hive",
    "node.net",
    "node.measure node.worker",
    "node.train node.experiment",
    "node.runtime node.hugging_face",
    # faces: they alone see both sides
    "node.command_runner node.local_swarm",
    "node.views",
    "node.cli",
    "node.__main__",
)
LEVEL = {name: level for level, line in enumerate(LAYERS) for name in line.split()}

# Rooms that decide or calculate: time and randomness are arguments.
PURE = [
    "protocol.errors",
    "protocol.types",
    "protocol.spec",
    "protocol.roles",
    "protocol.algorithm",
    "protocol.trust",
    "protocol.status",
    "coordinator.state",
    "coordinator.membership",
    "coordinator.placement",
    "coordinator.rounds",
    "coordinator.forecast",
    "coordinator.decide",
    "coordinator.status",
    "node.model",
    "node.optimizer",
]
IMPURE = {"asyncio", "grpc", "time", "random", "socket", "subprocess", "threading"}
FACES = ("node.command_runner", "node.local_swarm", "node.views", "node.cli", "node.__main__")
MOST_LOOSE_FILES = {"node": 8, "coordinator": 6, "protocol": 4}


@cache
def modules() -> dict[str, Path]:
    """Every module of the three packages by name, but for generated code."""
    found = {}
    for package in ("protocol", "coordinator", "node"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not name.startswith("protocol.pb."):
                found[name] = path
    return found


@cache
def imports_of(module: str) -> frozenset[str]:
    """The modules that `module` imports, anywhere in its file; ours by their full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules() else node.module for name in full}
    return frozenset(found)


def folder_of(module: str) -> str:
    """The first two parts of a module's name: its layer. A package itself, without code, has none."""
    return ".".join(module.split(".")[:2])


def own_imports() -> Iterator[tuple[str, str]]:
    for module in modules():
        for imported in imports_of(module):
            if imported.split(".")[0] in ("node", "coordinator", "protocol"):
                yield module, imported


def test_every_folder_has_a_layer() -> None:
    folders = {folder_of(module) for module in modules() if "." in module}
    assert folders - LEVEL.keys() == set(), "add the folder to LAYERS"
    assert LEVEL.keys() - folders == {"protocol.pb"} - folders, "LAYERS names a folder that is not there"


def test_imports_go_down_only() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, imported in own_imports()
        if folder_of(module) != folder_of(imported) and LEVEL[folder_of(module)] <= LEVEL[folder_of(imported)]
    ]
    assert not wrong


def test_the_sides_meet_only_in_the_faces() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, imported in own_imports()
        for side, other in (("node", "coordinator"), ("coordinator", "node"), ("protocol", "node"))
        if module.startswith(f"{side}.")
        and imported.startswith(f"{other}.")
        and folder_of(module) not in FACES
    ]
    assert not wrong


def test_no_circle_within_a_folder() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle: {' -> '.join((*above, module))}"
        if module in done:
            return
        for imported in imports_of(module):
            if imported in modules() and imported != module:
                visit(imported, (*above, module))
        done.add(module)

    for module in modules():
        visit(module, ())


def test_pure_rooms_know_neither_time_nor_network() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in modules()
        if folder_of(module) in PURE
        for imported in imports_of(module)
        if imported.split(".")[0] in IMPURE
    ]
    assert not wrong


def test_heavy_libraries_stay_in_their_rooms() -> None:
    for module in modules():
        roots = {name.split(".")[0] for name in imports_of(module)}
        if folder_of(module) != "node.hive":
            assert "hivemind" not in roots, f"{module} imports hivemind"
        if module.startswith("coordinator"):
            assert not roots & {"torch", "hivemind", "datasets"}, module
        assert not roots & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, module
        assert "torch.load" not in modules()[module].read_text(), module


def test_no_module_hands_on_the_names_of_another() -> None:
    """A name is imported from the module that defines it."""
    defined: dict[str, set[str]] = {}
    for module, path in modules().items():
        names = defined[module] = set()
        for node in ast.parse(path.read_text()).body:
            for part in [node, *getattr(node, "body", [])] if isinstance(node, ast.If | ast.Try) else [node]:
                if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(part.name)
                elif isinstance(part, ast.Assign | ast.AnnAssign):
                    targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                    names |= {
                        name.id
                        for target in targets
                        for name in ast.walk(target)
                        if isinstance(name, ast.Name)
                    }
    wrong = []
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in defined and node.module != "protocol.pb":
                wrong += [
                    f"{module}: {alias.name} from {node.module}"
                    for alias in node.names
                    if alias.name not in defined[node.module]
                    and f"{node.module}.{alias.name}" not in modules()
                ]
    assert not wrong


def test_few_loose_files() -> None:
    for package, most in MOST_LOOSE_FILES.items():
        loose = [path.name for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"]
        assert len(loose) <= most, f"{package}: {sorted(loose)}"


def test_long_files_say_why() -> None:
    """No file over 400 lines without a reason in its first lines, no function over 60."""
    for module, path in modules().items():
        text = path.read_text()
        if len(text.splitlines()) > 400:
            assert "One file because" in text[:1500], f"{module} has over 400 lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                # The signature of a command lists its options: there only the body counts.
                first = node.body[0].lineno if module.startswith("node.cli") else node.lineno
                lines = node.end_lineno - first
                assert lines < 60, f"{module}.{node.name} has over 60 lines"


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
