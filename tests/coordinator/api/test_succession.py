"""Of two coordinators of a run the former one ends: a caller shows a proof, or it looks at the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from coordinator.api import succession
from coordinator.api.succession import Partner, TermAt
from node.security.credentials import RunCredentials, load
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.names import TERM_HEADER
from protocol.trust.term import Succession, is_proof, next_term, proof_of, term_in
from tests.builders import keyed, spec_of
from tests.support.certificates import authority, credentials
from tests.support.coordinator_process import COORDINATOR, Running, failure_of, running, update_where

A = keyed(1)
OTHER = "other.example.org:7700"


async def code_of(call: Awaitable[object]) -> grpc.StatusCode | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


def status(run: Running, proof: bytes) -> Awaitable[object]:
    return run.stub(A).Status(pb.StatusRequest(), metadata=((TERM_HEADER, proof),))


def answering(term: int | None) -> TermAt:
    async def term_at(address: str, _: bytes) -> int | None:
        assert address == OTHER
        return term

    return term_at


@asynccontextmanager
async def ending(folder: Path, partner: Partner | None = None) -> AsyncIterator[Running]:
    """A coordinator that ends because another one decides."""
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(running(spec_of(), folder, partner=partner))
        yield run
        async with asyncio.timeout(30):
            await asyncio.wait({run.task})
        with pytest.raises(HetnodeError) as error:
            await stack.aclose()
        assert error.value.code is ErrorCode.COORDINATOR_REPLACED


async def test_a_coordinator_ends_when_a_later_term_is_proven(tmp_path: Path) -> None:
    async with ending(tmp_path / "run") as run:
        signed = proof_of(2, run.run, COORDINATOR.sign)
        for worthless in (
            proof_of(2, run.run, A.sign),  # every member has a key
            proof_of(2, "another-run", COORDINATOR.sign),
            proof_of(1, run.run, COORDINATOR.sign)[:8] + signed[8:],
            signed[:-1],
            signed + b"\0" * 200,
            signed[:8],
            b"",
        ):
            assert await code_of(status(run, worthless)) is None
        assert await failure_of(status(run, signed)) is grpc.StatusCode.UNAVAILABLE


async def test_nobody_is_answered_after_that(tmp_path: Path) -> None:
    """Not even what the coordinator had still decided by then; and it says so again at each start."""
    async with ending(tmp_path / "run") as run:
        watch = run.stub(A).Watch(pb.WatchRequest(peer=A.peer, end_only=True))
        joined = await run.join(A)
        assert joined.run == run.run
        proof = proof_of(1, run.run, COORDINATOR.sign)
        codes = await asyncio.gather(
            code_of(status(run, proof)), *(code_of(run.stub(A).Status(pb.StatusRequest())) for _ in range(20))
        )
        assert codes[0] is grpc.StatusCode.UNAVAILABLE
        assert await code_of(run.stub(A).Status(pb.StatusRequest())) is grpc.StatusCode.UNAVAILABLE
        watch.cancel()


async def test_a_standby_takes_over_when_the_other_one_is_silent(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with running(spec_of(), folder) as run:
        first = await run.join(A)
    (folder / "partner").write_text(OTHER)
    with pytest.raises(HetnodeError, match="Stop it there") as refused:
        async with running(spec_of(), folder, partner=Partner(folder, answering(0), takes_over=True)):
            pass
    assert refused.value.code is ErrorCode.COORDINATOR_REPLACED
    async with running(spec_of(), folder, partner=Partner(folder, answering(None), takes_over=True)) as run:
        term = (await run.status()).term
        assert term > 0
        watch = run.stub(A).Watch(pb.WatchRequest(peer=A.peer))
        told = (await update_where(watch, lambda update: update.HasField("succession"))).succession
        assert term_in(told.term) == term
        assert is_proof(told.term, run.run, COORDINATOR.peer)
        assert list(told.others) == [OTHER]
        assert list(told.dht_peers) == list(first.dht_peers)
        assert await code_of(status(run, told.term)) is None
        watch.cancel()
    async with running(spec_of(), folder) as run:  # the term is in the log
        assert (await run.status()).term == term


async def test_a_former_coordinator_that_is_back_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """To start the DHT peer takes seconds, in which a service may have started the former one again."""
    folder = tmp_path / "run"
    async with running(spec_of(), folder):
        pass
    (folder / "partner").write_text(OTHER)
    answers = iter((None, 0))

    async def back_meanwhile(_: str, __: bytes) -> int | None:
        return next(answers)

    with pytest.raises(HetnodeError, match="Stop it there") as refused:
        async with running(spec_of(), folder, partner=Partner(folder, back_meanwhile, takes_over=True)):
            pass
    assert refused.value.code is ErrorCode.COORDINATOR_REPLACED
    async with running(spec_of(), folder) as run:
        assert (await run.status()).term == 0


async def test_a_coordinator_shows_its_partner_that_it_has_taken_over(tmp_path: Path) -> None:
    """At once: where the former one cannot reach this one, nobody else may tell it for long."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "partner").write_text(OTHER)
    shown = asyncio.Queue[bytes]()

    async def noting(_: str, proof: bytes) -> int | None:
        shown.put_nowait(proof)
        return None

    async with running(spec_of(), folder, partner=Partner(folder, noting, takes_over=True)) as run:
        async with asyncio.timeout(30):
            while not (proof := await shown.get()):
                pass
        assert is_proof(proof, run.run, COORDINATOR.peer)
        assert term_in(proof) == (await run.status()).term


