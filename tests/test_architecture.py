"""The layers of the packages: a folder is a layer, and imports only go down.

Each package lists its layers from the lowest to the highest. A module may import from its own folder and from
folders in lower lines, never from a folder beside it in the same line or above.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from node.cli.main import COMMANDS, app
from protocol.spec.run import RunSpec
from protocol.spec.sections import Section
from tests.support.paths import ROOT
from tests.support.syntax import syntax

LAYERS = (
    "protocol.errors protocol.types",
    "protocol.spec",
    "protocol.roles protocol.run_files",
    "protocol.group protocol.pb protocol.math protocol.trust protocol.status",
    "protocol.codec protocol.formats protocol.memory",
    "protocol.wire",
    "protocol.reduction",
    "protocol.server",
    "protocol.relay",
    # the coordinator: pure decisions, then IO, then its composition root
    "coordinator.base",
    "coordinator.run.state",
    "coordinator.placement",
    "coordinator.membership",
    "coordinator.ops.forecast coordinator.reduction coordinator.run.rounds",
    "coordinator.changing coordinator.pausing",
    "coordinator.rollback",
    "coordinator.run.decide coordinator.status",
    "coordinator.authority coordinator.store",
    "coordinator.ops.incident coordinator.run.command_loop",
    "coordinator.api coordinator.arbiter",
    "coordinator.ops.dashboard coordinator.ops.explain coordinator.ops.health coordinator.ops.monitoring"
    " coordinator.ops.objects coordinator.ops.receipts coordinator.ops.relay coordinator.ops.standby"
    " coordinator.ops.evaluations coordinator.ops.tracking",
    "coordinator.app",
    # a node: pure rooms, then IO, then training, then its composition root
    "node.hooks node.security node.core.model node.extras node.ranks",
    "node.ipc node.data",
    "node.core.optimizer",
    "node.checkpoint node.moments node.reduction",
    "node.generate node.exchange node.folder",
    "node.net",
    "node.agreement node.home.guest node.measure node.monitoring node.core.worker",
    "node.home.relay node.home.router node.machine",
    "node.core.train node.experiment node.objects node.options",
    "node.snapshots",
    "node.runtime node.hugging_face node.worker",
    "node.process",
    # faces: they alone see both sides
    "node.command_runner",
    "node.here",
    "node.local_swarm",
    "node.hosts node.views",
    "node.watch",
    "hetnode",
    "node.cli",
    "node.__main__",
)
LEVEL = {name: level for level, line in enumerate(LAYERS) for name in line.split()}
GROUPS = ("coordinator.run", "coordinator.ops", "node.core", "node.home")
"""Folders of folders: each folder in them has its own layer."""
WHOLE = "hetnode"
"""The package for programs is one layer."""

# Folders that decide or calculate: time and randomness are arguments.
PURE = [
    "protocol.errors",
    "protocol.types",
    "protocol.spec",
    "protocol.roles",
    "protocol.group",
    "protocol.run_files",
    "protocol.math",
    "protocol.memory",
    "protocol.codec",
    "protocol.formats",
    "protocol.reduction",
    "protocol.trust",
    "protocol.status",
    "coordinator.base",
    "coordinator.run.state",
    "coordinator.membership",
    "coordinator.placement",
    "coordinator.reduction",
    "coordinator.run.rounds",
    "coordinator.changing",
    "coordinator.pausing",
    "coordinator.rollback",
    "coordinator.ops.forecast",
    "coordinator.ops.health",
    "coordinator.run.decide",
    "coordinator.status",
    "coordinator.store.history_fold",
    "coordinator.ops.incident",
    "node.agreement",
    "node.core.model",
    "node.core.optimizer",
    "node.reduction",
]
# The core is what a newcomer reads first: what trains one swarm, and what every run needs.
CORE = (
    "protocol.errors",
    "protocol.types",
    "protocol.roles",
    "protocol.spec",
    "protocol.math",
    "protocol.codec",
    "coordinator.run",
    "node.core",
)
# A leaf goes with its folders and its line of registration; nothing but the roots knows of it.
LEAVES = {
    "formats": ("protocol.formats",),
    "dashboard": ("coordinator.ops.dashboard",),
    "evaluations": ("coordinator.ops.evaluations",),
    "explain": ("coordinator.ops.explain",),
    "forecast": ("coordinator.ops.forecast",),
    "health": ("coordinator.ops.health",),
    "incident": ("coordinator.ops.incident",),
    "monitoring": ("coordinator.ops.monitoring",),
    "objects": ("coordinator.ops.objects", "node.objects"),
    "receipts": ("coordinator.ops.receipts",),
    "standby": ("coordinator.ops.standby",),
    "tracking": ("coordinator.ops.tracking",),
    "relay": ("protocol.relay", "coordinator.ops.relay", "node.home.relay"),
    "reduction": (
        "protocol.reduction",
        "coordinator.reduction",
        "node.reduction",
        "node.exchange.hive.reduction",
    ),
    "transport": ("node.exchange.hive",),
    "guest": ("node.home.guest",),
    "router": ("node.home.router",),
    "hosts": ("node.hosts",),
    "snapshots": ("node.snapshots",),
    "experiment": ("node.experiment",),
    "hugging_face": ("node.hugging_face",),
}
# A part of another leaf, which knows it; that leaf does not know the part.
EXTENDS = {"reduction": "transport"}
# Ground that the core does not know: roots compose it, or people's tools and the transport use it.
COMPOSED = (
    "protocol.run_files",
    "protocol.group",
    "protocol.memory",
    "node.agreement",
    "node.machine",
    "node.moments",
)
# The composition roots and the faces of the command line put leaves together.
ROOTS = (
    "coordinator.app",
    "node.runtime",
    "node.worker",
    "node.process",
    "node.local_swarm",
    "node.views",
    "node.watch",
    "node.cli",
    "node.__main__",
    "hetnode",
)

IMPURE = {"asyncio", "grpc", "time", "random", "socket", "subprocess", "threading"}
FACES = (
    "node.command_runner",
    "node.here",
    "node.local_swarm",
    "node.views",
    "node.hosts",
    "node.watch",
    "hetnode",
    "node.cli",
    "node.__main__",
)
MOST_LOOSE_FILES = {"node": 10, "coordinator": 6, "protocol": 4}


@cache
def modules() -> dict[str, Path]:
    """Every module of the packages by name, but for generated code."""
    found = {}
    for package in ("protocol", "coordinator", "node", "hetnode"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not name.startswith("protocol.pb."):
                found[name] = path
    return found


@cache
def imports_of(module: str) -> frozenset[str]:
    """The modules that `module` imports, anywhere in its file; ours by their full name."""
    found: set[str] = set()
    for node in ast.walk(syntax(modules()[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules() else node.module for name in full}
    return frozenset(found)


@cache
def defined_by(module: str) -> frozenset[str]:
    """The names that the statements of a module bind, but for its imports."""
    names: set[str] = set()
    statements: list[ast.stmt] = list(syntax(modules()[module]).body)
    while statements:
        statement = statements.pop()
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(statement.name)
        elif not isinstance(statement, ast.Import | ast.ImportFrom):
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, ast.stmt):
                    statements.append(part)  # of an if, try, for or with
                else:
                    names |= {
                        name.id
                        for name in ast.walk(part)
                        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                    }
    return frozenset(names)


def folder_of(module: str) -> str:
    """The layer of a module: two parts of its name, three within :data:`GROUPS`, one of :data:`WHOLE`."""
    parts = module.split(".")
    if parts[0] == WHOLE:
        return WHOLE
    return ".".join(parts[: 3 if ".".join(parts[:2]) in GROUPS else 2])


def own_imports() -> Iterator[tuple[str, str]]:
    for module in modules():
        for imported in imports_of(module):
            if imported.split(".")[0] in ("node", "coordinator", "protocol", "hetnode"):
                yield module, imported


def test_every_folder_has_a_layer() -> None:
    folders = {folder_of(module) for module in modules() if "." in module} - {*GROUPS}
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


def kind_of(module: str) -> tuple[str, str]:
    """ "core", "ground", "leaf" or "root" of a module, and the name of the leaf.

    Ground is all that is neither: services that the core calls, such as TLS, processes, stores and placement.
    """

    def longest(folders: Iterable[str]) -> int:
        return max((len(each) for each in folders if f"{module}.".startswith(f"{each}.")), default=0)

    leaves = {name: longest(folders) for name, folders in LEAVES.items()}
    leaf = max(leaves, key=lambda name: leaves[name])
    if leaves[leaf]:
        return "leaf", leaf
    if longest(ROOTS):
        return "root", ""
    return ("core" if longest(CORE) else "ground"), ""


def test_only_roots_import_leaves_and_no_leaf_imports_another() -> None:
    wrong = [
        f"{module} ({' '.join(mine)}) imports {imported} ({' '.join(theirs)})"
        for module, imported in own_imports()
        for mine, theirs in [(kind_of(module), kind_of(imported))]
        if (theirs[0] == "leaf" and theirs[1] not in (mine[1], EXTENDS.get(mine[1])) and mine[0] != "root")
        or (theirs[0] == "root" and mine[0] != "root")
    ]
    assert not wrong


def test_the_core_does_not_know_what_roots_compose() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, imported in own_imports()
        if kind_of(module)[0] == "core" and f"{imported}.".startswith(tuple(f"{each}." for each in COMPOSED))
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


def test_pure_folders_know_neither_time_nor_network() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in modules()
        if folder_of(module) in PURE
        for imported in imports_of(module)
        if imported.split(".")[0] in IMPURE
    ]
    assert not wrong


def test_heavy_libraries_stay_in_their_folders() -> None:
    for module in modules():
        roots = {name.split(".")[0] for name in imports_of(module)}
        if module.startswith("coordinator"):
            assert not roots & {"torch", "hivemind", "datasets"}, module
        assert not roots & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, module
        assert "torch.load" not in modules()[module].read_text(), module


def test_only_the_package_of_the_transport_names_its_libraries() -> None:
    """Another transport is its own package and a line: nothing else may know this one."""
    names = ("hivemind", "p2pd", "libp2p", "node.exchange.hive")
    wrong = [
        f"{module} names {name}"
        for module, path in modules().items()
        if not module.startswith("node.exchange.hive")
        for name in names
        if name in path.read_text().lower()
    ]
    assert wrong == ["node.ipc.modules names node.exchange.hive"]


def test_names_are_imported_from_the_module_that_defines_them() -> None:
    wrong = [
        f"{module} imports {alias.name} from {node.module}"
        for module in modules()
        for node in ast.walk(syntax(modules()[module]))
        if isinstance(node, ast.ImportFrom) and node.module in modules() and node.module != "protocol.pb"
        for alias in node.names
        if alias.name not in defined_by(node.module) and f"{node.module}.{alias.name}" not in modules()
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
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno
                assert lines < 60, f"{module}.{node.name} has over 60 lines"


MOST_CORE_LINES, MOST_CORE_FILES = 14_040, 100
"""What a newcomer reads in two days. What comes is weighed against what can be a leaf, or be composed at a
root. That strangers have no say is a rule of rounds; 90 let all machines project anchors to the same bits,
without which pipelines alone export nothing of use with Muon; the last 65 let what a member has learned count
although its neighbour died, which happens to homes in most long rounds; 225 let a run of months change its
settings, without which three large runs of others would have failed, 4 say which stages are meant, 104
are mixtures of data and their changes: every large run of others has both; 7 keep the hash of a
specification, which took a fifteenth of the time of what a coordinator decides; 147 let a chain go on
within a round: of homes in rounds of an hour, chains that wait for the next one train a fifth less; and 17
make answers wait for the disk of a standby, without which it could not promise that no decision is lost, and
let nodes go on that all come back at once, 20 keep one member from filling the log, and 20
let a node end in order what it has begun, and train on after moments that were not finite."""
MOST_LINES = 82_276
"""Of production, so that a thing that comes is weighed against one that goes. The aim is 55,000; scores of
contributions, what protects a volunteer's machine (2,000 lines), open runs (400), the way on from an older
copy of a coordinator's folder (300), data as people have it (700), exports that llama.cpp reads (250), a
coordinator that has moved (80), the first day of people (320), OLMo2 (40), Muon (210), a checkout that is
used without an installation or tells its commit (40), a backup (100), a run whose loss is worse than no
model, a home that is only read and small words of the first day (40), runs that are found by an address
(300), what is different inside Windows (110), a port that nobody takes in between (25), nodes that are
called as their run calls them (30), what a run tells of itself and of its volunteers' ranks (110), why a
coordinator is silent (95), what is left after a death (112), a run that changes (450), scores
that find altered copies (230), mixtures, phases and validation sets (460), seats that are taken within a
round (520), what is said of data that are named wrongly or have changed (88), a second coordinator,
without which a run of months ends with one machine (900), tokens that are made once (487), an object store,
with which a home sends one copy and not twenty (1,220), what the model can do while it learns (1,250), owners
and pages for any web host (640), import hetnode (370), and cards that are too small for their stages, joins
that are broken off, documents apart, and nodes for several cards (870), a worker whose memory does not
grow with its rounds (28), updates that do not depend on the number of replicas (109), and what keeps
strangers and single members from stopping a run, judging others or filling the log (120), are worth more
than their lines."""
WRITTEN_BY_THE_PROGRAM = ("initial", "began_as", "data.tokenizer_sha256", "data.past", "data.separator")
"""Fields of a specification that nobody chooses."""
MOST_SETTINGS = 77
"""Each doubles the runs that nobody has tried; what nobody tunes is a constant with its reason. The last are
outer.clip, without which no run could repeat the paper's plain mean, so that each recorded result would be
lost, data.end_token: many published vocabularies name their end of text in a way of their own,
model.tied_head: most small models of today have one matrix as embedding and head, and model.norms: OLMo2, of
which all data and code are public, has them after attention and feed-forward, which no other setting says;
and inner.optimizer: Muon needs one moment less, and learned more from equal bytes in a trial by others;
inner.decay_rounds: a run whose end nobody knows cannot have a cosine; and data.validation: where the mixture
changes, a part that is held out of it measures something else in each phase; and data.pack: a run of short
documents ends 2 to 4 % lower where they do not see each other, and no other setting says so; and outer.merge:
with it the best outer learning rate is the same with 4 to 32 replicas, which come and go."""
MOST_COMMANDS = 41
"""What a person has to survey: with more, 'hetnode --help' and its families hide each other. The last
are 'run backup': a run must not end with one disk, and a folder in use cannot be copied otherwise; and
'owner': a person's secret is shown by no command that writes a log; and 'site': a page that outlives its
coordinator is files, which a cron job writes; and 'data
prepare': tokens that all nodes share are made before a run."""
MOST_OPTIONS = 174
"""Each is a promise to scripts; settings of runs go to --set, how trials compute to --compute. The last are
--recover: on each machine of an owner but the first; --open and its two bounds: how many strangers a run
takes depends on its size; where a backup goes, peers for programs, the two of typer by which a shell
completes names, how to ask for an invite, which
settings of a run change, from which round on and why; and --standby and --take-over: whether another
coordinator is dead is what a person has to say; and what a follower asks of the models of a run: how often,
which prompts and which tasks; and --objects: which bucket a run may fill is its owner's; and --track: which
tool draws the figures; and how often an export is written anew, and whose repository gets it; and of data
that are prepared where they go, the tokenizer and --set."""


