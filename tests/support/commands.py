"""``hetnode`` commands, forked from one template process that has imported what all commands need.

A new interpreter needs up to 4 CPU seconds to import torch and the transport. Each process of the test suite
has one template, and what a test starts ends with it. Some tests start a new interpreter on purpose, as a
user does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from node.ipc.modules import COMMAND_MODULES
from node.ipc.template import ForkedProcess, Template, own_template

# Wide lines without colours, so that a test finds what a message says.
PLAIN = {"COLUMNS": "200", "NO_COLOR": "1"}


def template() -> Template:
    """The template of this process, which also forks the children of a node that runs in this process."""
    return own_template(COMMAND_MODULES)


def start(*arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> ForkedProcess:
    """Start a command that may start children of its own; `log` gets both of its outputs at its end.

    Args:
        environment: the whole of it; None takes that of this process.
    """
    with log.open("ab") as output:
        return template().fork(
            "node.__main__",
            arguments,
            environment=environment,
            stdout=output.fileno(),
            stderr=output.fileno(),
            with_template=True,
        )


def hetnode(
    *arguments: str, folder: Path | None = None, check: bool = False, seconds: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in `folder`, with wide lines and without colours.

    Raises CalledProcessError if `check` is set and the status is not 0; TimeoutExpired after `seconds`.
    """
    environment = {**os.environ, **PLAIN}
    result = run("node.__main__", *arguments, folder=folder, environment=environment, seconds=seconds)
    if check:
        result.check_returncode()
    return result


def run(
    module: str,
    *arguments: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Call ``main()`` of `module` in a forked process, and return what it printed and its status."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = template().fork(
            module,
            arguments,
            environment=environment,
            stdout=out.fileno(),
            stderr=errors.fileno(),
            folder=folder,
            with_template=True,
        )
        try:
            status = process.wait(seconds)
        finally:
            process.kill()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, status, *texts)


def imported_by(*commands: Sequence[str], names: tuple[str, ...]) -> str:
    """Which of the modules `names` are imported when commands have run in one new interpreter, as a list.

    After it the first command that has imported one.
    """
    code = (
        "import sys\n"
        "from node.cli.main import app\n"
        "found, by = [], []\n"
        f"for arguments in {list(map(list, commands))!r}:\n"
        "    app(arguments, standalone_mode=False)\n"
        f"    if found := [name for name in {names!r} if name in sys.modules]:\n"
        "        by = arguments\n"
        "        break\n"
        "print(found, *by)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]
