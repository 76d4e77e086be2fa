"""The rules of test code: nothing from another test module, no private name of another file."""

from __future__ import annotations

import ast
import gc
import re
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.syntax import syntax

# Private names that tests may use: (file below tests/, name) -> why.
PRIVATE_NAMES_IN_TESTS = {
    ("virtual/loop.py", "_cancelled"): "an event loop handles asyncio's timers, which have no public state",
    ("virtual/loop.py", "_context"): "as above",
    ("virtual/loop.py", "_run"): "as above",
    ("support/hive_noise.py", "_client"): "hivemind offers no other way to send raw bytes",
    (
        "support/hive_stranger.py",
        "_client",
    ): "hivemind dials only initial peers, and fails without them",
    ("support/hive_recording_host.py", "_step"): "the test is that hivemind's step itself runs",
    ("node/watch/test_app.py", "_compositor"): "textual shows no one else the characters on its screen",
    ("node/core/worker/test_compute.py", "_dynamo"): "torch._dynamo is the public name of a module of torch",
}


def test_tests_import_from_no_other_test_module() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {found[1]}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for found in re.finditer(r"^\s*from (tests\.\S*\btest_\w+\S*) import", path.read_text(), re.MULTILINE)
    ]
    assert not wrong, "what two test modules need is in tests/builders.py, tests/support or tests/virtual"


def test_tests_use_no_private_name_of_another_file() -> None:
    wrong = {
        (path.relative_to(ROOT / "tests").as_posix(), name)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in private_names_of_others(syntax(path))
    }
    assert wrong == set(PRIVATE_NAMES_IN_TESTS)


def private_names_of_others(tree: ast.Module) -> set[str]:
    """Names with one leading underscore that a file uses of objects or modules, and defines nowhere."""
    used, defined = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("self" | "cls"), name):
                defined.add(name)  # an object of this file
            case ast.Attribute(_, name):
                used.add(name)
            case ast.ImportFrom():
                used |= {alias.name for alias in node.names}
            case ast.ClassDef(name) | ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                defined.add(name)
            case ast.AnnAssign(ast.Name(name)):
                defined.add(name)  # a field of a dataclass
            case ast.Constant(str(text)) if text.startswith(("node.", "coordinator.", "protocol.")):
                used |= set(text.split("."))  # a name that a test replaces
            case ast.Call(ast.Name(call) | ast.Attribute(_, call), [_, ast.Constant(str(name)), *_]) if (
                call in ("setattr", "delattr", "getattr")
            ):
                used.add(name)
            case _:
                pass
    return {name for name in used - defined if name.startswith("_") and not name.startswith("__")}


def test_a_file_is_parsed_without_collections_in_between(tmp_path: Path) -> None:
    """Else what other tests have left behind could fail a test here."""
    path, counts = tmp_path / "long.py", []
    path.write_text("a = f(b, [c, {d: e}])\n" * 2000)
    gc.callbacks.append(lambda phase, _: counts.append(phase))
    try:
        assert len(syntax(path).body) == 2000
    finally:
        gc.callbacks.pop()
    assert not counts
    assert gc.isenabled()