def test_the_core_can_be_read_and_the_tree_does_not_grow() -> None:
    core, files, lines = 0, 0, 0
    for module, path in modules().items():
        count = len(path.read_text().splitlines())
        lines += count
        if count and kind_of(module)[0] == "core":
            core, files = core + count, files + 1
    assert core <= MOST_CORE_LINES
    assert files <= MOST_CORE_FILES
    assert lines <= MOST_LINES


def test_few_settings() -> None:
    sections = [type(field.default) for field in RunSpec.model_fields.values()]
    nested = [each for each in sections if issubclass(each, Section)]
    of_sections = sum(len(each.model_fields) for each in nested)
    assert of_sections + len(sections) - len(nested) - len(WRITTEN_BY_THE_PROGRAM) <= MOST_SETTINGS


def test_a_class_name_is_defined_once() -> None:
    """One name, one thing, in the whole tree; private classes are of their file."""
    found: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_few_commands_and_options() -> None:
    """Leaf commands of the command line, and options of all but --help."""
    commands, options = 0, 0
    left = [get_command(app), *(command.load(name) for name, command in COMMANDS.items())]
    while left:
        command = left.pop()
        options += sum(each.param_type_name == "option" and each.name != "help" for each in command.params)
        below = list(getattr(command, "commands", {}).values())
        left += below
        commands += not below and command.name != "hetnode"
    assert commands <= MOST_COMMANDS
    assert options <= MOST_OPTIONS


