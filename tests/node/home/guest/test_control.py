"""The socket by which a command reaches a node: for its owner, in any folder, and after a crash."""

from __future__ import annotations

import asyncio
import socket
import stat
from contextlib import chdir
from pathlib import Path

import pytest

from node.home.guest.control import Ask, Contact, GuestState, answer_commands, ask, ask_for
from node.home.guest.guest import BY_HAND, Guest
from protocol.errors import ErrorCode, ExitCode, HetnodeError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its path is longer than that of a socket can be."""
    found = tmp_path / ("long " * 30)
    found.mkdir()
    return found


async def test_a_command_pauses_and_resumes_a_node(folder: Path) -> None:
    guest = Guest(folder)
    async with answer_commands(folder, guest):
        assert await asyncio.to_thread(ask, folder, Ask.STATE) == GuestState(is_here=False, reason="")
        assert await asyncio.to_thread(ask, folder, Ask.PAUSE) == GuestState(is_here=False, reason=BY_HAND)
        assert guest.rest is not None
        assert guest.rest.patience > 1
        await asyncio.to_thread(ask, folder, Ask.PAUSE_AT_ONCE)
        assert guest.rest is not None
        assert guest.rest.patience <= 1
        assert Guest(folder).rest is not None  # a restart of the node does not end the pause
        assert await asyncio.to_thread(ask, folder, Ask.RESUME) == GuestState(is_here=False, reason="")
        assert Guest(folder).rest is None
    assert not (folder / "control").exists()


async def test_only_the_owner_may_connect(folder: Path) -> None:
    async with answer_commands(folder, Guest(folder)):
        mode = (folder / "control").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600


async def test_the_socket_of_a_killed_node_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("control")
    with pytest.raises(HetnodeError) as refused:
        ask(folder, Ask.STATE)
    assert refused.value.code is ErrorCode.NODE_NOT_RUNNING
    async with answer_commands(folder, Guest(folder)):
        await asyncio.to_thread(ask, folder, Ask.STATE)
    with pytest.raises(HetnodeError) as refused:
        ask(folder, Ask.STATE)
    assert refused.value.code.exit_code is ExitCode.STATE


async def test_what_no_command_says_is_ignored(folder: Path) -> None:
    guest = Guest(folder)
    async with answer_commands(folder, guest):
        for said in (b"pause\n", b'"explode"\n', b"[" * 10_000, b"\xff\n", b""):
            answered = await asyncio.to_thread(_say, folder, said)
            assert answered == b""
        assert guest.rest is None
        await asyncio.to_thread(ask, folder, Ask.STATE)


def _say(folder: Path, said: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        with chdir(folder):
            connection.connect("control")
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        try:
            return connection.recv(100)
        except ConnectionError:
            return b""


async def test_a_pause_that_cannot_be_noted_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    guest = Guest(folder)
    async with answer_commands(folder, guest):
        monkeypatch.setattr(Path, "touch", full)
        with pytest.raises(HetnodeError) as refused:
            await asyncio.to_thread(ask, folder, Ask.PAUSE)
    assert refused.value.code is ErrorCode.DISK_FULL
    assert guest.rest is None


async def test_a_command_learns_how_the_node_stands_with_its_coordinator(folder: Path) -> None:
    async with answer_commands(folder, Guest(folder), lambda: Contact(True, 4.5, 7)):
        state = await asyncio.to_thread(ask, folder, Ask.STATE)
    assert state == GuestState(False, "", has_joined=True, silent_seconds=4.5, round_number=7)


async def test_a_node_tells_more_where_it_is_asked(folder: Path) -> None:
    lines = [f"line {i} " + "x" * 500 for i in range(300)]  # longer than a request may be
    async with answer_commands(folder, Guest(folder), answers={Ask.LOG: lambda: lines}):
        assert await asyncio.to_thread(ask_for, folder, Ask.LOG) == lines
        # What this node does not know is no error of it: it tells its state, as before.
        assert "is_here" in await asyncio.to_thread(ask_for, folder, Ask.REPORT)
