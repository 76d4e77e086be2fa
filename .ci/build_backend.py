"""How the package is built: by setuptools, but a wheel has all in one package, `hetnode`.

In the checkout, the folders node, protocol and coordinator lie at the top and import each other by these
names, which in the environment of a user belong to others. So a wheel is built from a copy of the tree: there
the folders lie in hetnode/, the package for programs, and every import of them is rewritten in its line, so
that tracebacks have the right numbers. No text is rewritten: a text that names a module derives the name from
__name__ or __package__.
"""

import ast
import os
import shutil
import subprocess
import tempfile
import tomllib
from contextlib import chdir
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import build_editable, prepare_metadata_for_build_editable

__all__ = ("build_editable", "build_sdist", "build_wheel", "prepare_metadata_for_build_editable")
NOTE = "commit.txt"
VERSION = "hetnode/protocol/server/version.py"
PACKAGES = ("coordinator", "node", "protocol")
COMMAND = "node.__main__:main"
START = "from hetnode.node.__main__ import main\n\nif __name__ == '__main__':\n    main()\n"


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel in `wheel_directory`, and return its name: see PEP 517."""
    source, folder = Path.cwd(), os.path.abspath(wheel_directory)
    check_tag(source)
    with tempfile.TemporaryDirectory() as copy, chdir(copy):
        write_tree(source, Path(copy))
        name: str = build_meta.build_wheel(folder, config_settings)
    return name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build an sdist, which knows the commit of its sources, in `sdist_directory`: see PEP 517."""
    note, in_checkout = Path(NOTE), Path(".git").exists()
    check_tag(Path())
    if in_checkout:
        note.write_text(_commit(Path()))
    try:
        name: str = build_meta.build_sdist(sdist_directory, config_settings)
    finally:
        if in_checkout:
            note.unlink()
    return name


def write_tree(source: Path, target: Path) -> None:
    """Write what a wheel is built from, made of the checkout or sdist `source`, into the folder `target`."""
    for package, place in (("hetnode", "."), *((each, each) for each in PACKAGES)):
        ignored, folder = shutil.ignore_patterns("__pycache__"), target / "hetnode" / place
        shutil.copytree(source / package, folder, ignore=ignored, copy_function=_copy, dirs_exist_ok=True)
    (target / "hetnode" / "__main__.py").write_text(START)
    for name in ("LICENSE", "README.md"):
        shutil.copy2(source / name, target)
    module = (target / VERSION).read_text()
    assert module.count('COMMIT = ""\n') == 1
    (target / VERSION).write_text(module.replace('COMMIT = ""', f'COMMIT = "{_commit(source)}"'))
    project = (source / "pyproject.toml").read_text()
    assert project.count(f'"{COMMAND}"') == 1
    (target / "pyproject.toml").write_text(project.replace(f'"{COMMAND}"', f'"hetnode.{COMMAND}"'))


def _commit(source: Path) -> str:
    """Of a checkout, or what an sdist notes; "" without both."""
    if (source / NOTE).exists():
        return (source / NOTE).read_text()
    if not (source / ".git").exists():
        return ""
    return _git(source, "describe", "--always", "--dirty", "--exclude=*")


def check_tag(source: Path) -> None:
    """Raise ValueError where the commit of a checkout is tagged as another version than pyproject.toml's."""
    tags = _git(source, "tag", "--points-at", "HEAD", "v[0-9]*").split() if (source / ".git").exists() else []
    version = tomllib.loads((source / "pyproject.toml").read_text())["project"]["version"]
    if tags and f"v{version}" not in tags:
        raise ValueError(
            f"this commit has the tag {tags[0]}, and pyproject.toml the version {version}: make them equal"
        )


def _git(source: Path, *arguments: str) -> str:
    try:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _copy(source: str, target: str) -> None:
    shutil.copy2(source, target)
    if target.endswith((".py", ".pyi")):
        Path(target).write_bytes(rewritten(Path(source).read_bytes()))
        shutil.copystat(source, target)


def rewritten(source: bytes) -> bytes:
    """A module with its imports of our packages from `hetnode`, in the same lines.

    Raises ValueError for ``import node.name``, which would bind another name than its line says.
    """
    lines = source.splitlines(keepends=True)
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, ast.Import) and any(_is_ours(alias.name) for alias in each.names):
            raise ValueError(f"write 'from PACKAGE import NAME' in place of: {ast.unparse(each)}")
        if isinstance(each, ast.ImportFrom) and each.module and not each.level and _is_ours(each.module):
            line, start = each.lineno - 1, each.col_offset
            before, name, after = lines[line][start:].partition(each.module.encode())
            lines[line] = lines[line][:start] + before + b"hetnode." + name + after
    # What generated code of protobuf gives its classes as their module.
    return b"".join(lines).replace(b"'protocol.pb.", b"'hetnode.protocol.pb.")


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES
