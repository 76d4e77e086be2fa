"""'hetnode watch' without a terminal, and what it finds on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from node.cli import watch
from node.here import known_runs
from node.here.nodes import Node
from protocol.errors import ErrorCode, HetnodeError
from tests.support.commands import hetnode


def test_without_a_terminal_it_names_the_command_that_prints() -> None:
    result = hetnode("watch")
    assert result.returncode == 2
    assert "needs a terminal" in result.stderr
    assert "hetnode status" in result.stderr


def test_the_list_of_commands_waits_for_no_view() -> None:
    script = (
        "import sys; from node.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('textual', 'grpc', 'rich.live') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert "watch" in found.stdout
    assert "textual" not in found.stdout.splitlines()[-1]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """The nodes of this machine."""
    found: list[Node] = []
    monkeypatch.setattr(watch, "nodes_here", lambda: iter(found))
    monkeypatch.setattr(known_runs, "operator_or_member", lambda run: (f"address of {run}", None))
    monkeypatch.setattr(known_runs, "coordinator_folders", lambda run: iter(()))
    monkeypatch.setattr(Node, "pid", property(lambda node: 7 if node.folder else None))
    return found


def test_the_only_node_here_and_its_run_are_watched(nodes: list[Node], tmp_path: Path) -> None:
    kept, other = tmp_path / "peer-0.runs" / "run", tmp_path / "peer-1.runs" / "third"
    nodes += [Node("other", kept, None), Node("run", kept, tmp_path)]
    node, find, folder = watch.watched(None)
    assert node == (nodes[1], tmp_path)
    assert find is not None
    assert find()[0] == f"address of {kept}"
    assert folder is None
    nodes.append(Node("third", other, tmp_path / "third"))
    with pytest.raises(HetnodeError, match="peer-0, peer-1") as caught:
        watch.watched(None)
    assert caught.value.code is ErrorCode.BAD_OPTION
    assert watch.watched("peer-1")[0] == (nodes[2], tmp_path / "third")
    assert watch.watched("third")[0] == (nodes[2], tmp_path / "third")


def test_a_node_is_watched_by_its_folder(nodes: list[Node], tmp_path: Path) -> None:
    (tmp_path / "run").write_text("tiny-1 P")
    node, find, _ = watch.watched(str(tmp_path))
    assert node is not None
    assert (node[0].run, node[1]) == ("tiny-1", tmp_path)
    assert find is None  # its credentials are not known here


def test_without_anything_the_message_is_that_of_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "nodes_here", lambda: iter(()))
    for usual in ("user_data_path", "user_config_path"):
        monkeypatch.setattr(known_runs, usual, lambda _: tmp_path)
    monkeypatch.setattr("node.here.nodes.user_config_path", lambda _: tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HetnodeError) as error:
        watch.watched(None)
    assert "No coordinator has its folder" in error.value.cause
    assert "hetnode coordinator" in error.value.remedy
