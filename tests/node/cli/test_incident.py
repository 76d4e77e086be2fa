"""``hetnode incident``: what a person at a terminal sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.store.event_codec import decode
from coordinator.store.log_copy import LOG_FILE
from coordinator.store.store import SqliteStore
from node.cli.incident import incident_app
from node.security.identity import open_identity, peer_in
from protocol.errors import ErrorCode, HetnodeError
from tests.builders import former_log, spec_of
from tests.support.incident_file import from_bytes
from tests.support.paths import ROOT


def run(*arguments: str) -> str:
    """What the command prints. Raises its error."""
    result = CliRunner().invoke(incident_app, arguments, env={"COLUMNS": "200"})
    if isinstance(result.exception, HetnodeError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@contextmanager
def coordinator(folder: Path) -> Iterator[None]:
    """A folder whose coordinator is running: it holds its identity and its log."""
    identity = open_identity(folder / "identity.key")
    store = SqliteStore(folder / LOG_FILE, identity.peer, identity.sign)
    store.begin(spec_of(2, 2, 1, 4).canonical_json)
    store.append([decode(*row) for row in former_log()])
    yield
    store.close()


def test_the_log_of_a_running_coordinator_is_exported(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.xz"
    with coordinator(tmp_path):
        said = run("export", str(tmp_path), "--out", str(out))
        assert f"{len(former_log())} events" in said
        found = from_bytes(out.read_bytes())
        assert len(found.events) == len(former_log())


def test_a_file_that_cannot_be_written_and_a_run_that_is_not_here_are_one_message(tmp_path: Path) -> None:
    with coordinator(tmp_path), pytest.raises(HetnodeError, match="cannot be written") as error:
        run("export", str(tmp_path), "--out", str(tmp_path / "none" / "file"))
    assert error.value.code is ErrorCode.BAD_OPTION
    with pytest.raises(HetnodeError, match="No coordinator of"):
        run("export", "nano-0123")


def test_the_peer_id_of_an_identity_is_read_while_a_process_holds_it(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "identity.key")
    assert peer_in(tmp_path / "identity.key") == identity.peer
    for path in (tmp_path / "none", ROOT / "pyproject.toml"):
        with pytest.raises(HetnodeError):
            peer_in(path)
