"""An event loop whose time is virtual: when nothing is ready, it is at once as late as the next timer.

What runs in it runs in one thread and in one order. Each node of a swarm lives in a :class:`Life`; the loop
can suspend a life (SIGSTOP) and end it (SIGKILL), between any two steps of its tasks.
"""

from __future__ import annotations

import asyncio
import heapq
import io
import itertools
from asyncio import base_events
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context, ContextVar
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

BEGINNING = 1_000_000.0
"""Where time starts. The same number serves as Unix time."""
_MOST_STEPS_AT_ONCE = 1_000_000


class Deadlock(Exception):
    """Nothing can ever happen again, or nothing but the same instant; says where every task waits."""


current_life: ContextVar[Life | None] = ContextVar("life", default=None)
"""Of the node whose code runs now; None for the test itself."""


class Life:
    """One life of a node, from its start to its end: what runs under it is suspended and ended together.

    `context` is what all its tasks begin with. `is_unwound`: the test is over, and what its tasks still do
    is only to leave no garbage; nobody answers them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_over = False
        self.is_suspended = False
        self.is_unwound = False
        self.context = Context()
        self.context.run(current_life.set, self)

    def __repr__(self) -> str:
        return f"Life({self.name})"


class _Numbered:
    """Hashes by its number of creation: sets of these are walked in the same order every time."""

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
        self.life = current_life.get() if context is None else context.get(current_life)


class VirtualLoop(base_events.BaseEventLoop):
    """An event loop without sockets, threads and waiting. Executors' work is done at once, in the loop.

    Args:
        horizon: :class:`Deadlock` when so many virtual seconds have passed: a run that never ends, ends.
    """

    def __init__(self, horizon: float = 7 * 86_400.0) -> None:
        super().__init__()
        self._now = BEGINNING
        self._horizon = BEGINNING + horizon
        self._numbers = itertools.count(1)
        self._steps_at_once = 0
        self._held: dict[Life, list[asyncio.Handle]] = {}
        self._tasks: list[VirtualTask] = []
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now

    def create_future(self) -> VirtualFuture:
        return VirtualFuture(next(self._numbers), self)

    def suspend(self, life: Life) -> None:
        """Run no step of `life` until :meth:`resume`. What happens to it meanwhile it sees afterwards."""
        life.is_suspended = True

    def resume(self, life: Life) -> None:
        life.is_suspended = False
        if not life.is_over:
            self._ready.extend(self._held.pop(life, ()))

    def end(self, life: Life) -> None:
        """Run no step of `life` ever again: nothing is cleaned up, as after SIGKILL."""
        life.is_over = True

    def tasks_of(self, life: Life) -> list[VirtualTask]:
        """The open tasks of `life`, the oldest first."""
        return [task for task in self._tasks if task.life is life and not task.done()]

    def where(self) -> str:
        """Where every open task waits, for people."""
        text = io.StringIO()
        for task in self._tasks:
            if not task.done() and not (task.life and task.life.is_over):
                text.write(f"\n{task.life or 'the test'}: ")
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
        except Exception as error:  # as an executor does
            done.set_exception(error)
        return done

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def _run_once(self) -> None:
        """The steps that are ready; before them, where there are none, time goes on to the next timer."""
        if not self._ready:
            self._advance()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            life = handle._context.get(current_life)
            if life is not None and (life.is_suspended or life.is_over):
                self._held.setdefault(life, []).append(handle)
                continue
            handle._run()
        self._steps_at_once += 1
        if self._steps_at_once > _MOST_STEPS_AT_ONCE:
            raise Deadlock(f"time stands still at {self._now - BEGINNING:.3f} s: {self.where()}")

    def _advance(self) -> None:
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._scheduled:
            raise Deadlock(f"nothing can happen any more: {self.where()}")
        self._now = max(self._now, self._scheduled[0]._when)
        self._steps_at_once = 0
        if self._now > self._horizon:
            raise Deadlock(f"no end in sight after {self._now - BEGINNING:.0f} s: {self.where()}")
        while self._scheduled and self._scheduled[0]._when <= self._now:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            self._ready.append(timer)

    def _process_events(self, event_list: Any) -> None:
        raise AssertionError("there are no sockets")

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""

    async def create_connection(self, *_: Any, **__: Any) -> NoReturn:
        raise OSError("a virtual loop has no sockets")

    async def create_server(self, *_: Any, **__: Any) -> NoReturn:
        raise OSError("a virtual loop has no sockets")


def start(life: Life, coroutine: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
    """Run `coroutine` as a task of `life`, and with it all that it starts."""
    return asyncio.get_running_loop().create_task(coroutine, name=name, context=life.context.copy())


def run(main: Coroutine[Any, Any, T], horizon: float = 7 * 86_400.0) -> T:
    """Run `main` to its end on a new virtual loop, then end whatever it has left behind."""
    loop = VirtualLoop(horizon)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main)
    finally:
        _clear(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _clear(loop: VirtualLoop) -> None:
    """Unwind the tasks that are left, those of ended lives as well, so that no garbage complains later."""
    for task in loop._tasks:
        if task.life is not None:
            task.life.is_over, task.life.is_unwound = False, True
            loop.resume(task.life)
    left = [task for task in loop._tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
