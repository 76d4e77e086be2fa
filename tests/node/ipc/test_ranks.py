"""What ``--device`` says of several devices, and how the answers of several ranks become one."""

from __future__ import annotations

import asyncio
import gc

import pytest

from node.ipc.rank_channels import RankChannels
from node.ipc.ranks import names_several, one_device, parse_devices
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.typed_calls import Call, Reply


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", ()),
        ("0,1", ("cuda:0", "cuda:1")),
        ("cuda:3, cuda:1", ("cuda:3", "cuda:1")),
        ("2", ("cuda:2",)),
        ("cpu:3", ("cpu", "cpu", "cpu")),
    ],
)
def test_lists_of_devices(text: str, names: tuple[str, ...]) -> None:
    assert parse_devices(text).names == names


@pytest.mark.parametrize("text", ["", "0,0", "0,cuda:0", "gpu", "cpu", "cpu:0", "cpu:65", "-1", "0,", "mps"])
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(HetnodeError) as caught:
        parse_devices(text)
    assert caught.value.code is ErrorCode.BAD_OPTION


@pytest.mark.parametrize(
    ("text", "name"), [("1", "cuda:1"), (" 0 ", "cuda:0"), ("cuda", "cuda"), ("mps", "mps")]
)
def test_one_device_may_be_a_number(text: str, name: str) -> None:
    """A member of a pipeline on the second GPU is one device, and not a list of one."""
    assert one_device(text) == name
    assert not names_several(name)
    assert not names_several(text)


class FakeRank:
    """Answers what the test sets."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self.end: HetnodeError | None = None

    def call(self, call: Call) -> asyncio.Future[Reply]:
        return self.reply

    async def wait_closed(self) -> None:
        await self.closed.wait()

    async def close(self, grace: float) -> None:
        self.closed.set()


def error(code: ErrorCode) -> HetnodeError:
    return HetnodeError(code, f"cause {code.label}", "remedy")


async def test_rank_0_answers_once_all_have_answered() -> None:
    ranks = [FakeRank(), FakeRank()]
    answer = asyncio.ensure_future(RankChannels(ranks).call(Call("Any")))
    ranks[0].reply.set_result(Reply(b"0"))
    await asyncio.sleep(0)
    assert not answer.done()
    ranks[1].reply.set_result(Reply(b"1"))
    assert (await answer).body == b"0"


async def test_the_cause_is_told_and_not_what_follows_from_it() -> None:
    ranks = [FakeRank(), FakeRank()]
    answer = RankChannels(ranks).call(Call("Any"))
    ranks[0].reply.set_exception(error(ErrorCode.RANK_FAILED))
    ranks[1].reply.set_exception(error(ErrorCode.DATA_UNREADABLE))
    with pytest.raises(HetnodeError) as caught:
        await answer
    assert caught.value.code is ErrorCode.DATA_UNREADABLE


async def test_the_end_of_a_process_is_the_cause_also_if_the_others_notice_it_first() -> None:
    ranks = [FakeRank(), FakeRank()]
    answer = asyncio.ensure_future(RankChannels(ranks).call(Call("Any")))
    ranks[1].reply.set_result(Reply(b"1"))
    ranks[0].reply.set_exception(error(ErrorCode.RANK_FAILED))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not answer.done()
    ranks[1].end = error(ErrorCode.WORKER_DIED)
    ranks[1].closed.set()
    with pytest.raises(HetnodeError) as caught:
        await answer
    assert caught.value.code is ErrorCode.WORKER_DIED


async def test_ranks_that_disagree_end_with_one_error() -> None:
    ranks = [FakeRank(), FakeRank()]
    answer = RankChannels(ranks, patience=0.01).call(Call("Any"))
    ranks[1].reply.set_exception(error(ErrorCode.DATA_UNREADABLE))
    with pytest.raises(HetnodeError, match="cause data-unreadable") as caught:
        await answer
    assert caught.value.code is ErrorCode.RANK_FAILED


@pytest.mark.parametrize("is_dead", [False, True])
async def test_failures_that_no_one_awaits_are_not_logged(is_dead: bool) -> None:
    class Dead(FakeRank):
        def call(self, call: Call) -> asyncio.Future[Reply]:
            raise error(ErrorCode.WORKER_DIED)

    logged: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: logged.append(context["message"]))
    lives, other = FakeRank(), Dead() if is_dead else FakeRank()
    if is_dead:  # known only to the second one yet
        with pytest.raises(HetnodeError):
            RankChannels([lives, other]).call(Call("Any"))
    else:
        answer = asyncio.ensure_future(RankChannels([lives, other]).call(Call("Any")))
        await asyncio.sleep(0)
        answer.cancel()
        await asyncio.sleep(0)
        del answer
    lives.reply.set_exception(error(ErrorCode.RANK_FAILED))
    await asyncio.sleep(0)
    del lives.reply
    gc.collect()
    assert not logged
