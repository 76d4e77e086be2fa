"""No answer tells what the standby lacks, and a dead standby holds answers up for seconds only."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from coordinator.api.succession import Fence, Partner
from coordinator.ops import standby
from coordinator.ops.standby import StandbyDesk
from coordinator.run.state.events import CoordinatorStarted, PeerBanned
from coordinator.store.backup import back_up
from coordinator.store.metrics import MetricsFile
from coordinator.store.store import SqliteStore
from node.cli import standby as cli
from node.cli.standby import follow
from node.net.coordinator_channel import CoordinatorChannel
from node.security.credentials import operator_tls
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId
from protocol.wire.operator_calls import BanPeer, FollowLog
from tests.builders import keyed, spec_of
from tests.support.certificates import credentials
from tests.support.coordinator_process import COORDINATOR, Running, refusal_of, running
from tests.support.ports import free_port

A, B = keyed(1), keyed(2)
HERE = "standby.example.org:7700"


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(spec_of(), tmp_path / "run") as found:
        yield found


@asynccontextmanager
async def followed(
    run: Running, copy: Path, metrics: MetricsFile | None = None
) -> AsyncIterator[SqliteStore]:
    """The log of a standby, which follows until the end of the block."""
    if not copy.exists():
        await asyncio.to_thread(back_up, run.folder, copy, COORDINATOR.peer)

    def connect() -> CoordinatorChannel:
        return CoordinatorChannel(run.address, operator_tls(copy))

    with closing(SqliteStore(copy / "coordinator.sqlite", COORDINATOR.peer, COORDINATOR.sign)) as store:
        store.verify()
        task = asyncio.create_task(follow(store, connect, HERE, metrics))
        try:
            yield store
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait({task})


async def until_in_step(run: Running) -> None:
    """Answers wait for the standby from now on."""
    partner = run.folder / "partner"
    async with asyncio.timeout(30):
        while not partner.exists():  # noqa: ASYNC110  a file tells
            await asyncio.sleep(0.01)


async def ban(run: Running, peer: PeerId) -> None:
    await run.ask(BanPeer(peer, "a test"))


async def test_what_is_answered_is_on_the_disk_of_the_standby(run: Running, tmp_path: Path) -> None:
    await ban(run, A.peer)
    copy = tmp_path / "copy"
    async with followed(run, copy) as store:
        await until_in_step(run)
        for number in range(3, 30):
            await ban(run, keyed(number).peer)
            newest = store.read(*store.end[:1] * 2)[0][1]
            assert isinstance(newest, PeerBanned)
            assert newest.peer == keyed(number).peer
    async with followed(run, copy) as store:  # it was away, and nothing more was decided
        await until_in_step(run)
    await run.stop()
    theirs = SqliteStore(run.folder / "coordinator.sqlite", COORDINATOR.peer, COORDINATOR.sign).load()
    ours = SqliteStore(copy / "coordinator.sqlite", COORDINATOR.peer, COORDINATOR.sign).load()
    assert ours == theirs


async def test_a_standby_that_lags_catches_up_while_the_run_goes_on(
    run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "MOST_BYTES", 300)  # a few rows an answer
    copy = tmp_path / "copy"
    await asyncio.to_thread(back_up, run.folder, copy, COORDINATOR.peer)
    for number in range(3, 40):
        await ban(run, keyed(number).peer)
    async with followed(run, copy) as store, asyncio.timeout(30):
        while store.end[0] < 37:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_metrics_are_copied_in_whole_lines(
    run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "MOST_BYTES", 300)  # a few rows or lines an answer
    monkeypatch.setattr(cli, "METRICS_SECONDS", 0.0)
    theirs, copy = run.folder / "metrics.jsonl", tmp_path / "copy"
    await ban(run, A.peer)
    await asyncio.to_thread(back_up, run.folder, copy, COORDINATOR.peer)
    with (copy / "metrics.jsonl").open("a") as half:
        half.write('{"time": 1.0, "ev')  # the backup was made while a line was written
    with MetricsFile(copy / "metrics.jsonl") as metrics:
        async with followed(run, copy, metrics), asyncio.timeout(30):
            for number in range(3, 30):
                await ban(run, keyed(number).peer)
            while metrics.size < 1000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    ours = (copy / "metrics.jsonl").read_bytes()
    assert theirs.read_bytes().startswith(ours)
    assert ours.endswith(b"}\n")


async def test_nobody_waits_long_for_a_dead_standby(
    run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(standby, "PATIENCE_SECONDS", 0.5)
    caplog.set_level("INFO")
    copy = tmp_path / "copy"
    async with followed(run, copy):
        await until_in_step(run)
        await ban(run, A.peer)
    clock = asyncio.get_running_loop().time
    began = clock()
    await ban(run, B.peer)
    assert clock() - began >= 0.4
    assert "on this machine alone" in caplog.text
    await ban(run, keyed(3).peer)
    async with followed(run, copy) as store, asyncio.timeout(30):
        while "has the whole log" not in caplog.text.rpartition("alone")[2]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await ban(run, keyed(4).peer)
        assert store.end[0] == len(store.read(1, 10_000))
        assert keyed(4).peer in str(store.read(store.end[0], store.end[0]))


async def test_nobody_learns_what_is_decided_beside_a_standby_that_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that was suspended meanwhile decides once more, before it has looked at the other one."""
    monkeypatch.setattr(standby, "PATIENCE_SECONDS", 0.5)
    folder, term = tmp_path / "run", None

    async def term_at(_: str, __: bytes) -> int | None:
        return term

    async with AsyncExitStack() as stack:
        own = running(spec_of(), folder, partner=Partner(folder, term_at))
        run = await stack.enter_async_context(own)
        async with followed(run, tmp_path / "copy"):
            await until_in_step(run)
            await ban(run, A.peer)
        term = 1
        with pytest.raises(grpc.aio.AioRpcError) as untold:
            await ban(run, B.peer)
        assert untold.value.code() is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(30):
            await asyncio.wait({run.task})
        with pytest.raises(HetnodeError) as ended:
            await stack.aclose()
        assert ended.value.code is ErrorCode.COORDINATOR_REPLACED


