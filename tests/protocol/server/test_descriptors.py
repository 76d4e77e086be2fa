"""Few open files: a process raises its limit as far as it can, and says so where that is not enough."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

LIMIT = resource.RLIMIT_NOFILE


@pytest.mark.parametrize(("soft", "hard", "warns"), [(256, 4096, False), (256, 512, True), (512, 512, True)])
@pytest.mark.parametrize("command", ["doctor", "join"])
def test_a_low_hard_limit_is_named(command: str, soft: int, hard: int, warns: bool) -> None:
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from node.cli import doctor_checks; from node.cli.main import main\n"
        f"import sys; sys.argv = ['hetnode', 'join', 'no-such-run']\n"
        f"print(doctor_checks.check_descriptors()) if {command == 'doctor'} else main()"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = ran.stdout + ran.stderr
    assert ("may open 512 files at once" in said) is warns, said
    assert ("LimitNOFILE" in said) is warns
    if command == "doctor" and not warns:
        assert "4,096 at once" in said