def test_of_two_that_take_over_side_by_side_the_later_goes_on() -> None:
    assert next_term(0, 1_800_000_000.7) == 1_800_000_000
    assert next_term(1_800_000_000, 1_700_000_000.0) == 1_800_000_001  # a clock may be late


@pytest.mark.parametrize(("term", "ends"), [(None, False), (0, False), (1, True)])
async def test_a_coordinator_that_comes_back_looks_at_its_partner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: int | None, ends: bool
) -> None:
    monkeypatch.setattr(succession, "LOOK_SECONDS", 0.05)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "partner").write_text(OTHER)
    asked = asyncio.Event()
    answers = iter((None, None, term))

    async def at_first_silent(_: str, __: bytes) -> int | None:
        if (answer := next(answers, "over")) == "over":
            asked.set()
            return term
        assert not isinstance(answer, str)
        return answer

    partner = Partner(folder, at_first_silent)
    if not ends:
        async with running(spec_of(), folder, partner=partner) as run, asyncio.timeout(30):
            await asked.wait()
            assert not run.task.done()
        return
    async with ending(folder, partner):
        pass
    with pytest.raises(HetnodeError, match="run over at other"):
        async with running(spec_of(), folder, partner=Partner(folder, answering(term))):
            pass


def test_a_node_keeps_the_newest_proof_and_where_else_the_coordinator_may_be(tmp_path: Path) -> None:
    run = "run-0123456789ab"
    first = RunCredentials(
        tmp_path / "run", run, "a:1", COORDINATOR.peer, None, credentials(A.peer, authority("run"))
    )
    first.save()
    assert first.told(Succession()) is first
    known = first.told(Succession(b"", ("b:1",)))
    assert known.others == ("b:1",)
    second, third = (proof_of(term, run, COORDINATOR.sign) for term in (2, 3))
    known = known.moved("b:1")
    assert (known.api, known.others) == ("b:1", ("a:1",))
    known = known.told(Succession(second, ("b:1", "c:1")))
    assert (known.tls.term, known.others) == (second, ("c:1",))
    assert known.told(Succession(proof_of(4, run, A.sign), ())) is known
    assert known.told(Succession(proof_of(1, run, COORDINATOR.sign), ())) is known
    known = known.told(Succession(third, ()))
    assert (known.tls.term, known.others) == (third, ("c:1",))
    assert load(first.folder) == known
