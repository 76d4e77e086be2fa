"""Peers that train nothing, claim the weight of a whole phase and offer at once to a real coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.coordinator import coordinator, join_all
from tests.hostile.measure import unharmed
from tests.hostile.peer import Peer, cancel

pytestmark = pytest.mark.hostile

ROUNDS, PHASE_SECONDS = 3, 6.5
"""A phase takes longer than LEAST_WINDOW_SECONDS: a window from the first offer would be over by then."""


async def takes_part(peer: Peer, seconds: float) -> list[Any]:
    """Take part in all rounds. Offer in each one after `seconds` of training. Returns the decisions."""
    await peer.first_plan()
    await peer.attest(0, 0)
    decisions = []
    for number in range(1, ROUNDS + 1):
        await asyncio.sleep(seconds)
        decisions += await peer.round([0], number)
    return decisions


@pytest.mark.parametrize(("count", "early"), [(5, 2), (4, 1)], ids=["2 of 5", "1 of 4"])
async def test_a_minority_that_offers_at_once_decides_and_aborts_no_round(
    tmp_path: Path, count: int, early: int
) -> None:
    options = ("--rounds", str(ROUNDS), "--stages", "1", "--replicas", str(count), "--pipelines", "0")
    with coordinator(tmp_path, *options) as run:
        peers = await join_all(run, [Peer() for _ in range(count)])
        alive = [asyncio.create_task(peer.keep_alive(1.0)) for peer in peers]
        with unharmed(run) as watch:
            taking_part = [takes_part(peer, 0.0) for peer in peers[:early]]
            taking_part += [takes_part(peer, PHASE_SECONDS) for peer in peers[early:]]
            found = await asyncio.gather(*taking_part)
        honest = {peer.id for peer in peers[early:]}
        for decision in found[-1]:
            assert honest <= {entry.descriptor.owner for entry in decision.entries}
        print(watch.report())
        await cancel(*alive)
        for peer in peers:
            await peer.close()