@pytest.mark.parametrize("module", ["node.process", "coordinator.app", "node.cli.main", "hetnode"])
def test_main_processes_import_neither_torch_nor_hivemind(module: str) -> None:
    """They live in children; an event loop must start fast and never share their state, nor hold 200 MB more.

    prometheus_client is imported where metrics are served.
    """
    heavy = "{'torch', 'hivemind', 'prometheus_client', 'pandas'}"
    check = f"import sys, {module}; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, cwd=ROOT).returncode == 0


def test_every_file_of_a_package_is_packed() -> None:
    """A face without its pages would install without an error, and fail at its first use."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packages = [ROOT / package for package in ("coordinator", "hetnode", "node", "protocol")]
    there = {*packages, *(path for package in packages for path in package.rglob("*"))}
    files = {path for path in there if path.is_file()}
    packed = {path for folder in there - files for part in patterns["*"] for path in folder.glob(part)}
    assert {path for path in files if path.suffix not in (".py", ".pyi", ".pyc")} == packed & files


def test_the_committed_protobuf_code_is_fresh(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / ".ci" / "generate-protobuf"), str(tmp_path)]
    subprocess.run(command, check=True, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"})
    generated = sorted((tmp_path / "protocol" / "pb").iterdir())
    assert len(generated) == 9
    for path in generated:
        assert path.read_text() == (ROOT / "protocol" / "pb" / path.name).read_text(), path.name
