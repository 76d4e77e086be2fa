"""The virtual loop: the clock, equal runs for equal seeds, deadlocks, suspended and ended processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.virtual.loop import Deadlock, VirtualProcess, current_process, elapsed, run, running_loop, start


def trace_of(seed: int) -> list[tuple[float, int]]:
    """The order in which thirty tasks sleep and end. Some sleeps end at the same time."""
    rng = random.Random(seed)
    trace: list[tuple[float, int]] = []

    async def one(number: int, others: set[asyncio.Event]) -> None:
        for _ in range(5):
            await asyncio.sleep(rng.choice([0, 0.5, rng.random()]))
            trace.append((elapsed(), number))
        for event in others:
            event.set()

    async def main() -> None:
        tasks = {asyncio.ensure_future(one(number, {asyncio.Event()})) for number in range(30)}
        while tasks:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            trace.extend((elapsed(), hash(task)) for task in done)

    run(main())
    return trace


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    first = trace_of(1)
    assert len(first) == 180
    assert trace_of(1) == first
    assert trace_of(2) != first


async def wait_without_end() -> None:
    await asyncio.Event().wait()


async def sleep_forever() -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(1)


async def spin() -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (wait_without_end, "wait_without_end"),
        (sleep_forever, "has not ended"),
        (spin, "the clock stands still"),
    ],
)
def test_a_run_that_cannot_end_is_a_deadlock_with_the_stacks_of_all_tasks(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[], Coroutine[Any, Any, None]], message: str
) -> None:
    monkeypatch.setattr("tests.virtual.loop._MAX_STEPS_PER_INSTANT", 1000)
    with pytest.raises(Deadlock, match=message):
        run(main(), horizon=100)


def test_a_suspended_process_gets_missed_events_when_it_resumes() -> None:
    async def main() -> list[tuple[float, str]]:
        trace: list[tuple[float, str]] = []
        event = asyncio.Event()

        async def ticking(name: str) -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                trace.append((elapsed(), name))

        async def listening() -> None:
            await event.wait()
            trace.append((elapsed(), "event"))

        process = VirtualProcess("a")
        start(process, ticking("suspended"))
        start(process, listening())
        other = asyncio.create_task(ticking("free"))
        await asyncio.sleep(1.5)
        running_loop().suspend(process)
        event.set()
        await other
        await asyncio.sleep(7)
        running_loop().resume(process)
        await asyncio.sleep(2)
        return trace

    assert run(main()) == [
        (1, "suspended"),
        (1, "free"),
        (2, "free"),
        (3, "free"),
        (10, "event"),
        (10, "suspended"),
        (11, "suspended"),
    ]


def test_an_ended_process_runs_no_further_step_and_no_clean_up() -> None:
    trace: list[str] = []

    async def main() -> None:
        async def child() -> None:
            assert current_process.get() is process
            try:
                await asyncio.sleep(5)
                trace.append("went on")
            finally:
                trace.append("cleaned up")

        async def parent() -> None:
            await asyncio.create_task(child())

        process = VirtualProcess("a")
        start(process, parent())
        await asyncio.sleep(1)
        assert len(running_loop().tasks_of(process)) == 2
        running_loop().end(process)
        await asyncio.sleep(10)
        assert trace == []

    run(main())
    assert trace == ["cleaned up"]  # `run` cancels the task after the test; no other task sees it
