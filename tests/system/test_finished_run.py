"""A run that is finished: every command that would go on with it says so, and ends well."""

from __future__ import annotations

import asyncio
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from node.cli import finished
from node.folder import keep_only_run, remember_finished, remember_node_folder
from node.here.known_runs import Destination
from node.security import credentials
from node.security.identity import open_identity
from protocol.trust.invite import Invite
from protocol.types import Role
from tests.builders import spec_of
from tests.support import certificates
from tests.support.commands import hetnode, start
from tests.support.dashboard import ask
from tests.support.ports import free_port
from tests.support.processes import COORDINATOR, ProcessSwarm
from tests.support.waiting import wait_until

SPEC = spec_of(1, 1, rounds=2, inner__steps=2)


def see_pages(run: Path, log: Path) -> None:
    """Read the pages of a run as the last words of its coordinator say."""
    (run / "dashboard-url").write_text("http://127.0.0.1:9/\n\n")  # as a coordinator that is killed leaves it
    out = hetnode("coordinator", "--folder", str(run), check=True).stdout
    command = shlex.split(next(line for line in out.splitlines() if "pages" in line).partition(": ")[2])
    serving = start(*command[1:], log=log)
    try:
        wait_until(lambda: "Ctrl-C ends them." in log.read_text(), 60, log.read_text)
        parts = urlsplit(log.read_text().split()[0])
        assert parts.hostname
        assert parts.port
        assert asyncio.run(ask((parts.hostname, parts.port), "/")).status == 200
        assert asyncio.run(ask((parts.hostname, parts.port), "/api/status")).json["phase"] == "finished"
        serving.send_signal(signal.SIGINT)
        assert serving.wait(30) == 0
    finally:
        serving.kill()


@pytest.mark.swarm
def test_a_finished_run_says_so_at_every_start(tmp_path: Path) -> None:
    with ProcessSwarm(SPEC, tmp_path, {"a": Role.REPLICA}) as swarm:
        swarm.start()
        swarm.wait_over(120, "a", COORDINATOR)
        options = ("--config", str(tmp_path / "run.toml"))
        for again in (options, ()):
            out = hetnode("coordinator", *again, "--folder", str(swarm.run), check=True).stdout
            assert f"The run in {swarm.run} is finished: 2 rounds are decided." in out
            assert "The last validation loss is " in out
            assert "(replica 0)" in out
            assert "hetnode export FOLDER DIR" in out
            assert "another --folder" in out
        own = ("--identity", str(tmp_path / "a" / "identity.key"), "--folder", str(tmp_path / "a"))
        known = next((tmp_path / "a" / "identity.runs").iterdir())
        for destination in (("--invite-file", str(tmp_path / "invite")), (known.name,), (str(known),)):
            out = hetnode("join", *destination, *own, check=True, seconds=60).stdout
            assert f"This node's part of the model is in {tmp_path / 'a'}." in out
        for asked in (swarm.run, known):
            assert "is finished" in hetnode("status", str(asked), check=True).stdout
        assert "after round 2" in hetnode("export", str(known), str(tmp_path / "model"), check=True).stdout
        see_pages(swarm.run, tmp_path / "pages.log")
        (swarm.run / "metrics.jsonl").unlink()
        out = hetnode("coordinator", *options, "--folder", str(swarm.run), check=True).stdout
        assert f"The run in {swarm.run} is finished." in out


def test_what_was_finished_counts_until_the_node_takes_part_elsewhere(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "peer.key")
    issuer = certificates.authority()
    run = issuer.run_id(spec_of())
    known = replace(
        certificates.enrolled(identity, run, issuer=issuer),
        api=f"127.0.0.1:{free_port()}",
        tls=certificates.credentials(identity.peer, issuer, ended=True),
    )
    known.save()
    invite = Invite(f"127.0.0.1:{free_port()}", "127.0.0.1:1", issuer.pin, "00" * 6, bytes(16))
    folder = tmp_path / "node"
    folder.mkdir()
    keep_only_run(folder, run, known.coordinator)
    remember_node_folder(known.folder, folder)
    for wanted in (Destination(None, run), Destination(invite)):
        remember_finished(known.folder, False)
        assert finished.text_for(wanted, identity.path) is None
        remember_finished(known.folder, True)
        text = finished.text_for(wanted, identity.path)  # although the certificate has expired meanwhile
        assert text is not None
        assert f"{folder}." in text
    assert finished.text_for(Destination(None, "another"), identity.path) is None
    keep_only_run(folder, "another", known.coordinator)
    assert finished.text_for(Destination(None, run), identity.path) is None


def test_a_relay_remembers_too(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "peer.key")
    known = certificates.enrolled(identity, "run-1")
    remember_finished(known.folder, True)
    assert "no relay" in str(finished.node_text(credentials.load(known.folder)))
