"""The whole system with real processes, sockets and signals. One test starts it exactly as a user does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.checkpoint import global_model
from node.views import run_history
from protocol.spec.resolve import resolve
from tests.support.commands import hetnode, start

pytestmark = pytest.mark.swarm


def start_as_user(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a command as a user does, in a new interpreter."""
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, "-m", "node", *arguments], stdout=output, stderr=output)


def succeed(*arguments: str) -> str:
    """What a command that must succeed prints."""
    return hetnode(*arguments, check=True).stdout


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until `condition`; a deadline, not a delay: fails with what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def mentioning(folder: Path) -> list[psutil.Process]:
    """Processes that belong to a run: those whose command line or open files name its folder."""
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
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def spec_name(run: Path) -> str:
    return resolve(file=run / "run.toml").run_id


def events_of(folder: Path) -> list[dict[str, Any]]:
    return run_history.read_events(folder / "metrics.jsonl")


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the processes of a test keep their sockets while they live, and nobody else does.

    Its path is short, because that of a socket must be.
    """
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


UP = ("swarm", "up", "--preset", "nano", "--folder")


def test_a_swarm_trains_commits_every_round_and_leaves_a_complete_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start_as_user(*UP, str(folder), log=tmp_path / "log")
    assert process.wait(200) == 0, end_of(tmp_path / "log")
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
    generated = subprocess.run(
        [sys.executable, "-m", "node", "generate", str(folder), "--prompt", "def ", "--tokens", "5"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert generated.stdout.startswith(b"def ")


@pytest.mark.parametrize("moment", ["at the start", "while training"])
def test_ctrl_c_ends_every_process_and_leaves_none_behind(sockets: Path, tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "run"
    process = start(*UP, str(folder), "--rounds", "1000", log=tmp_path / "log")
    if moment == "at the start":
        wait_until(lambda: len(mentioning(folder)) > 3, 60, "processes to have started")
    else:
        wait_until(
            lambda: any(event["event"] == "decision" for event in events_of(folder)),
            120,
            "a decision",
        )
    everybody = mentioning(folder)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, end_of(tmp_path / "log")
    wait_until(lambda: gone(everybody), 30, "every process to be gone")
    assert not list(sockets.glob("hetnode-*"))


def test_a_killed_swarm_leaves_no_process_behind_resumes_where_it_was_and_its_loss_goes_on_falling(
    sockets: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def rounds() -> list[int]:
        return [event["round"] for event in events_of(folder) if event["event"] == "decision"]

    process = start(*UP, str(folder), "--rounds", "14", log=tmp_path / "log")
    wait_until(lambda: max(rounds(), default=0) >= 4, 120, "4 rounds")
    everybody = mentioning(folder)
    assert len(everybody) > 10
    process.kill()
    process.wait()
    wait_until(lambda: gone(everybody), 30, "every process to be gone")
    wait_until(lambda: not list(sockets.glob("hetnode-*")), 30, "their sockets to be gone")
    before = max(rounds())
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
    assert after[len(losses)][1] < 1.05 * losses[-1][1]  # not that of a model that starts anew
    assert history.replicas[0].last < losses[-1][1]
    assert global_model.read(folder / "checkpoint").round_number == 14
    assert before < 14


def test_nodes_started_by_hand_train_and_a_wrong_spec_is_refused_with_both_hashes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    processes = [
        start(
            *("coordinator", "--preset", "nano", "--rounds", "2", "--listen", "127.0.0.1:0"),
            *("--folder", str(run)),
            log=tmp_path / "coordinator.log",
        )
    ]
    try:
        wait_until((run / "address").exists, 60, end_of(tmp_path / "coordinator.log"))
        invite = succeed("invite", "create", "--uses", "4", "--expires", "15m", "--folder", str(run)).strip()
        stranger = start(
            *("join", invite, "--role", "stage", "--expect-spec", "f" * 64),
            *("--identity", str(tmp_path / "stranger.key"), "--folder", str(tmp_path / "stranger")),
            log=tmp_path / "stranger.log",
        )
        assert stranger.wait(60) == 5
        refusal = end_of(tmp_path / "stranger.log")
        spec_hash = resolve(file=run / "run.toml").hash
        assert "spec-mismatch" in refusal
        assert "f" * 64 in refusal
        assert spec_hash in refusal
        for name, role in (("a", "stage"), ("b", "stage"), ("c", "replica")):
            processes.append(
                start(
                    *("join", invite, "--role", role, "--identity", str(tmp_path / f"{name}.key")),
                    *("--folder", str(tmp_path / name), "--threads", "1", "--expect-spec", spec_hash),
                    log=tmp_path / f"{name}.log",
                )
            )
        for process, name in zip(processes, ("coordinator", "a", "b", "c"), strict=True):
            assert process.wait(150) == 0, end_of(tmp_path / f"{name}.log")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    again = start(
        *("join", spec_name(run), "--identity", str(tmp_path / "a.key"), "--join-seconds", "3"),
        log=tmp_path / "again.log",
    )
    assert again.wait(60) == 4  # it has credentials of its own now; only the coordinator is gone
    assert "coordinator-unreachable" in end_of(tmp_path / "again.log")
    parts = [global_model.latest(tmp_path / name / "checkpoint") for name in ("a", "b")]
    global_model.assemble([part for part in parts if part], tmp_path / "assembled")
    full = global_model.read(global_model.latest(tmp_path / "c" / "checkpoint") or tmp_path)
    pipeline = global_model.read(tmp_path / "assembled")
    for stage, tensors in full.stages.items():
        for name, tensor in tensors.items():
            assert tensor.equal(pipeline.stages[stage][name]), f"{name} differs between the replicas"


def test_certificates_are_renewed_on_the_way_and_a_ban_ends_streams_but_not_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = tmp_path / "coordinator.log"
    processes = {
        "coordinator": start(
            *("coordinator", "--preset", "nano", "--rounds", "100000", "--listen", "127.0.0.1:0"),
            *("--enrolment-port", "0", "--certificate-life", "10s", "--folder", str(run)),
            log=log,
        )
    }
    roles = {"a": "stage", "b": "stage", "c": "replica"}
    try:
        wait_until((run / "address").exists, 60, end_of(log))
        for name, role in roles.items():
            invite = tmp_path / f"{name}.invite"
            succeed("invite", "create", "--role", role, "--folder", str(run), "--out", str(invite))
            processes[name] = start(
                *("join", "--invite-file", str(invite), "--identity", str(tmp_path / f"{name}.key")),
                *("--folder", str(tmp_path / name), "--threads", "1"),
                log=tmp_path / f"{name}.log",
            )

        def renewals(name: str) -> int:
            return (tmp_path / f"{name}.log").read_text().count("certificate was renewed")

        def decisions() -> list[dict[str, Any]]:
            return [event for event in events_of(run) if event["event"] == "decision"]

        wait_until(lambda: all(renewals(name) >= 2 for name in roles) and decisions() != [], 120, "renewals")
        assert all(decision["committed"] for decision in decisions())
        assert all((tmp_path / f"{name}.log").read_text().count(" is open") == 1 for name in ("a", "b"))

        succeed("peers", "ban", peer_in(tmp_path / "b.log"), "--reason", "it is a test", "--folder", str(run))
        assert processes["b"].wait(30) == 5, end_of(tmp_path / "b.log")
        assert "[banned]" in end_of(tmp_path / "b.log")
        assert "it is a test" in end_of(tmp_path / "b.log")
        wait_until(
            lambda: "following the rounds" in (tmp_path / "a.log").read_text(), 60, "its neighbour to follow"
        )
        last = decisions()[-1]["round"]
        wait_until(lambda: decisions()[-1]["round"] > last + 5, 60, "rounds of the full replica alone")
        assert decisions()[-1]["committed"]
        assert processes["c"].poll() is None
        assert processes["a"].poll() is None
        invite = succeed("invite", "create", "--folder", str(run)).strip()
        back = start("join", invite, "--identity", str(tmp_path / "b.key"), log=tmp_path / "back.log")
        assert back.wait(60) == 5
        assert "[banned]" in end_of(tmp_path / "back.log")
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def peer_in(log: Path) -> str:
    """The peer id that a node says it has."""
    return log.read_text().partition(", peer ")[2].partition(",")[0]
