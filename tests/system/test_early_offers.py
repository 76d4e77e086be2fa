"""Replicas that train one step, claim the weight of all of them and offer at once, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from coordinator.run.state.events import PayloadWithheld
from node.core.train.inner_phase import InnerLoop
from protocol.status import Measurement
from protocol.types import Role
from tests.virtual.network import current_machine
from tests.virtual.scenario import Play, contributions
from tests.virtual.swarm import VirtualSwarm

STEPS, ROUNDS = 8, 3
FIVE = dict.fromkeys("abcde", Role.REPLICA)
FOUR = dict.fromkeys("abcd", Role.REPLICA)
# If the window ran from the first offer, at 1 s, honest replicas would have too few steps at its end.
SHORT = {"inner.steps": STEPS, "inner.microbatches": 1}


@pytest.fixture
def offer_early(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let some nodes train one step and offer at once, from a round on."""

    def install(names: Collection[str], from_round: int = 1) -> None:
        train, end = InnerLoop.train, InnerLoop.end

        async def train_one(self: InnerLoop, ahead: int | None = None) -> None:
            is_early = current_machine() in names and self.round_number >= from_round
            await train(self, 1 if is_early else ahead)

        async def end_as_if_whole(self: InnerLoop) -> Measurement:
            measured = await end(self)
            return replace(measured, steps=STEPS) if current_machine() in names else measured

        monkeypatch.setattr(InnerLoop, "train", train_one)
        monkeypatch.setattr(InnerLoop, "end", end_as_if_whole)

    return install


@pytest.mark.parametrize(("members", "early"), [(FIVE, "de"), (FOUR, "d")], ids=["2 of 5", "1 of 4"])
def test_a_minority_that_offers_early_decides_no_round(
    play: Play, offer_early: Callable[..., None], members: dict[str, Role], early: str
) -> None:
    offer_early(early)
    swarm = play.to_the_end(None, members, ROUNDS, **SHORT)
    assert swarm.committed(0) == swarm.committed(1) == swarm.rounds
    for name in members.keys() - set(early):
        assert contributions(swarm, name) == swarm.rounds
        # Otherwise a round ended before the honest replicas had trained all steps.
        assert set(swarm.weights(name)) == {1.0}
    assert not swarm.happened(PayloadWithheld)


def test_a_peer_that_offers_far_too_early_waits_and_then_counts(
    play: Play, offer_early: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its phases took 8 s. So it may offer after 2 s, but not after 1 s."""

    async def watched(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        began = swarm.state.began_at
        await swarm.until(lambda state: bool(state.answered))
        assert 2 <= swarm.loop.time() - began < 4

    caplog.set_level("INFO")
    offer_early("d", from_round=3)
    swarm = play.to_the_end(watched, FOUR, ROUNDS, **SHORT)
    assert all(contributions(swarm, name) == swarm.rounds for name in FOUR)
    assert "offer-too-early" in caplog.text
