"""Start processes as forks of a template process, which has imported torch and the transport's library once.

To import them costs 2 to 4 CPU seconds. A template process pays this once; each process that it
forks starts within milliseconds and shares the imported pages of memory. The template has no thread, no event
loop, no gRPC channel and no CUDA context, so forking it is safe; a node's main process could not do this
itself. :mod:`node.ipc.template_server` is the template's side. multiprocessing's forkserver is no substitute:
it does not report how a process ended, uses pickle, and does not end its processes with it.

On other systems than Linux a forked process cannot use torch safely: there the template imports nothing, and
each process starts a new interpreter. The interface is the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from node.ipc.modules import CHILD_MODULES
from protocol.server.descriptors import raise_descriptor_limit

REPORT = struct.Struct("<i")  # the template reports two of them: the pid, then the exit status
REQUEST_SIZE = struct.Struct("<I")

DEFAULTS_OF_LIBRARIES = {
    # Threads of torch that wait for each other would keep their cores busy. Where other programs want these,
    # a step then takes up to 50 times as long: a thread waits for one that cannot run.
    "OMP_WAIT_POLICY": "PASSIVE",
    # What Apple's GPUs cannot compute is computed on the CPU, and torch says so once, in place of an error.
    "PYTORCH_ENABLE_MPS_FALLBACK": "1",
}
"""Variables that torch reads when it is imported, unless the user has set them."""
_TEMPLATE_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy would start threads when it is imported
    "GRPC_ENABLE_FORK_SUPPORT": "false",  # no channel exists before the fork
}


class TemplateEnded(Exception):
    """The template process ended before it could fork the process."""


@dataclass(frozen=True)
class ForkRequest:
    """The process to fork, as JSON on its control socket; its descriptors travel with it."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    descriptors: tuple[int, ...]  # their numbers in the new process, in the order in which they are sent
    with_template: bool

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> ForkRequest:
        fields = json.loads(text)
        fields |= {name: tuple(fields[name]) for name in ("arguments", "descriptors")}
        return cls(**fields)


class ForkedProcess:
    """A process that a template has forked, with the interface of subprocess.Popen.

    The process has a session of its own, so signals of a terminal do not reach it. It is killed when its
    template ends; its exit status is -SIGKILL then.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._reports = b""
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Waits until the template has imported its modules. Raises TemplateEnded."""
        while len(self._reports) < REPORT.size:
            if self.returncode is not None:
                raise TemplateEnded("The template process has ended; its last messages are in the log.")
            self._receive(None)
        return int(REPORT.unpack_from(self._reports)[0])

    @property
    def has_begun(self) -> bool:
        """Whether its template has imported its modules and forked this process."""
        return self.poll() is not None or len(self._reports) >= REPORT.size

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs. Does not wait."""
        while self.returncode is None and self._receive(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises subprocess.TimeoutExpired."""
        ends = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if ends is None else ends - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
            self._receive(left)
        assert self.returncode is not None
        return self.returncode

    async def wait_async(self) -> int:
        """As :meth:`wait`, without blocking the event loop. Several tasks may wait at the same time."""
        while self.poll() is None:
            await _readable(self._control)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _receive(self, timeout: float | None) -> bool:
        """Take what the template has reported; False if there was nothing within `timeout` seconds."""
        if not select.select([self._control], [], [], timeout)[0]:
            return False
        try:
            data = self._control.recv(2 * REPORT.size - len(self._reports))
        except ConnectionError:
            data = b""
        self._reports += data
        if not data:
            self.returncode = -signal.SIGKILL
        elif len(self._reports) == 2 * REPORT.size:
            self.returncode = REPORT.unpack_from(self._reports, REPORT.size)[0]
        if self.returncode is not None:
            self._control.close()
        return True


class Template:
    """A template process, seen from the process that asks it for forks. It may be used by several threads.

    The template ends when this process has ended, or has closed it, and all forked processes have ended.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests

    @classmethod
    def start(cls, modules: Sequence[str] = CHILD_MODULES) -> Self:
        """Start a template that imports `modules`. Returns at once; forks wait until the imports are done."""
        raise_descriptor_limit()  # also that of all processes that it forks
        server = f"{__package__}.template_server"  # with -P no folder of the user shadows a library
        ours, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [sys.executable, "-P", "-m", server, str(theirs.fileno()), *modules],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**DEFAULTS_OF_LIBRARIES, **os.environ, **_TEMPLATE_ENVIRONMENT},
                start_new_session=True,  # Ctrl-C is for the main process, which ends the others in order
            )
        return cls(ours)

    def is_alive(self) -> bool:
        """Whether the template process runs."""
        try:
            # The template never writes here, so the only thing to read is the end of the stream.
            return bool(self._requests.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def fork(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        stdout: int = 1,
        stderr: int = 2,
        folder: Path | None = None,
        with_template: bool = False,
    ) -> ForkedProcess:
        """Start a process that calls ``main()`` of `module`. Returns at once.

        Args:
            arguments: ``sys.argv[1:]`` of the new process.
            environment: the whole environment; None takes that of this process. Variables that a library
                reads when it is imported have no effect if the template has imported the library.
            descriptors: open in the new process under the same numbers. It has no others than these and the
                standard ones; its standard input is empty.
            stdout: descriptor of this process that becomes the standard output; `stderr` likewise.
            folder: working folder; None takes that of this process.
            with_template: the new process finds a template of its own in :func:`own_template`. It is forked
                from this one, so it imports nothing, and it is a child of the new process.

        Raises TemplateEnded.
        """
        control, theirs = socket.socketpair()
        with theirs, open(os.devnull, "rb") as empty:
            variables = dict(os.environ if environment is None else environment)
            place, targets = str(folder or Path.cwd()), (0, 1, 2, *descriptors)
            request = ForkRequest(
                module, tuple(arguments), variables, place, targets, with_template
            ).to_json()
            try:
                socket.send_fds(self._requests, [b"f"], [theirs.fileno()])
            except OSError:
                control.close()
                raise TemplateEnded("The template process has ended.") from None
            sources = [empty.fileno(), stdout, stderr, *descriptors]
            socket.send_fds(control, [REQUEST_SIZE.pack(len(request))], sources)
        control.sendall(request)
        return ForkedProcess(control)

    def close(self) -> None:
        """Ask for no more forks. The template ends as soon as the processes that it forked have ended."""
        self._requests.close()


_own: Template | None = None
_own_lock = threading.Lock()


def own_template(modules: Sequence[str] = CHILD_MODULES) -> Template:
    """The template of this process. The first call starts it with `modules`, unless it was inherited.

    A template that was killed is started again.
    """
    global _own  # noqa: PLW0603  # one for each process, as its imports shall be paid once
    with _own_lock:
        if _own is None or not _own.is_alive():
            _own = Template.start(modules)
        return _own


def close_own_template() -> None:
    """End the template of this process, if it has one: it holds the memory of what it has imported.

    Processes that it has forked stay, and it stays with them. The next :func:`own_template` starts another.
    """
    global _own  # noqa: PLW0603
    with _own_lock:
        if _own is not None:
            _own.close()
            _own = None


def adopt_template(requests: socket.socket) -> None:
    """Have :func:`own_template` return the template behind `requests`."""
    global _own  # noqa: PLW0603
    _own = Template(requests)


async def _readable(connection: socket.socket) -> None:
    """Return when there is something to read."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    # An event loop knows one reader for each descriptor; with a duplicate, several tasks can wait.
    with connection.dup() as own:
        loop.add_reader(own, _resolve, readable)
        try:
            await readable
        finally:
            loop.remove_reader(own)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
