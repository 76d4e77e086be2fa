"""Who uploads anchors, and which of them the store has."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.ops.objects.uploads import newest_parts, segment_key, uploader, whole_parts
from node.exchange.object_client import ObjectClient
from protocol.errors import ErrorCode
from protocol.types import Capacity, Estimates, Part, PeerId
from protocol.wire.object_calls import SEGMENT_BYTES, AskUploads, LendPart, LendSegment, WantedUpload
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import refusal_of, running
from tests.support.coordinator_run import play_round, started
from tests.support.object_store import LOCATION, object_store

A, B = keyed(0), keyed(1)
PART = WantedUpload(0, Part.STAGE, 4)


def test_the_fastest_uplink_among_the_holders_is_first() -> None:
    run = started(stages=2, recovery__checkpoint_every=2)
    play_round(run)
    assert newest_parts(run.state, ()) == {}
    for _ in range(3):
        play_round(run)
    parts = newest_parts(run.state, ())
    stages = {PART, WantedUpload(1, Part.STAGE, 4)}
    assert stages <= set(parts)
    assert parts[PART] == tuple(sorted((A.peer, B.peer)))
    for slow, fast in ((A, B), (B, A)):
        for peer, rate in ((slow, 1.0), (fast, 2.0)):
            estimates = Estimates(Capacity("cpu", 1, 1, uplink=rate))
            run.state = replace(run.state, estimates=run.state.estimates.set(peer.peer, estimates))
        assert newest_parts(run.state, ())[PART] == (fast.peer, slow.peer)
    assert PART not in newest_parts(run.state, {PART})


def test_who_does_not_finish_is_followed_by_the_next_holder() -> None:
    holders = (A.peer, B.peer)
    assert [uploader(holders, 100.0, 100.0 + at) for at in (0, 899, 900, 1800)] == [
        *(A.peer, A.peer),
        *(B.peer, A.peer),
    ]


@given(st.integers(1, 9), st.data())
def test_only_a_part_with_all_segments_of_one_member_counts(count: int, data: st.DataObject) -> None:
    keys = [segment_key("run", PART, PeerId("a"), each, count) for each in range(count)]
    others = [segment_key("run", PART, PeerId("b"), each, count + 1) for each in range(count)]
    foreign = "run/round-000004/anchors/x", "run/round-000004/anchors/000-copy/a/00000-00001", "run/anchors/"
    payload = ["run/round-000004/payloads/000/1", *foreign]
    assert whole_parts("run", data.draw(st.permutations([*keys, *others, *payload]))) == {PART: keys}
    gone = data.draw(st.integers(0, count - 1))
    assert whole_parts("run", [*keys[:gone], *keys[gone + 1 :], *others]) == {}


async def test_one_member_uploads_an_anchor_and_all_may_read_it(tmp_path: Path) -> None:
    spec, data = spec_of(stages=1, replicas=2, rounds=9, recovery__checkpoint_every=1), b"segment"
    sha256, wanted = hashlib.sha256(data).hexdigest(), WantedUpload(0, Part.STAGE, 1)
    segment = LendSegment(wanted, 0, 1, len(data), sha256)
    with object_store():
        async with running(spec, tmp_path, objects=LOCATION) as run:
            for peer in (A, B):
                await run.join(peer)
            assert await run.ask(AskUploads(), A) == ()
            await run.settle(0, 1, A, B)
            asked = list[Any]()
            while not any(asked):  # it is found out for all members now and then
                asked = [await run.ask(AskUploads(), peer) for peer in (A, B)]
                await asyncio.sleep(0.1)
            assert sorted(map(str, asked)) == sorted(map(str, [(), (wanted,)]))
            chosen, other = (A, B) if asked[0] else (B, A)
            assert await run.ask(segment, other) == ""
            wrong = [
                LendSegment(wanted, *each, sha256)
                for each in ((1, 1, 7), (0, 1, SEGMENT_BYTES + 1), (0, 99, 7))
            ]
            for call in wrong:
                assert (await refusal_of(run.ask(call, chosen))).code is ErrorCode.BAD_REQUEST
            url = await run.ask(segment, chosen)
            assert url
            await ObjectClient().put(url, data, sha256, 2)
        async with running(spec, tmp_path, objects=LOCATION) as run:  # it looks at the store when it starts
            for peer in (A, B):
                await run.join(peer)
            async with asyncio.timeout(60.0):
                # It looks at the store in the background.
                while not (urls := await run.ask(LendPart(wanted), other)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert await ObjectClient().get(urls[0], len(data), 2) == data
            assert await run.ask(AskUploads(), chosen) == ()
