"""Calls between a parent and a child process, from an event loop and from threads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from node.ipc.channel import Child, Connection, start_child
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.typed_calls import Call
from tests.support.paths import ROOT
from tests.support.waiting import until

REFUSE = Call("refuse", b'{"cause":"Because.","remedy":"Do."}')


async def _start(**environment: str) -> Child:
    return await start_child(
        "tests.support.ipc_child",
        name="test child",
        died=ErrorCode.WORKER_DIED,
        environment={"PYTHONPATH": str(ROOT), **environment},
    )


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    child = await _start()
    yield child
    await child.close(grace=5.0)


async def test_a_reply_holds_what_the_handler_answered(child: Child) -> None:
    blobs = (b"first", bytearray(b""), memoryview(b"third"))
    reply = await child.call(Call("echo", '{"text":"grüße"}'.encode(), blobs))
    assert reply.body == '{"text":"grüße"}'.encode()
    assert [bytes(blob) for blob in reply.blobs] == [b"first", b"", b"third"]


async def test_blobs_far_larger_than_any_buffer_arrive_whole(child: Child) -> None:
    blob = os.urandom(1 << 20) * 24
    reply = await child.call(Call("echo", blobs=(blob, blob[:-1])))
    assert reply.blobs[0] == blob
    assert reply.blobs[1] == blob[:-1]


async def test_calls_are_answered_in_their_order_by_one_thread(child: Child) -> None:
    answered: list[int] = []

    async def call(number: int) -> None:
        await child.call(Call("echo"))
        answered.append(number)

    await asyncio.gather(*(call(number) for number in range(50)))
    assert answered == list(range(50))


async def test_calls_overlap_with_several_threads() -> None:
    child = await _start(IPC_CHILD_THREADS="2")
    waiting = child.call(Call("wait"))
    await child.call(Call("release"))
    await waiting
    await child.close(grace=5.0)


@pytest.mark.parametrize("turns", range(4))
async def test_who_is_cancelled_while_it_closes_a_dead_child_goes_on_no_further(turns: int) -> None:
    """A node, of which all processes die at once, would wait for such a task for ever."""
    child = await _start()
    await child.call(Call("echo"))
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: "-9" in str(child.end), 30, "the report of the death")
    closing = asyncio.create_task(child.close(grace=5.0))
    for _ in range(turns):
        await asyncio.sleep(0)
    was_cancelled = closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled() == was_cancelled
    await child.close(grace=5.0)


async def test_a_refusal_of_the_handler_reaches_the_caller_whole(child: Child) -> None:
    with pytest.raises(HetnodeError) as refusal:
        await child.call(REFUSE)
    error = refusal.value
    assert (error.code, error.cause, error.remedy) == (ErrorCode.PAYLOAD_CORRUPT, "Because.", "Do.")


async def test_a_bug_in_a_handler_fails_that_call_only(child: Child) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        await child.call(Call("fail"))
    assert (await child.call(Call("echo", b"1"))).body == b"1"


async def test_an_unknown_method_fails_that_call_only(child: Child) -> None:
    with pytest.raises(RuntimeError, match="no_such_method"):
        await child.call(Call("no_such_method"))
    await child.call(Call("echo"))


async def test_the_death_of_the_child_fails_open_and_later_calls(child: Child) -> None:
    waiting = child.call(Call("wait"))
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(HetnodeError) as open_call:
        await waiting
    await child.wait_closed()
    with pytest.raises(HetnodeError) as later_call:
        await child.call(Call("echo"))
    assert open_call.value.code is later_call.value.code is ErrorCode.WORKER_DIED


async def test_the_death_of_the_child_is_seen_although_its_own_child_lives(child: Child) -> None:
    grandchild = json.loads((await child.call(Call("fork"))).body)
    try:
        with pytest.raises(HetnodeError):
            await child.call(Call("die"))
    finally:
        os.kill(grandchild, signal.SIGKILL)


async def test_a_cancelled_call_leaves_the_others_alone(child: Child) -> None:
    async def slow() -> None:
        await child.call(Call("echo", blobs=(bytes(1 << 22),)))

    call = asyncio.create_task(slow())
    await asyncio.sleep(0)
    call.cancel()
    assert (await child.call(Call("echo", b"1"))).body == b"1"


async def test_closing_ends_the_child_in_the_middle_of_a_call_and_after_its_last_words(
    tmp_path: Path,
) -> None:
    note = tmp_path / "note"
    child = await _start(IPC_CHILD_NOTE=str(note))
    waiting = child.call(Call("wait"))
    await child.close(grace=5.0)
    with pytest.raises(HetnodeError):
        await waiting
    assert note.read_text() == "closed"


async def test_a_child_that_does_not_end_is_killed() -> None:
    child = await _start()
    await child.call(Call("echo"))
    os.kill(child.pid, signal.SIGSTOP)
    await child.close(grace=0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_the_child_is_out_of_the_reach_of_a_terminal(child: Child) -> None:
    assert json.loads((await child.call(Call("place"))).body) != os.getsid(0)


@pytest.fixture
def connection() -> Iterator[Connection]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.support.ipc_child", str(theirs.fileno())]
    environment = {**os.environ, "IPC_CHILD_THREADS": "2"}
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment)
    theirs.close()
    yield Connection(ours, "test child", ErrorCode.TRANSPORT_DIED)
    process.kill()
    process.wait()
    ours.close()


def test_threads_may_call_at_the_same_time(connection: Connection) -> None:
    def call(number: int) -> tuple[int, bytes]:
        reply = connection.call(Call("echo", b"%d" % number, (bytes([number]) * 300_000,)))
        return int(reply.body), bytes(reply.blobs[0])

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(call, range(40)))
    assert replies == [(number, bytes([number]) * 300_000) for number in range(40)]


def test_threads_get_the_errors_of_their_own_calls(connection: Connection) -> None:
    with pytest.raises(HetnodeError, match="Because"):
        connection.call(REFUSE)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        connection.call(Call("fail"))


def test_the_death_of_the_process_fails_open_and_later_calls_of_threads(connection: Connection) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connection.call, Call("wait"))
        connection.call(Call("echo"))
        with pytest.raises(HetnodeError) as dying_call:
            connection.call(Call("die"))
        with pytest.raises(HetnodeError) as open_call:
            waiting.result()
    with pytest.raises(HetnodeError) as later_call:
        connection.call(Call("echo"))
    codes = {caught.value.code for caught in (dying_call, open_call, later_call)}
    assert codes == {ErrorCode.TRANSPORT_DIED}
