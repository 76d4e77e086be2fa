"""The virtual loop: time jumps, runs repeat exactly, deadlocks are named, lives are suspended and ended."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.virtual.loop import BEGINNING, Deadlock, Life, VirtualLoop, current_life, run, start


def now() -> float:
    return asyncio.get_running_loop().time() - BEGINNING


def loop() -> VirtualLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualLoop)
    return running


def test_years_pass_in_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400 * 365)
        return now()

    assert run(main(), horizon=1e9) == 86_400 * 365


def test_timers_fire_in_their_order_and_timeouts_hold() -> None:
    async def main() -> list[str]:
        trace: list[str] = []

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            trace.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(after(3, "late"))
            group.create_task(after(1, "early"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2):
                    await asyncio.Event().wait()
            trace.append("timeout")
        return trace

    assert run(main()) == ["early", "timeout", "late"]


def test_work_in_executors_is_done_at_once_in_this_thread() -> None:
    def work(context: str) -> str:
        return f"{context} {now():.0f}"

    async def main() -> tuple[str, str]:
        return await asyncio.to_thread(work, "thread"), await loop().run_in_executor(None, work, "executor")

    assert run(main()) == ("thread 0", "executor 0")


def test_errors_in_executors_reach_those_who_wait() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    run(main())


def trace_of(seed: int) -> list[tuple[float, int]]:
    """Many tasks that sleep, wait for each other in sets and race."""
    chance = random.Random(seed)
    trace: list[tuple[float, int]] = []

    async def one(number: int, others: set[asyncio.Event]) -> None:
        for _ in range(5):
            await asyncio.sleep(chance.choice([0, 0.5, chance.random()]))
            trace.append((now(), number))
        for event in others:
            event.set()

    async def main() -> None:
        tasks = {asyncio.ensure_future(one(number, {asyncio.Event()})) for number in range(30)}
        while tasks:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            trace.extend((now(), id_of(task)) for task in done)

    def id_of(task: asyncio.Future[None]) -> int:
        return hash(task)

    run(main())
    return trace


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    first = trace_of(1)
    assert len(first) == 180
    assert trace_of(1) == first
    assert trace_of(2) != first


def test_a_deadlock_is_raised_with_the_stacks_of_all_tasks() -> None:
    async def waits_for_godot() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="waits_for_godot"):
        run(waits_for_godot())


def test_a_run_without_an_end_ends_at_the_horizon() -> None:
    async def forever() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1)

    with pytest.raises(Deadlock, match="no end in sight"):
        run(forever(), horizon=100)


def test_a_loop_in_which_time_stands_still_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.virtual.loop._MOST_STEPS_AT_ONCE", 1000)

    async def spins() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="time stands still"):
        run(spins())


def test_there_are_no_sockets() -> None:
    async def main() -> None:
        with pytest.raises(OSError, match="no sockets"):
            await asyncio.open_connection("127.0.0.1", 1)

    run(main())


def test_a_suspended_life_stands_still_and_sees_afterwards_what_it_missed() -> None:
    async def main() -> list[tuple[float, str]]:
        trace: list[tuple[float, str]] = []
        doorbell = asyncio.Event()

        async def ticking(name: str) -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                trace.append((now(), name))

        async def listening() -> None:
            await doorbell.wait()
            trace.append((now(), "heard"))

        life = Life("a")
        start(life, ticking("suspended"))
        start(life, listening())
        other = asyncio.create_task(ticking("free"))
        await asyncio.sleep(1.5)
        loop().suspend(life)
        doorbell.set()
        await other
        await asyncio.sleep(7)
        loop().resume(life)
        await asyncio.sleep(2)
        return trace

    assert run(main()) == [
        (1, "suspended"),
        (1, "free"),
        (2, "free"),
        (3, "free"),
        (10, "heard"),
        (10, "suspended"),
        (11, "suspended"),
    ]


def test_an_ended_life_does_nothing_any_more_not_even_cleaning_up() -> None:
    trace: list[str] = []

    async def main() -> None:
        async def child() -> None:
            assert current_life.get() is life
            try:
                await asyncio.sleep(5)
                trace.append("lived on")
            finally:
                trace.append("cleaned up")

        async def parent() -> None:
            await asyncio.create_task(child())

        life = Life("a")
        start(life, parent())
        await asyncio.sleep(1)
        assert len(loop().tasks_of(life)) == 2
        loop().end(life)
        await asyncio.sleep(10)
        assert trace == []

    run(main())
    assert trace == ["cleaned up"]  # after the test itself: nothing of it can reach anybody