async def test_another_standby_comes_where_one_has_died_while_nothing_is_decided(
    run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with followed(run, tmp_path / "copy") as store:
        await until_in_step(run)
        await ban(run, A.peer)
        there = FollowLog(store.end[0], store.end[1].hex(), "another.example.org:7700")
    refused = await refusal_of(run.ask(there))
    assert refused.code is ErrorCode.ALREADY_ACTIVE
    monkeypatch.setattr(standby, "PATIENCE_SECONDS", -standby.WAIT_SECONDS)  # some seconds later
    monkeypatch.setattr(standby, "WAIT_SECONDS", 0.0)
    assert await run.ask(there) == ()


async def test_a_standby_says_that_nobody_answers_and_ends_with_a_run_that_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(SqliteStore(tmp_path / "log.sqlite", COORDINATOR.peer, COORDINATOR.sign)) as store:
        store.begin(spec_of().canonical_json)
        address, peer = f"127.0.0.1:{free_port()}", credentials(A.peer)

        def connect() -> CoordinatorChannel:
            return CoordinatorChannel(address, peer)

        waiting = asyncio.create_task(follow(store, connect, HERE))
        async with asyncio.timeout(30):
            while "goes on waiting" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        waiting.cancel()
        async with asyncio.timeout(30):
            await follow(store, connect, HERE, is_over=True)


async def test_who_is_refused(run: Running, tmp_path: Path) -> None:
    empty = FollowLog(0, "00" * 32, HERE)
    refused = await refusal_of(run.ask(empty, A))
    assert refused.code is ErrorCode.CERTIFICATE_REFUSED
    for call in (empty, FollowLog(10_000, "00" * 32, HERE), FollowLog(1, "00" * 32, HERE)):
        refused = await refusal_of(run.ask(call))
        assert refused.code is ErrorCode.STORE_CORRUPT
        assert "no copy of" in refused.cause
    refused = await refusal_of(run.ask(FollowLog(0, "00" * 32, "not an address")))
    assert refused.code is ErrorCode.BAD_REQUEST
    assert not (run.folder / "partner").exists()
    async with followed(run, tmp_path / "copy") as store:
        await until_in_step(run)
        await ban(run, A.peer)
        number, row_hash = store.end
        refused = await refusal_of(run.ask(FollowLog(number, row_hash.hex(), "another.example.org:7700")))
        assert refused.code is ErrorCode.ALREADY_ACTIVE
        first = store.row_hash(1)
        assert first is not None
        refused = await refusal_of(run.ask(FollowLog(1, first.hex(), HERE)))  # a second copy of its folder
        assert refused.code is ErrorCode.ALREADY_ACTIVE


async def test_a_log_that_went_on_by_itself_is_no_standby(run: Running, tmp_path: Path) -> None:
    """After a take-over the folder of the former coordinator has rows of its own."""
    copy = tmp_path / "copy"
    await asyncio.to_thread(back_up, run.folder, copy, COORDINATOR.peer)
    async with AsyncExitStack() as stack:
        own = SqliteStore(copy / "coordinator.sqlite", COORDINATOR.peer, COORDINATOR.sign)
        stack.callback(own.close)
        own.verify()
        own.append([CoordinatorStarted(1.0)])

        def connect() -> CoordinatorChannel:
            return CoordinatorChannel(run.address, operator_tls(copy))

        with pytest.raises(HetnodeError, match="no copy of") as error:
            await follow(own, connect, HERE)
        assert error.value.code is ErrorCode.STORE_CORRUPT


def test_rows_are_copied_whole_and_in_their_order(tmp_path: Path) -> None:
    """The copy has the same hashes, whatever pieces the rows came in; a damaged row changes nothing."""
    sign: Any = COORDINATOR.sign
    first = SqliteStore(tmp_path / "first.sqlite", COORDINATOR.peer, sign)
    first.begin(spec_of().canonical_json)
    first.append([CoordinatorStarted(float(number)) for number in range(700)])
    shutil.copyfile(tmp_path / "first.head", tmp_path / "second.head")
    second = SqliteStore(tmp_path / "second.sqlite", COORDINATOR.peer, sign)
    second.begin(spec_of().canonical_json)
    assert second.row_hash(0) == first.row_hash(0)
    for most in (1, 50, 1 << 20, 1 << 20):
        rows = first.rows_after(second.end[0], most)
        assert sum(len(body) for _, body in rows) <= most or len(rows) == 1
        with pytest.raises(HetnodeError):
            second.append_rows([*rows, ("CoordinatorStarted", b"damaged")])
        second.append_rows(rows)
        assert second.row_hash(second.end[0]) == first.row_hash(second.end[0])
    assert second.end == first.end
    assert first.rows_after(700, 100) == []
    assert StandbyDesk(first, cast(MetricsFile, None), cast(Fence, None)).is_in_step is False
