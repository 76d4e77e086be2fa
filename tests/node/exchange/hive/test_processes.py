"""The processes of a node's hivemind end together and leave no file."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from node.exchange.hive.calls import Exchange, HostStages
from node.exchange.hive.host_process import HostProcess
from node.exchange.hive.transport import start
from node.exchange.transport import Entry
from node.security.identity import open_identity
from protocol.errors import ErrorCode, HetnodeError
from tests.support import commands
from tests.support.hive_nodes import CAPACITY, PATIENT, describe, entry_of, gone, hosted_in, start_node
from tests.support.waiting import is_alive


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files. Its path is short, because a socket's path has at most 104 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def unix_sockets(process: psutil.Process) -> list[Path]:
    """The files of the sockets that a process has bound; abstract sockets have none."""
    found = (connection.laddr for connection in process.net_connections(kind="unix"))
    return [Path(path) for path in found if path.startswith("/")]


@pytest.mark.parametrize("victim", ["host", "p2pd", "averager"])
async def test_the_death_of_one_process_ends_all(tmp_path: Path, sockets: Path, victim: str) -> None:
    commands.template()
    identity = open_identity(tmp_path / "node.key")
    process = await HostProcess.start()
    await process.join(identity, entry_of(identity))
    await process.call(HostStages(hosted_in(tmp_path, {0: CAPACITY, 1: CAPACITY}), deadline=PATIENT))
    host = psutil.Process(process.pid)
    family = [host, *host.children(recursive=True)]
    assert any(sockets.rglob("*"))
    by_name = {
        "host": host,
        "p2pd": next(each for each in family if each.name() == "p2pd"),
        "averager": host.children()[-1],
    }
    exchanges = [
        Exchange(
            stage, b"payload", describe(identity, b"payload", stage, 1), None, 2 - stage, deadline=PATIENT
        )
        for stage in (0, 1)
    ]
    waiting = asyncio.create_task(process.call(exchanges[0]))
    await process.call(exchanges[1])
    by_name[victim].kill()
    with pytest.raises(HetnodeError) as failure:
        await waiting
    assert failure.value.code is ErrorCode.TRANSPORT_DIED
    await gone(family)
    await process.close()
    assert not any(sockets.iterdir())


async def test_a_port_is_given_up_when_the_process_that_listens_there_has_imported_its_modules(
    tmp_path: Path, sockets: Path
) -> None:
    """Else others could take the port meanwhile: without a template that is many seconds."""
    commands.template()
    identity, there = open_identity(tmp_path / "node.key"), []

    async def enter() -> Entry:
        family = psutil.Process().children(recursive=True)
        there.extend(each.name() for each in family if each.name().endswith("hive.host"))
        return entry_of(identity)

    transport = await start(identity, enter)
    await transport.close()
    assert len(there) == 1


async def test_closing_leaves_no_process_and_no_file(tmp_path: Path, sockets: Path) -> None:
    node = await start_node(tmp_path, "node", (0,))
    family = node.processes
    await node.transport.close()
    assert not list(filter(is_alive, family))
    assert not any(sockets.iterdir())


@pytest.mark.parametrize("host_too", [False, True], ids=["main process", "main process and host"])
async def test_sigkill_of_the_parent_leaves_no_process_and_no_file(
    tmp_path: Path, sockets: Path, host_too: bool
) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.hive_parent",
        str(tmp_path),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(sockets)},
    )
    try:
        assert parent.stdout is not None
        assert await parent.stdout.readline() == b"ready\n"
        (template,) = psutil.Process(parent.pid).children()
        (host,) = template.children()
        family = [template, host, *host.children(recursive=True)]
        assert len(family) == 6  # template, host, DHT, p2pd and two averagers
        assert any(sockets.rglob("*.sock"))
        bound = [socket for process in family for socket in unix_sockets(process)]
        assert bound
        assert all(socket.is_relative_to(sockets) for socket in bound)
        if host_too:
            host.suspend()  # so that it cannot clean up before it dies itself
        parent.send_signal(signal.SIGKILL)
        if host_too:
            host.kill()
        await parent.wait()
        await gone(family)
        assert list(sockets.iterdir()) == []
        assert not any(socket.exists() for socket in bound)
    finally:
        if parent.returncode is None:
            parent.kill()


async def test_a_long_folder_for_temporary_files_is_no_obstacle(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = sockets / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    node = await start_node(tmp_path, "node", (0,))
    await node.transport.close()
    assert not any(long.iterdir())
