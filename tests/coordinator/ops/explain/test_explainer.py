"""Questions to a coordinator that runs, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from protocol.status import Explanation
from protocol.wire.operator_calls import AskWhy, BanPeer
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_process import Running, refusal_of, running

A, B, C = (keyed(i) for i in range(3))


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(spec_of(), tmp_path) as coordinator:
        yield coordinator


async def ask(run: Running, question: str, caller: Keyed | None = None) -> Explanation:
    return await run.ask(AskWhy(question), caller)


async def test_the_operator_and_every_member_may_ask(run: Running) -> None:
    await run.join(A)
    for caller in (None, A):
        reply = await ask(run, "now", caller)
        assert reply.title.text == "Waiting for 1 more full replica (1 of 2 here)"
    assert (await ask(run, A.peer[-8:])).title.peers == (A.peer,)


async def test_a_decided_round_is_explained_from_the_log(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    for stage in range(2):
        await run.settle(stage, 1, A, B)
    reply = await ask(run, "1")
    assert reply.title.rounds == (1,)
    cited = sorted({number for each in reply.statements for number in each.events})
    assert cited
    told = await ask(run, f"event {' '.join(map(str, cited))}")
    assert [each.events for each in told.statements] == [(number,) for number in cited]


async def test_the_index_of_the_log_is_made_again_after_a_restart(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path) as former:
        await former.join(A)
        await former.join(B)
        for stage in range(2):
            await former.settle(stage, 1, A, B)
        before = await ask(former, "1")
    async with running(spec_of(), tmp_path) as run:
        assert await ask(run, "1") == before


async def test_what_is_not_there_is_refused(run: Running) -> None:
    for question in ("7", "nobody", "event 10000", "x" * 10_000, "x" * 1_000_000, "\x1b[2J", "1 2 3"):
        refusal = await refusal_of(ask(run, question))
        assert refusal.code is (ErrorCode.BAD_REQUEST if len(question) > 50_000 else ErrorCode.BAD_OPTION)
        assert len(str(refusal)) < 1000


async def test_a_stranger_may_not_ask(run: Running) -> None:
    await run.join(A)
    await run.ask(BanPeer(A.peer, "a test"))
    assert (await refusal_of(ask(run, "now", A))).code is ErrorCode.BANNED


async def test_one_caller_cannot_ask_without_end_and_keeps_no_other_from_asking(run: Running) -> None:
    await run.join(A)

    async def many() -> list[object]:
        return await asyncio.gather(*(ask(run, "now", A) for _ in range(60)), return_exceptions=True)

    asked = asyncio.create_task(many())
    assert (await ask(run, "now")).title
    answers = await asked
    refused = [each for each in answers if isinstance(each, Exception)]
    assert 0 < len(refused) < 60
    assert (await run.join(B)).run == run.run
