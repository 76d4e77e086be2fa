"""'hetnode leave': which node it means, and that it signals no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node.cli.own_node import ask_to_leave
from node.command_runner import LEAVE, LEAVE_AT_ONCE
from node.folder import keep_only_run, lock_folder, node_folder_of, remember_node_folder, running_process
from node.here.nodes import Node, chosen, meant
from node.security import credentials
from node.security.identity import open_identity
from protocol.errors import ErrorCode, HetnodeError
from tests.support.certificates import enrolled


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@contextmanager
def node_in(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that keeps `folder` as a node does, and ends well when it is asked to leave."""
    program = """
        import signal, sys
        from pathlib import Path
        from node.folder import lock_folder

        with lock_folder(Path(sys.argv[1])):
            asked = {signal.SIGUSR1, signal.SIGUSR2}
            signal.pthread_sigmask(signal.SIG_BLOCK, asked)
            print("ready", flush=True)
            print(signal.sigwait(asked), flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert said(child) == "ready"
            yield child
        finally:
            child.kill()


@pytest.fixture
def two_runs(tmp_path: Path) -> Iterator[list[Node]]:
    """Nodes of two runs, of which the first one's is running."""
    nodes = []
    for name in ("first", "second"):
        folder, own = tmp_path / name, tmp_path / "peer-0.runs" / name
        folder.mkdir()
        own.mkdir(parents=True)
        keep_only_run(folder, name, "coordinator")
        remember_node_folder(own, folder)
        nodes.append(Node(name, own, node_folder_of(own)))
    with node_in(tmp_path / "first"):
        yield nodes


