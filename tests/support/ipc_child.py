"""The child process of test_ipc, as node.ipc.channel.start_child starts it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from node.ipc.channel import Buffer, Reply, serve
from protocol.errors import ErrorCode, HetnodeError

Body = Mapping[str, Any]
Blobs = Sequence[Buffer]

_gate = threading.Event()


def echo(body: Body, blobs: Blobs) -> Reply:
    return Reply(body, blobs)


def refuse(body: Body, _: Blobs) -> Reply:
    raise HetnodeError(ErrorCode.PAYLOAD_CORRUPT, body["cause"], body["remedy"])


def fail(_: Body, __: Blobs) -> Reply:
    raise ZeroDivisionError("a bug")


def wait(_: Body, __: Blobs) -> Reply:
    """Answers when `release` was called, so only with a second thread."""
    _gate.wait()
    return Reply({})


def release(_: Body, __: Blobs) -> Reply:
    _gate.set()
    return Reply({})


def die(_: Body, __: Blobs) -> Reply:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def place(_: Body, __: Blobs) -> Reply:
    return Reply({"session": os.getsid(0)})


def fork(_: Body, __: Blobs) -> Reply:
    """A forked child that lives on until it is killed."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return Reply({"pid": pid})


def _leave_note() -> None:
    note = os.environ.get("IPC_CHILD_NOTE")
    if note:
        Path(note).write_text("closed")


def main() -> None:
    handlers = [echo, refuse, fail, wait, release, die, place, fork]
    serve(
        int(sys.argv[1]),
        {handler.__name__: handler for handler in handlers},
        threads=int(os.environ.get("IPC_CHILD_THREADS", "1")),
        on_close=_leave_note,
    )


if __name__ == "__main__":
    main()
