"""An event loop on a virtual clock: when no task is ready, the clock jumps to the next timer.

It runs all tasks in one thread and always in the same order. The tasks of a node belong to a
:class:`VirtualProcess`. The loop can suspend a process (SIGSTOP) and end it (SIGKILL) between two steps of
its tasks.
"""

from __future__ import annotations

import asyncio
import heapq
import io
import itertools
import socket
from asyncio import base_events
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context, ContextVar
from ipaddress import IPv4Address
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

BEGINNING = 1_000_000.0
"""What a new virtual clock shows. It also counts as Unix time."""
_MAX_STEPS_PER_INSTANT = 1_000_000


class Deadlock(Exception):
    """No task can go on, or the clock stands still. The message says where each task waits."""


current_process: ContextVar[VirtualProcess | None] = ContextVar("process", default=None)
"""The process whose code runs now; None for the test itself."""


class VirtualProcess:
    """One process of a node, from its start to its end. Its tasks are suspended and ended together.

    Attributes:
        context: the context variables of each new task.
        is_unwound: the test is over, and the tasks are cancelled. Calls of other machines fail at once.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_ended = False
        self.is_suspended = False
        self.is_unwound = False
        self.context = Context()
        self.context.run(current_process.set, self)

    def __repr__(self) -> str:
        return f"VirtualProcess({self.name})"


class _Numbered:
    """The hash is the number of creation, so a set of these has the same order in each run."""

    _number: int

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualFuture(_Numbered, asyncio.Future[Any]):
    def __init__(self, number: int, loop: VirtualLoop) -> None:
        self._number = number
        super().__init__(loop=loop)


class VirtualTask(_Numbered, asyncio.Task[Any]):
    def __init__(
        self, number: int, coroutine: Any, loop: VirtualLoop, name: str | None, context: Any
    ) -> None:
        self._number = number
        super().__init__(coroutine, loop=loop, name=name, context=context)
        self.process = current_process.get() if context is None else context.get(current_process)


class VirtualLoop(base_events.BaseEventLoop):
    """An event loop without sockets and threads. It runs the work of executors at once.

    Args:
        horizon: the limit of a run in virtual seconds; after it the loop raises :class:`Deadlock`.
    """

    def __init__(self, horizon: float = 7 * 86_400.0) -> None:
        super().__init__()
        self._now = BEGINNING
        self._horizon = BEGINNING + horizon
        self._numbers = itertools.count(1)
        self._steps_in_instant = 0
        self._held: dict[VirtualProcess, list[asyncio.Handle]] = {}
        self._tasks: list[VirtualTask] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._addresses: dict[str, str] = {}
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now

    # A virtual swarm makes a million handles: cheaper without the checks of a debugged loop, and with timers
    # that are not compared in Python.

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def create_future(self) -> VirtualFuture:
        return VirtualFuture(next(self._numbers), self)

    def suspend(self, process: VirtualProcess) -> None:
        """Run no step of `process` until :meth:`resume`. Events of that time wait for it."""
        process.is_suspended = True

    def resume(self, process: VirtualProcess) -> None:
        process.is_suspended = False
        if not process.has_ended:
            self._ready.extend(self._held.pop(process, ()))

    def end(self, process: VirtualProcess) -> None:
        """Run no further step of `process`, also no clean-up, as after SIGKILL."""
        process.has_ended = True

    def tasks_of(self, process: VirtualProcess) -> list[VirtualTask]:
        """The open tasks of `process`, the oldest first."""
        return [task for task in self._tasks if task.process is process and not task.done()]

    def open_tasks(self) -> str:
        """A text that says where each open task waits."""
        text = io.StringIO()
        for task in self._tasks:
            if not task.done() and not (task.process and task.process.has_ended):
                text.write(f"\n{task.process or 'the test'}: ")
                task.print_stack(file=text)
        return text.getvalue()

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> VirtualTask:
        task = VirtualTask(next(self._numbers), coroutine, self, name, context)
        if len(self._tasks) > 1000:
            self._tasks = [old for old in self._tasks if not old.done()]
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> Any:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # an executor does the same
            done.set_exception(error)
        return done

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def _run_once(self) -> None:
        """Run all steps that are ready. If there are none, move the clock to the next timer first."""
        if not self._ready:
            self._advance()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(current_process)
            if process is not None and (process.is_suspended or process.has_ended):
                self._held.setdefault(process, []).append(handle)
                continue
            handle._run()
        self._steps_in_instant += 1
        if self._steps_in_instant > _MAX_STEPS_PER_INSTANT:
            raise Deadlock(f"the clock stands still at {self._now - BEGINNING:.3f} s: {self.open_tasks()}")

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"no task can go on: {self.open_tasks()}")
        self._now = max(self._now, timers[0][0])
        self._steps_in_instant = 0
        if self._now > self._horizon:
            raise Deadlock(f"the run has not ended after {self._now - BEGINNING:.0f} s: {self.open_tasks()}")
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])

    def _process_events(self, event_list: Any) -> None:
        raise AssertionError("there are no sockets")

    def _write_to_self(self) -> None:
        """This loop never sleeps, so no thread has to wake it."""

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        """Give each name an address of its own."""
        address = self._addresses.setdefault(str(host), str(IPv4Address(0x0A000001 + len(self._addresses))))
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))]

    def name_of(self, address: str) -> str:
        """The name that resolves to `address`."""
        return next(name for name, each in self._addresses.items() if each == address)

    async def create_connection(self, *_: Any, **__: Any) -> NoReturn:
        raise OSError("a virtual loop has no sockets")

    async def create_server(self, *_: Any, **__: Any) -> NoReturn:
        raise OSError("a virtual loop has no sockets")


def start(
    process: VirtualProcess, coroutine: Coroutine[Any, Any, Any], name: str | None = None
) -> asyncio.Task[Any]:
    """Run `coroutine` as a task of `process`. The tasks that it starts belong to `process`, too."""
    return asyncio.get_running_loop().create_task(coroutine, name=name, context=process.context.copy())


def running_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def elapsed() -> float:
    """Virtual seconds since the loop began."""
    return running_loop().time() - BEGINNING


def run(main: Coroutine[Any, Any, T], horizon: float = 7 * 86_400.0) -> T:
    """Run `main` to its end on a new virtual loop, then cancel all tasks that are left."""
    loop = VirtualLoop(horizon)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main)
    finally:
        _clear(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _clear(loop: VirtualLoop) -> None:
    """Cancel the tasks that are left, also those of ended processes: asyncio warns of pending ones."""
    for task in loop._tasks:
        if task.process is not None:
            task.process.has_ended, task.process.is_unwound = False, True
            loop.resume(task.process)
    left = [task for task in loop._tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
