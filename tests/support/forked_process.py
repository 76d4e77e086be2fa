"""A process that a template forks in tests: ``fork("tests.support.forked_process", [WHAT, ...])``."""

from __future__ import annotations

import atexit
import builtins
import json
import os
import signal
import sys
import tempfile
import threading
import time

from node.ipc.template import own_template


def report(*numbers: str) -> None:
    """Print what this process is, and read each of the descriptors."""
    torch = sys.modules.get("torch")
    said = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "session": os.getsid(0),
        "parent": os.getppid(),
        "pid": os.getpid(),
        "environment": dict(os.environ),
        "temporary": tempfile.gettempdir(),
        "has_torch": torch is not None,
        "is_cuda_initialized": torch is not None and torch.cuda.is_initialized(),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        "read": [os.read(int(number), 100).decode() for number in numbers],
        "threads": threading.active_count(),
        "terminates": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    }
    print(json.dumps(said), flush=True)


def compute() -> None:
    """Compute with several threads, as the worker does."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(2)
    print(float(torch.ones(512, 512).matmul(torch.ones(512, 512)).sum()), torch.get_num_threads(), flush=True)


def end_with(status: str) -> None:
    sys.exit(int(status))


def fail(error: str) -> None:
    """Raise an error, and print at the end without flushing."""
    atexit.register(print, "handlers at exit have run")
    raise getattr(builtins, error)


def sleep() -> None:
    print("sleeping", flush=True)
    time.sleep(600)


def nest() -> None:
    """Fork the report from a template of its own."""
    print(os.getpid(), flush=True)
    process = own_template().fork("tests.support.forked_process", ["report"])
    sys.exit(process.wait())


def nest_sleep() -> None:
    """Fork a sleeper from a template of its own, and print when that is known here."""
    process = own_template().fork("tests.support.forked_process", ["sleep"], stdout=2)
    print(process.pid, flush=True)
    time.sleep(600)


def main() -> None:
    what, *arguments = sys.argv[1:]
    {each.__name__: each for each in (report, compute, end_with, fail, sleep, nest, nest_sleep)}[what](
        *arguments
    )
