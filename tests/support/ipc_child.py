"""The child process of test_ipc, as node.ipc.channel.start_child starts it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from node.ipc.channel import serve
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.typed_calls import Call, Reply

_gate = threading.Event()


def echo(call: Call) -> Reply:
    return Reply(call.body, call.blobs)


def refuse(call: Call) -> Reply:
    raise HetnodeError(ErrorCode.PAYLOAD_CORRUPT, **json.loads(call.body))


def fail(_: Call) -> Reply:
    raise ZeroDivisionError("a bug")


def wait(_: Call) -> Reply:
    """Answers when `release` was called, so only with a second thread."""
    _gate.wait()
    return Reply()


def release(_: Call) -> Reply:
    _gate.set()
    return Reply()


def die(_: Call) -> Reply:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def place(_: Call) -> Reply:
    return Reply(json.dumps(os.getsid(0)).encode())


def fork(_: Call) -> Reply:
    """A forked child that lives on until it is killed."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return Reply(json.dumps(pid).encode())


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
