"""``hetnode run pause`` and ``hetnode run resume``, as they are typed, against a coordinator that runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.types import Pause, PausedBy
from tests.builders import keyed, spec_of
from tests.support import commands
from tests.support.coordinator_process import Running, running

A, B = (keyed(i) for i in range(2))


async def hetnode(*arguments: str) -> tuple[int, str, str]:
    result = await asyncio.to_thread(commands.hetnode, *arguments)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    # However long a command takes to start, no peer is lost meanwhile.
    async with running(spec_of(timing__lost_after=3600.0), tmp_path) as coordinator:
        (tmp_path / "address").write_text(coordinator.address)
        yield coordinator


async def test_a_run_is_paused_and_goes_on(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    folder = str(run.folder)
    assert await hetnode("run", "pause", folder, "--reason", "a [bold]spike[/]") == (
        0,
        "round 1 still ends, then it waits before round 2; 'hetnode run resume' ends the pause\n",
        "",
    )
    status, out, _ = await hetnode("run", "pause", folder)
    assert status == 0
    assert out.startswith("the run was paused already, by the operator: a [bold]spike[/]\n")
    assert (await run.status()).pause == Pause(2, PausedBy.OPERATOR, "a [bold]spike[/]")
    assert await hetnode("run", "resume", folder) == (0, "the run goes on\n", "")
    assert await hetnode("run", "resume", folder) == (0, "the run was not paused\n", "")


async def test_only_the_operator_pauses_a_run(run: Running, tmp_path: Path) -> None:
    status, _, errors = await hetnode("run", "pause", str(tmp_path / "nowhere"))
    assert status == 7
    assert "[no-credentials]" in errors
    assert "Only the operator may do this" in errors


@pytest.mark.parametrize("reason", ["a\nline", "x" * 10_000])
async def test_a_reason_that_is_no_sentence_is_refused(run: Running, reason: str) -> None:
    status, _, errors = await hetnode("run", "pause", str(run.folder), "--reason", reason)
    assert status == 5
    assert "[bad-request]" in errors
    assert (await run.status()).pause is None


async def test_a_rollback_is_listed_confirmed_and_decided(run: Running) -> None:
    for peer in (A, B):
        await run.join(peer)
    for peer in (A, B):
        for stage in (0, 1):
            await run.attest(peer, stage, 0)
        await run.attest(peer, 0, 0, part="embedding")
    await run.settle(0, 1, A, B)
    await run.settle(1, 1, A, B)
    folder = str(run.folder)
    status, out, _ = await hetnode("rollback", folder)
    assert status == 0
    rows = [line.replace("│", "").split() for line in out.splitlines()]
    assert ["0", "1"] in [row[:2] for row in rows]
    status, _, errors = await hetnode("rollback", folder, "--to", "1", "--yes")
    assert status == 5
    assert "[no-rollback]" in errors
    assert "Choose another round: 0." in errors
    status, out, _ = await hetnode("rollback", folder, "--to", "0")  # nobody answers the question
    assert status != 0
    assert "This undoes 1 round (" in out
    assert (await run.status()).pause is None
    assert await hetnode("rollback", folder, "--to", "0", "--yes", "--reason", "a [red]spike[/]") == (
        0,
        "round 2 is a rollback to round 0\nthe run is paused; 'hetnode run resume' lets it go on\n",
        "",
    )
    assert (await run.status()).rounds_decided == 2
    assert "back to round 0: a [red]spike[/]" in (await run.status()).pause.reason
