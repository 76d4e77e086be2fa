"""The limit of a node's line: one account for all its processes, that no interleaving overdraws."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.transfer import outgoing, read_in_thread, receive_exactly
from protocol.server.line import BURST_SECONDS, UNLIMITED, Line, LineLimits

RATE = 1e6


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 2_000_000), st.sampled_from((0.0, 0.1, 2.0))), max_size=20
    )
)
def test_no_window_of_time_has_more_bytes_than_the_limit(
    tmp_path_factory: pytest.TempPathFactory, sent: list[tuple[int, int, float]]
) -> None:
    file = tmp_path_factory.mktemp("line") / "line"
    clock = 1000.0
    passed: list[tuple[float, int]] = []

    async def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protocol.server.line.time.monotonic", lambda: clock)
        patch.setattr("protocol.server.line.asyncio.sleep", sleep)
        first = Line.create(LineLimits(upload=RATE), file)
        lines = [first, Line(LineLimits(upload=RATE), file), Line(LineLimits(upload=RATE), file)]
        for who, nbytes, pause in sent:
            asyncio.run(lines[who].up.take(nbytes))
            passed.append((clock, nbytes))
            clock += pause
    for index, (began, _) in enumerate(passed):
        for until in range(index, len(passed)):
            within = sum(nbytes for _, nbytes in passed[index + 1 : until + 1])
            assert within <= RATE * (passed[until][0] - began + BURST_SECONDS) + first.up.piece_bytes


def test_processes_share_one_account(tmp_path: Path) -> None:
    line = Line.create(LineLimits(upload=RATE, download=RATE), tmp_path / "line")
    program = """
        import asyncio, time
        from protocol.server.line import Line

        async def main() -> None:
            line = Line.from_environment()
            for _ in range(10):
                await line.up.take(30_000)
            print(time.monotonic())

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    began = time.monotonic()
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=line.environment) for _ in range(3)
    ]
    last = max(float(child.communicate(timeout=60)[0]) for child in children)
    # The last piece passes when all bytes before it have.
    assert RATE * (last - began + BURST_SECONDS) + line.up.piece_bytes >= 900_000


async def test_a_line_without_limits_has_no_file_and_never_waits(tmp_path: Path) -> None:
    line = Line.create(LineLimits(), tmp_path / "line")
    assert not (tmp_path / "line").exists()
    assert line.environment == {}
    await line.up.take(10**15)
    assert UNLIMITED.up.cap(7.0) == 7.0
    assert [bytes(piece) for piece in line.up.pieces(b"abc")] == [b"abc"]


async def test_a_new_account_owes_nothing_and_the_directions_are_separate(tmp_path: Path) -> None:
    file = tmp_path / "line"
    former = Line.create(LineLimits(upload=1.0, download=1.0), file)
    hanging = asyncio.create_task(former.up.take(10**9))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):  # it would take 30 years
        await former.down.take(1)
        hanging.cancel()
        await Line.create(LineLimits(upload=1.0), file).up.take(1)


async def test_a_payload_is_sent_in_pieces_that_follow_each_other_soon(tmp_path: Path) -> None:
    line = Line.create(LineLimits(upload=RATE), tmp_path / "line")
    payload = bytes(300_000)
    sizes = [len(chunk.data) async for chunk in outgoing(read_in_thread(iter([payload])), 1, 0, line)]
    assert sum(sizes) == len(payload)
    assert max(sizes) <= RATE / 10
    began = time.monotonic()
    stream = outgoing(read_in_thread(iter([payload])), 1, 0)
    limited = Line.create(LineLimits(download=RATE), tmp_path / "other")
    assert await receive_exactly(stream, len(payload), line=limited) == payload
    piece = limited.down.piece_bytes
    assert len(payload) <= RATE * (time.monotonic() - began + BURST_SECONDS) + piece
