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


def first_step() -> None:
    """Train the first inner step of a pipeline of two members, as workers do; print what that imported."""
    from node.core.worker.compute import Compute  # noqa: PLC0415
    from node.core.worker.trainer import Trainer  # noqa: PLC0415
    from node.data.stream import open_stream  # noqa: PLC0415
    from node.machine.speed import layer_speed  # noqa: PLC0415
    from protocol.run_files.resolve import resolve  # noqa: PLC0415
    from protocol.types import StageRange  # noqa: PLC0415

    spec = resolve(preset="nano")
    imported = set(sys.modules)
    layer_speed(spec, Compute(), 0.0)
    first, last = Trainer(spec, StageRange(0, 1), stream=open_stream(spec)), Trainer(spec, StageRange(1, 2))
    first.connect(None, spec.link.k)
    last.connect(spec.link.k, None)
    for member in (first, last):
        member.begin_round(1, range(spec.inner.microbatch_size * spec.inner.steps))
    last.forward(0, 0, first.forward(0, 0, None))
    first.backward(0, last.backward(0, None))
    for member in (first, last):
        member.apply(0, member.inner.squared_gradient_norm() ** 0.5)
        member.end_inner_phase()
        for stage in member.stages:
            member.outer.propose(stage)
    print(*sorted({name.partition(".")[0] for name in set(sys.modules) - imported}), flush=True)


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


ACTIONS = (report, compute, first_step, end_with, fail, sleep, nest, nest_sleep)


def main() -> None:
    what, *arguments = sys.argv[1:]
    {each.__name__: each for each in ACTIONS}[what](*arguments)
