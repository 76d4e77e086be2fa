"""The template process: imports modules once, and forks processes that use them (:mod:`node.ipc.template`).

``python -m node.ipc.template_server FD MODULE...``. FD is a Unix socket. Each request on it is one byte with
one descriptor, a control socket: the new process reads its ForkRequest from it, the template reports on it
the pid and later the exit status. The template itself reads no request, so a slow requester delays no other.

How processes end: the template ends when its requester has closed FD and all forked processes have ended; at
once, where the requester closes FD before the modules are imported. A forked process is killed when the
template ends (Linux). A process that serves calls (node.ipc.channel) also ends with the process that calls
it, because no other process holds that end of its socket.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from node.ipc.template import DEFAULTS_OF_LIBRARIES, REPORT, REQUEST_SIZE, ForkRequest, adopt_template

_IS_LINUX = sys.platform == "linux"
_SET_DEATH_SIGNAL, _SET_NAME = 1, 15  # of prctl


def import_modules(modules: Sequence[str]) -> None:
    """Import `modules`. RuntimeError if this process cannot be forked safely afterwards."""
    for module in modules:
        importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("An imported module has started a thread, which a fork would lose.")
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise RuntimeError("An imported module has initialised CUDA, which cannot be used after a fork.")
    # Collections in a forked process would write to every page that holds an object, and so copy it.
    gc.collect()
    gc.freeze()


def _import_while_wanted(modules: Sequence[str], requests: socket.socket) -> None:
    """:func:`import_modules`, which takes many seconds; ends this process if the requester ends meanwhile."""
    place = select.poll()
    place.register(requests, 0)

    def look(*_: object) -> None:
        if any(event & select.POLLHUP for _, event in place.poll(0)):
            os._exit(0)

    flags = fcntl.fcntl(requests, fcntl.F_GETFL)
    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(requests, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(requests, fcntl.F_SETFL, flags | os.O_ASYNC)
    look()
    import_modules(modules)
    fcntl.fcntl(requests, fcntl.F_SETFL, flags)
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def serve_forks(requests: socket.socket) -> ForkRequest:
    """Fork a process for each request. Returns in the forked processes only; the template exits here."""
    # A supervisor may signal all processes of a service: only the main process decides when they end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, for the wake-up below
    ended, wake = socket.socketpair()
    ended.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    controls: dict[int, socket.socket] = {}
    has_requester = True
    while has_requester or controls:
        ready, _, _ = select.select([ended, requests] if has_requester else [ended], [], [])
        if ended in ready:
            ended.recv(4096)
            _report_ended(controls)
        if requests not in ready:
            continue
        _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if not descriptors:
            has_requester = False
            continue
        control = socket.socket(fileno=descriptors[0])
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for inherited in (requests, ended, wake, *controls.values()):
                inherited.close()
            return _become(control, template)
        _report(control, pid)
        controls[pid] = control
    os._exit(0)


def _report(control: socket.socket, value: int) -> None:
    with suppress(OSError):  # the requester may have ended
        control.sendall(REPORT.pack(value))


def _report_ended(controls: dict[int, socket.socket]) -> None:
    """Reap every process that has ended, and report how."""
    while controls:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with controls.pop(pid) as control:
            _report(control, os.waitstatus_to_exitcode(status))


def _become(control: socket.socket, template: int) -> ForkRequest:
    """Set up this forked process as the request on `control` says, and return the request."""
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    request = _read_request(control)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    tempfile.tempdir = None  # it was computed from the template's environment
    sys.argv = [request.module, *request.arguments]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty())  # type: ignore[union-attr]
    if _IS_LINUX:
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_NAME, request.module.encode()[-15:])
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != template:  # it ended before it could send the signal
            os._exit(1)
    return request


def _read_request(control: socket.socket) -> ForkRequest:
    """The request; its descriptors are open under their numbers afterwards, and `control` is closed."""
    with control:
        size, received, _, _ = socket.recv_fds(control, REQUEST_SIZE.size, 250)
        text = b""
        while size and len(text) < REQUEST_SIZE.unpack(size)[0]:
            text += (data := control.recv(1 << 16))
            if not data:
                size = b""
        if not size:
            os._exit(1)  # the requester has ended
    request = ForkRequest.from_json(text)
    # Move all of them first: a received descriptor may have the number that another one must get.
    free = max(request.descriptors) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, free) for each in received]
    for each in received:
        os.close(each)
    for each, number in zip(moved, request.descriptors, strict=True):
        os.dup2(each, number)
        os.close(each)
    return request


def run(request: ForkRequest) -> None:
    """Call the module, in this process; with a template of its own if the request says so."""
    if not _IS_LINUX:
        # No modules are imported here: a new interpreter imports them.
        call = f"import {request.module} as module; module.main()"
        command = [sys.executable, "-P", "-c", call, *request.arguments]
        os.execve(sys.executable, command, {**DEFAULTS_OF_LIBRARIES, **os.environ})
    if request.with_template:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            for number in request.descriptors:
                if number > 2:
                    os.close(number)
            os.setsid()
            ctypes.CDLL(None).prctl(_SET_NAME, b"template")
            run(serve_forks(theirs))
            return
        theirs.close()
        adopt_template(ours)
    _call(request.module)


_exit_status = 1  # until the module is called


def _call(module: str) -> None:
    """Call ``main()`` of `module`, and note the status with which this process ends."""
    global _exit_status  # noqa: PLW0603  # the handler that needs it has no argument
    try:
        importlib.import_module(module).main()
        _exit_status = 0
    except SystemExit as error:
        _exit_status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except KeyboardInterrupt:
        atexit.unregister(_end_at_once)  # Python then ends this process by SIGINT
        raise
    except Exception:
        _exit_status = 1
        raise


def _end_at_once() -> None:
    """End this process without freeing its modules one by one: after torch that takes 0.3 CPU seconds."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its terminal is closed, or its disk full
            stream.flush()
    os._exit(_exit_status & 0xFF)


def main() -> None:
    # The handler that is registered first runs last.
    atexit.register(_end_at_once)
    requests = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(requests.fileno(), False)
    if _IS_LINUX:
        _import_while_wanted(sys.argv[2:], requests)
    run(serve_forks(requests))


if __name__ == "__main__":
    main()
