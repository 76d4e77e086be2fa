"""Few open files: a process raises its limit as far as it can, and says so where that is not enough."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

LIMITS = [(256, 4096, False), (256, 512, True), (512, 512, True)]
COMMANDS = ("doctor", "join")
CASES = [(command, soft, hard) for command in COMMANDS for soft, hard, _ in LIMITS]
PROGRAM = """
import os, resource, sys
from node.cli import doctor_checks
from node.cli.main import main
sys.argv = ["hetnode", "join", "no-such-run"]
for command, soft, hard in CASES:
    if os.fork() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        main() if command == "join" else print(doctor_checks.check_descriptors())
        sys.exit()
    os.wait()
    print("next", flush=True)
"""


@cache
def said() -> dict[tuple[str, int, int], str]:
    """What each command says under each limit: all are forks of one interpreter, which has imported them."""
    program = f"CASES = {CASES!r}\n{PROGRAM}"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    *texts, end = ran.stdout.split("next\n")
    assert end == ""
    return dict(zip(CASES, texts, strict=True))


@pytest.mark.parametrize(("soft", "hard", "warns"), LIMITS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_low_hard_limit_is_named(command: str, soft: int, hard: int, warns: bool) -> None:
    text = said()[command, soft, hard]
    assert ("may open 512 files at once" in text) is warns, text
    assert ("LimitNOFILE" in text) is warns
    if command == "join":
        assert "no-such-run" in text
    elif not warns:
        assert "4,096 at once" in text