def test_the_status_without_a_name_is_that_of_the_nodes_that_run(
    two_runs: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that of a finished run whose coordinator has its folder here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("node.here.nodes.user_config_path", lambda _: tmp_path)
    monkeypatch.setattr("node.here.known_runs.user_data_path", lambda _: tmp_path)
    over = tmp_path / "runs" / "over" / "coordinator"
    over.mkdir(parents=True)
    (over / "operator.pem").touch()
    assert meant(None) is None
    (tmp_path / "peer-0.key").touch()
    for node in two_runs:
        assert node.credentials is not None
        (node.credentials / "certificate.pem").touch()
    assert meant(None) == "first"
    assert meant("second") == "second"
    coordinator = open_identity(over / "identity.key")
    assert meant(None) is None
    os.close(coordinator.lock)
    with (
        node_in(tmp_path / "second"),
        pytest.raises(HetnodeError, match="runs are here: first, second"),
    ):
        meant(None)


def test_the_status_without_a_name_is_that_of_the_only_run_where_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("nodes", "known_runs"):
        monkeypatch.setattr(f"node.here.{module}.user_config_path", lambda _: tmp_path)
    monkeypatch.setattr("node.here.known_runs.user_data_path", lambda _: tmp_path / "data")
    assert meant(None) is None
    enrolled(open_identity(tmp_path / "peer-0.key"), "first")
    assert meant(None) == "first"
    enrolled(open_identity(tmp_path / "peer-1.key"), "second")
    with pytest.raises(HetnodeError, match="runs were here: first, second"):
        meant(None)
    operator = tmp_path / "runs" / "over" / "operator.pem"
    operator.parent.mkdir(parents=True)
    operator.touch()
    assert meant(None) is None


def test_a_node_is_called_as_others_see_it_and_former_runs_of_its_folder_do_not_count(tmp_path: Path) -> None:
    folder, key = tmp_path / "node", open_identity(tmp_path / "peer-0.key")
    folder.mkdir()
    for run in ("former", "now"):
        enrolled(key, run).remember(None, "Ada")
        keep_only_run(folder, run, "coordinator")
    known = [Node(run, tmp_path / "peer-0.runs" / run, folder) for run in ("former", "now")]
    with node_in(folder):
        for name in (None, "peer-0", "Ada", key.peer, key.peer[-8:], "now"):
            assert chosen(name, known) == known[1], name
        assert known[1].described == f"peer-0 (..{key.peer[-8:]}, Ada, auto, of now)"
        with pytest.raises(HetnodeError, match="called 'Bob'") as refused:
            chosen("Bob", known)
        assert "Ada" in refused.value.remedy


def test_the_folder_of_a_node_names_its_process_while_it_runs(tmp_path: Path) -> None:
    assert running_process(tmp_path) is None
    (tmp_path / "lock").write_text("1")  # left by a node that has ended
    assert running_process(tmp_path) is None
    with node_in(tmp_path) as child:
        assert running_process(tmp_path) == child.pid
        with pytest.raises(HetnodeError) as refused:
            lock_folder(tmp_path)
        assert refused.value.code is ErrorCode.RUN_FOLDER_IN_USE
    assert running_process(tmp_path) is None


def test_looking_for_the_process_of_a_node_takes_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks: list[object] = []
    monkeypatch.setattr("node.folder.fcntl.lockf", lambda *arguments: locks.append(arguments))
    monkeypatch.setattr("node.folder.fcntl.flock", lambda *arguments: locks.append(arguments), raising=False)
    (tmp_path / "lock").touch()
    assert running_process(tmp_path) is None
    assert not locks


@pytest.mark.parametrize(("arguments", "sent"), [([], LEAVE), (["--now"], LEAVE_AT_ONCE)])
def test_a_node_of_this_machine_is_asked_to_leave(tmp_path: Path, arguments: list[str], sent: int) -> None:
    keep_only_run(tmp_path, "first", "coordinator")
    with node_in(tmp_path) as child:
        command = [sys.executable, "-m", "node", "leave", str(tmp_path), *arguments]
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert said(child) == f"{int(sent)}"
        child.wait(30)
        assert "the node has left first" in asking.communicate(timeout=30)[0]
    assert asking.returncode == 0


def test_only_the_process_of_the_node_is_signalled(tmp_path: Path) -> None:
    """The process of the node may have ended, and its id may now be that of another process."""
    keep_only_run(tmp_path, "first", "coordinator")
    with pytest.raises(HetnodeError) as refused:
        ask_to_leave(Node("first", None, tmp_path), 0, LEAVE)
    assert "container" in refused.value.cause
    received: list[int] = []
    former = signal.signal(LEAVE, lambda number, _: received.append(number))
    try:
        ask_to_leave(Node("first", None, tmp_path), os.getpid(), LEAVE)
    finally:
        signal.signal(LEAVE, former)
    assert not received


def test_without_a_name_the_only_running_node_is_chosen(two_runs: list[Node]) -> None:
    first, second = two_runs
    assert chosen(None, two_runs) == chosen("first", two_runs) == first
    assert chosen("second", two_runs) == second
    assert first.pid
    assert second.pid is None
    assert second.identity == second.credentials.parent.with_suffix(".key")  # type: ignore[union-attr]
    assert chosen(str(second.folder), two_runs) == second
    assert chosen(str(first.folder), []) == Node("first", None, first.folder)


def test_an_ambiguous_or_unknown_node_is_refused(two_runs: list[Node], tmp_path: Path) -> None:
    again = Node("first", tmp_path / "peer-1.runs" / "first", two_runs[0].folder)
    for known, wanted, code in (
        ([*two_runs, again], "first", ErrorCode.BAD_OPTION),
        ([*two_runs, again], None, ErrorCode.BAD_OPTION),
        (two_runs, "third", ErrorCode.NO_CREDENTIALS),
        (two_runs[1:], None, ErrorCode.NO_CREDENTIALS),
        ([], None, ErrorCode.NO_CREDENTIALS),
    ):
        with pytest.raises(HetnodeError) as refused:
            chosen(wanted, known)
        assert refused.value.code is code
        assert code is ErrorCode.NO_CREDENTIALS or "peer-1" in refused.value.cause


def test_a_node_is_chosen_by_its_folder_of_credentials(
    two_runs: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = two_runs[1].credentials
    assert folder is not None

    class Loaded:
        run = "second"

    monkeypatch.setattr(credentials, "exist", lambda path: path == folder)
    monkeypatch.setattr(credentials, "load", lambda path: Loaded)
    assert chosen(str(folder), []) == two_runs[1]
