"""A signature for one run is not valid in another run of the same specification."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature

from tests.builders import spec_of
from tests.hostile import wire
from tests.hostile.peer import Peer, Refused, join_all
from tests.hostile.wire import Identity
from tests.support.processes import COORDINATOR, ProcessSwarm

SPEC = spec_of(1, 2, rounds=4)


async def enter(run: ProcessSwarm, *identities: Identity) -> list[Peer]:
    """Start the coordinator, and let the peers join."""
    run.start_coordinator()
    peers = await join_all(run.invite(), map(Peer, identities))
    await asyncio.gather(*(peer.first_plan() for peer in peers))
    return peers


async def test_a_payload_of_one_run_is_no_evidence_in_another(tmp_path: Path) -> None:
    identities = Identity(), Identity()
    runs = [ProcessSwarm(SPEC, tmp_path / name, {}) for name in ("a", "b")]
    with runs[0] as first, runs[1] as second:
        old, new = await enter(first, *identities), await enter(second, *identities)
        assert old[0].spec_hash == new[0].spec_hash
        assert old[0].run != new[0].run
        attacker = new[1]
        # The same peers, plan, stage, round and anchor, and other bytes.
        replayed = old[0].descriptor(0, 1, b"of the first run")
        offers = [peer.descriptor(0, 1) for peer in new]
        await asyncio.gather(*(peer.offer(offer) for peer, offer in zip(new, offers, strict=True)))
        for shown in (replayed, renamed(replayed, attacker.run)):
            with pytest.raises(Refused) as refused:
                await attacker.call("Report", stage=0, round=1, held=[shown, offers[1]])
            assert refused.value.code == "bad-request"
        decisions = await asyncio.gather(
            *(peer.call("Report", stage=0, round=1, held=offers) for peer in new)
        )
        assert all(len(decision.entries) == 2 for decision in decisions)
        assert "STRIKE" not in second.log(COORDINATOR)
        for peer in (*old, *new):
            await peer.close()


async def test_a_plan_of_one_run_is_not_signed_for_another(tmp_path: Path) -> None:
    with ProcessSwarm(SPEC, tmp_path, {}) as run:
        peers = await enter(run, Identity(), Identity())
        update = await anext(update async for update, plan in peers[0].updates() if plan is not None)
        other = wire.run_id("nano", peers[0].spec_hash, bytes(32))
        with pytest.raises(InvalidSignature):
            wire.verify(peers[0].coordinator, wire.plan(other, update.signed_plan), update.signature)
        for peer in peers:
            await peer.close()


def renamed(descriptor: object, run: str) -> object:
    """The same signature under the name of another run."""
    changed = type(descriptor)()
    changed.CopyFrom(descriptor)  # type: ignore[attr-defined]
    changed.run = run  # type: ignore[attr-defined]
    return changed
