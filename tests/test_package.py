"""What a wheel is built from: the packages below ``hetnode``; nothing needs them at the top."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.support.hidden_libraries import HIDE
from tests.support.paths import ROOT
from tests.support.syntax import syntax

PACKAGES = ("coordinator", "node", "protocol")
SOURCES = [
    path
    for package in (*PACKAGES, "hetnode")
    for path in sorted((ROOT / package).rglob("*"))
    if path.suffix in (".py", ".pyi")
]
_SPEC = spec_from_file_location("build_backend", ROOT / ".ci" / "build_backend.py")
assert _SPEC is not None
assert _SPEC.loader is not None
backend = module_from_spec(_SPEC)
_SPEC.loader.exec_module(backend)

USE_ALL = """
import importlib, pkgutil, sys
import hetnode
for module in pkgutil.walk_packages(hetnode.__path__, "hetnode."):
    importlib.import_module(module.name)
from hetnode.node.ipc import modules
from hetnode.protocol.spec import exchanges, quantizers
for name in (modules.COMMAND, *modules.COMMAND_MODULES):
    importlib.import_module(name)
tables = (quantizers.PAYLOAD_QUANTIZERS, quantizers.LINK_QUANTIZERS)
found = [*quantizers.INDEX_CODES.values(), *(entry.path for table in tables for entry in table.values())]
for entry in exchanges.EXCHANGES.values():
    members = entry.members and f"{modules.TRANSPORT}.{entry.members}"
    found += [each for each in (entry.settlement, entry.results, members, entry.view, entry.traffic) if each]
for each in found:
    pkgutil.resolve_name(each)
assert not {"node", "protocol", "coordinator"} & set(sys.modules)
"""


def test_imports_are_rewritten_in_their_lines() -> None:
    for path in SOURCES:
        old, new = path.read_bytes(), backend.rewritten(path.read_bytes())
        changed = []
        for before, after in zip(old.splitlines(), new.splitlines(), strict=True):
            if before != after:
                assert before == after.replace(b"hetnode.", b"", 1), path
                changed.append(after.lstrip().startswith(b"from hetnode."))
        imports = [node.module for node in ast.walk(syntax(path)) if isinstance(node, ast.ImportFrom)]
        assert sum(changed) == sum(module.partition(".")[0] in PACKAGES for module in imports if module), path
        assert all(changed) or path.parent.name == "pb"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from node import a\n", "from hetnode.node import a\n"),
        ("if x:\n    from protocol.b import (\n        c,\n    )\n", None),
        ("é = '''\nfrom node import a\n'''\nfrom . import node\nfrom nodes import b\nimport json\n", ""),
    ],
)
def test_only_imports_are_rewritten(source: str, expected: str | None) -> None:
    if expected is None:
        expected = source.replace("protocol.b", "hetnode.protocol.b")
    assert backend.rewritten(source.encode()).decode() == (expected or source)


def test_an_import_that_binds_a_package_is_refused() -> None:
    with pytest.raises(ValueError, match=r"json, node\.ipc"):
        backend.rewritten(b"import json, node.ipc\n")


def test_a_build_at_a_tag_has_the_version_of_the_tag(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    backend.check_tag(tmp_path)
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "v0.1")
    with pytest.raises(ValueError, match=r"the tag v0\.1, and pyproject.toml the version 0\.2\.0"):
        backend.check_tag(tmp_path)
    git("tag", "v0.2.0")
    backend.check_tag(tmp_path)


def texts_of(tree: ast.Module) -> Iterator[str]:
    """The texts of a module, each from its start; of one with values, what is before the first."""
    parts = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values[1:]
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def test_no_text_names_a_module_as_the_checkout_has_it() -> None:
    """Nothing rewrites texts: what is imported by its name takes the name from __name__ or __package__."""
    wrong = []
    for path in SOURCES:
        if path.parent.name != "pb":
            for text in texts_of(syntax(path)):
                named = re.match(rf"({'|'.join(PACKAGES)})\.(\w+)(?!\S*\s)", text)
                own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                if named and text != own and list((ROOT / named[1]).glob(f"{named[2]}*")):
                    wrong.append(f"{path.relative_to(ROOT)}: {text}")
    assert not wrong


def test_what_is_packed_needs_no_name_of_the_user_and_no_library_of_an_extra(tmp_path: Path) -> None:
    """Where a user has modules with the names of our packages, all of it is imported, and a command runs."""
    backend.write_tree(ROOT, tmp_path)
    folder = tmp_path / "of a user"
    folder.mkdir()
    for package in PACKAGES:
        (folder / f"{package}.py").write_text("raise SystemExit('this is another program')\n")
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{tmp_path}"}
    for command in (("-c", HIDE + USE_ALL), ("-m", "hetnode", "spec", "show", "nano")):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
