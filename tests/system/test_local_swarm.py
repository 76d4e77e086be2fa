"""The whole system with real processes, sockets and signals. One test starts it exactly as a user does."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetnode.runs import open_run
from node.checkpoint import global_model
from node.security.owner import keep_owner, new_owner, owner_file
from node.views import run_history
from protocol.errors import ExitCode
from protocol.trust.invite import decode
from protocol.trust.owner import OwnerKey
from protocol.types import Role
from tests.builders import spec_of
from tests.support.commands import hetnode, start
from tests.support.examples_of_docs import notebook
from tests.support.processes import ProcessSwarm
from tests.support.waiting import is_alive, wait_until

pytestmark = pytest.mark.swarm


def start_as_user(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a command as a user does, in a new interpreter."""
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, "-m", "node", *arguments], stdout=output, stderr=output)


def mentioning(folder: Path) -> list[psutil.Process]:
    """The processes of a run: their command line or an open file contains its folder."""
    found = []
    for process in psutil.process_iter():
        try:
            opened = (file.path for file in process.open_files())  # such as the log
            if process.pid != os.getpid() and any(
                str(folder) in name for name in (*process.cmdline(), *opened)
            ):
                found += [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
    return list({process.pid: process for process in found}.values())


def gone(processes: list[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


def events_of(folder: Path) -> list[dict[str, Any]]:
    return run_history.read_events(folder / "metrics.jsonl")


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for the sockets of a test's processes; no other process uses it.

    Its path is short, because that of a socket must be.
    """
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


MEMBERS = {"a": Role.STAGE, "b": Role.STAGE, "c": Role.REPLICA}
UP = ("swarm", "up", "--preset", "nano", "--folder")


@dataclass(frozen=True)
class Finished:
    """A swarm that has ended well.

    Attributes:
        seen: process id and command line of its processes while it ran.
        invite: what its nodes joined with.
        owner: whose its nodes are.
    """

    folder: Path
    log: Path
    seen: set[tuple[int, bytes]]
    invite: str
    owner: OwnerKey


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    above = tmp_path_factory.mktemp("finished")
    folder, log = above / "run", above / "log"
    owner = new_owner()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CONFIG_HOME", str(above))
        keep_owner(owner, owner_file())
        process = start_as_user(*UP, str(folder), log=log)
    root, seen, invite = psutil.Process(process.pid), set[tuple[int, bytes]](), ""

    def has_ended() -> bool:
        nonlocal invite
        seen.update(command_lines(root))
        with suppress(FileNotFoundError):  # it is there while the nodes may need it
            assert mode_of(folder / "invite") == 0o600
            invite = (folder / "invite").read_text().strip() or invite
        return process.poll() is not None

    wait_until(has_ended, 200, lambda: end_of(log))
    assert process.returncode == 0, end_of(log)
    return Finished(folder, log, seen, invite, owner)


def test_a_swarm_trains_commits_every_round_and_leaves_a_complete_run_folder(finished: Finished) -> None:
    folder = finished.folder
    said = finished.log.read_text()
    assert said.startswith("a swarm starts on this machine")
    # Not each round, and not how long the rest takes: the view may come too late for them on a busy machine.
    assert re.search(r"round \d of 3: val. loss replica", said), said
    events = events_of(folder)
    decisions = [event for event in events if event["event"] == "decision"]
    assert {(d["stage"], d["round"]) for d in decisions} == {(s, r) for s in (0, 1) for r in (1, 2, 3)}
    assert all(d["committed"] for d in decisions)
    history = run_history.history_of(events)
    assert history.diverged == 0
    assert [len(replica.losses) for replica in history.replicas] == [4, 4]
    assert all(replica.last < replica.first for replica in history.replicas)
    assert 0 < history.traffic.link < history.traffic.link_dense
    assert 0 < history.traffic.payload < history.traffic.payload_dense
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    model = global_model.read(folder / "checkpoint")
    assert (sorted(model.stages), model.round_number) == ([0, 1], 3)
    assert not mentioning(folder)
    generated = hetnode("generate", str(folder), "--prompt", "def ", "--tokens", "5", check=True)
    assert generated.stdout.startswith("def ")


def test_the_program_of_the_documents_reads_what_is_left(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(finished.folder)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(notebook()[1], names)
    losses = names["history"].query("replica == 0")["validation_loss"]
    expected = run_history.history_of(events_of(finished.folder)).replicas[0].losses
    assert list(losses) == [loss for _, loss in expected]
    (credit,) = open_run(finished.folder).answers.credits().credits
    assert (credit.owner, credit.nodes) == (finished.owner.owner, 3)
    assert names["model"].round_number == 3
    assert names["logits"].shape == (1, 4, names["model"].spec.model.vocabulary)


def test_no_secret_of_a_swarm_can_be_seen_by_others(finished: Finished) -> None:
    """No command line, log, metric or file that others can read has one."""
    folder, seen, invite = finished.folder, finished.seen, finished.invite
    assert not (folder / "invite").exists()
    phrase = finished.owner.phrase.encode()
    secrets = {
        "owner": [phrase, phrase.replace(b"-", b"")],
        "invite": [invite.encode()],
        **forms_of("invite's secret", decode(invite).secret),
    }
    for file in folder.rglob("*"):
        if file.name == "identity.key":
            secrets |= forms_of(str(file), file.read_bytes()[4:36])
        elif file.suffix in (".key", ".pem") and b"PRIVATE KEY" in file.read_bytes():
            lines = file.read_bytes().splitlines()
            secrets[str(file)] = [line for line in lines if len(line) > 32 and b"-" not in line]
    # the coordinator's three, and two of each of the three nodes, the two of the invite, and the owner's
    assert len(secrets) == 3 + 6 + 2 + 1
    assert len({pid for pid, _ in seen}) > 10  # forked processes have the command line of their template
    assert (folder / "metrics.jsonl").stat().st_size
    open_to_others = [file for file in folder.rglob("*") if file.is_file() and mode_of(file) & 0o077]
    assert {file.name for file in open_to_others} >= {
        "metrics.jsonl",
        "coordinator.log",
        "coordinator.sqlite",
    }
    places = {"command lines": b"\0".join(line for _, line in seen), "output": finished.log.read_bytes()}
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


@pytest.mark.parametrize("moment", ["at the start", "while training"])
def test_ctrl_c_ends_every_process_and_leaves_none_behind(sockets: Path, tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "run"
    process = start(*UP, str(folder), "--rounds", "1000", log=tmp_path / "log")
    if moment == "at the start":
        root = psutil.Process(process.pid)
        wait_until(lambda: len(root.children(recursive=True)) > 3, 60, "processes to have started")
    else:
        wait_until(
            lambda: any(event["event"] == "decision" for event in events_of(folder)),
            120,
            "a decision",
        )
    processes = mentioning(folder)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, end_of(tmp_path / "log")
    wait_until(lambda: gone(processes), 30, "every process to be gone")
    assert not list(sockets.glob("hetnode-*"))


def test_a_killed_swarm_leaves_no_process_behind_and_resumes_with_its_former_loss(
    sockets: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def rounds() -> list[int]:
        return [event["round"] for event in events_of(folder) if event["event"] == "decision"]

    process = start(*UP, str(folder), "--rounds", "14", log=tmp_path / "log")
    wait_until(lambda: max(rounds(), default=0) >= 1, 120, "a round")
    # On a busy machine to find the processes takes as long as some rounds: not just before the kill.
    processes = mentioning(folder)
    assert len(processes) > 10
    wait_until(lambda: max(rounds()) >= 3, 120, "3 rounds")
    process.kill()
    process.wait()
    wait_until(lambda: gone(processes), 30, "every process to be gone")
    wait_until(lambda: not list(sockets.glob("hetnode-*")), 30, "their sockets to be gone")
    before = max(rounds())
    assert before < 13, "the run was over before the kill"
    losses = run_history.history_of(events_of(folder)).replicas[0].losses
    resumed = start("swarm", "up", "--resume", str(folder), log=tmp_path / "resumed")
    assert resumed.wait(200) == 0, end_of(tmp_path / "resumed")
    events = events_of(folder)
    assert sorted({event["round"] for event in events if event["event"] == "decision"}) == list(range(1, 15))
    assert sum(event["event"] == "decision" for event in events) == 2 * 14  # none was decided twice
    history = run_history.history_of(events)
    assert history.diverged == 0
    after = history.replicas[0].losses
    assert after[: len(losses)] == losses
    assert after[len(losses)][1] < 1.05 * losses[-1][1]  # a new model would have a higher loss
    assert history.replicas[0].last < losses[-1][1]
    assert global_model.read(folder / "checkpoint").round_number == 14


class ExpectingSwarm(ProcessSwarm):
    """Its nodes expect the run's specification."""

    def compute_options(self, name: str) -> Sequence[str]:
        return (*super().compute_options(name), "--expect-spec", self.spec.hash)


def test_a_wrong_spec_is_refused_certificates_are_renewed_and_a_ban_ends_only_the_streams_of_its_peer(
    tmp_path: Path,
) -> None:
    with ExpectingSwarm(spec_of(2, 1, 1, rounds=100_000), tmp_path, MEMBERS) as swarm:
        swarm.start_coordinator("--certificate-life", "10s")
        own = ("--identity", str(tmp_path / "stranger.key"), "--folder", str(tmp_path / "stranger"))
        refused = hetnode("join", swarm.invite(), "--role", "stage", "--expect-spec", "f" * 64, *own)
        assert refused.returncode == ExitCode.REFUSED
        assert all(text in refused.stderr for text in ("spec-mismatch", "f" * 64, swarm.spec.hash))
        for name in MEMBERS:
            swarm.start_node(name)
        swarm.wait_round(1, 120)
        # The links stay open; nodes that train meanwhile would take both cores from other tests.
        swarm.ask("run", "pause", str(swarm.run))
        for name in MEMBERS:
            swarm.wait_log(name, "certificate was renewed", count=2)
        swarm.ask("run", "resume", str(swarm.run))
        swarm.wait_round(swarm.round_number + 2, 120)
        assert all(decision["committed"] for decision in swarm.decisions())
        for log in map(swarm.log, ("a", "b")):  # a link is opened for each plan, and for no certificate
            assert 1 <= log.count("link to position") <= 1 + log.count("replaces plan")

        swarm.ask("peers", "ban", swarm.peer("b"), "--reason", "it is a test", "--folder", str(swarm.run))
        swarm.wait_until(lambda: not swarm.is_running("b"), 30, "the end of b")
        assert swarm.status("b") == ExitCode.REFUSED
        assert "[banned]" in swarm.log("b")
        assert "it is a test" in swarm.log("b")
        swarm.wait_log("a", "following the rounds", 60)  # the retreat of its neighbour
        swarm.wait_round(swarm.round_number + 6, 60)  # the full replica alone
        assert swarm.decisions()[-1]["committed"]
        assert swarm.is_running("a")
        assert swarm.is_running("c")
        back = hetnode("join", swarm.invite(), "--identity", str(tmp_path / "b" / "identity.key"))
        assert back.returncode == ExitCode.REFUSED
        assert "[banned]" in back.stderr
