"""A whole swarm keeps its secrets: no command line, log, metric or file that others can read has them."""

from __future__ import annotations

import base64
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from protocol.trust.invite import decode

pytestmark = pytest.mark.swarm


def test_no_secret_of_a_swarm_can_be_seen_by_others(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    command = ["swarm", "up", "--preset", "nano", "--rounds", "2", "--folder", str(folder)]
    with log.open("wb") as output:
        swarm = psutil.Popen([sys.executable, "-m", "node.cli.main", *command], stdout=output, stderr=output)
    seen: set[tuple[int, bytes]] = set()
    invite = ""
    deadline = time.monotonic() + 200
    while swarm.poll() is None:
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        seen |= set(command_lines(swarm))
        with suppress(FileNotFoundError):  # it is there while the nodes may need it
            assert mode_of(folder / "invite") == 0o600
            invite = (folder / "invite").read_text().strip() or invite
        time.sleep(0.05)
    assert swarm.returncode == 0, log.read_text(errors="replace")
    assert not (folder / "invite").exists()
    secrets = {"invite": [invite.encode()], **forms_of("invite's secret", decode(invite).secret)}
    for file in folder.rglob("*"):
        if file.name == "identity.key":
            secrets |= forms_of(str(file), file.read_bytes()[4:36])
        elif file.suffix in (".key", ".pem") and b"PRIVATE KEY" in file.read_bytes():
            lines = file.read_bytes().splitlines()
            secrets[str(file)] = [line for line in lines if len(line) > 32 and b"-" not in line]
    # the coordinator's three, and two of each of the three nodes, and the two of the invite
    assert len(secrets) == 3 + 6 + 2
    assert len({pid for pid, _ in seen}) > 10  # forked processes have the command line of their template
    assert (folder / "metrics.jsonl").stat().st_size
    open_to_others = [file for file in folder.rglob("*") if file.is_file() and mode_of(file) & 0o077]
    assert {file.name for file in open_to_others} >= {
        "metrics.jsonl",
        "coordinator.log",
        "coordinator.sqlite",
    }
    places = {"command lines": b"\0".join(line for _, line in seen), "output": log.read_bytes()}
    places |= {str(file): file.read_bytes() for file in open_to_others}
    for owner, forms in secrets.items():
        assert forms
        for place, content in places.items():
            assert not any(form in content for form in forms), f"{place} shows the secret of {owner}"


def command_lines(root: psutil.Process) -> Iterator[tuple[int, bytes]]:
    """Process id and arguments of the process and of all below it."""
    try:
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return
    for process in family:
        try:
            yield process.pid, "\0".join(process.cmdline()).encode()
        except psutil.Error:
            continue


def forms_of(owner: str, secret: bytes) -> dict[str, list[bytes]]:
    """How a careless programmer might have written it."""
    encoded = base64.b64encode(secret).rstrip(b"=")[:-1], base64.urlsafe_b64encode(secret).rstrip(b"=")[:-1]
    return {owner: [secret, secret.hex().encode(), repr(secret).encode(), *encoded]}


def mode_of(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)
