"""Owners of peers: the first stays, and credit is counted once, whatever peers and owners sign."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.membership.owners import MOST_OWNERS
from coordinator.ops.incident.redaction import redacted_log
from coordinator.run.state.commands import BindOwner
from coordinator.run.state.events import OwnerBound
from coordinator.status.messages import event_message
from coordinator.store.event_codec import decode, encode
from coordinator.store.history_answers import CreditOrder, Page
from protocol.errors import ErrorCode
from protocol.trust.owner import OwnerKey
from protocol.trust.owner_binding import OwnerBinding
from tests.builders import Keyed, keyed
from tests.support.coordinator_run import Run, play_rounds, started_and_attested
from tests.support.history import stored, write_history

A, B, C, STRANGER = (keyed(i) for i in (0, 1, 2, 9))
ADA, EVE = OwnerKey(b"a" * 16), OwnerKey(b"e" * 16)


@pytest.fixture
def run() -> Run:
    return started_and_attested(3)


def bound(run: Run, key: OwnerKey, peer: Keyed, former: OwnerKey | None = None) -> BindOwner:
    return BindOwner(key.bind(run.state.run, peer.peer, peer.sign, former))


def test_a_binding_is_in_the_log_once_with_both_signatures(run: Run) -> None:
    (event,) = run.accept(bound(run, ADA, A))
    assert isinstance(event, OwnerBound)
    assert decode(*encode(event)) == event
    assert event_message(event).endswith(f"is a node of the owner ..{ADA.owner[-8:]}")
    assert run.accept(bound(run, ADA, A)) == ()
    assert dict(run.state.owners) == {A.peer: (ADA.owner,)}


def test_the_first_owner_stays_unless_it_lets_the_node_go(run: Run) -> None:
    run.accept(bound(run, ADA, A))
    assert ADA.owner in str(run.refuse(bound(run, EVE, A), ErrorCode.BAD_REQUEST))
    run.refuse(bound(run, EVE, A, former=EVE), ErrorCode.BAD_REQUEST)
    run.accept(bound(run, EVE, A, former=ADA))
    assert run.state.owners[A.peer] == (ADA.owner, EVE.owner)
    run.refuse(bound(run, ADA, A), ErrorCode.BAD_REQUEST)  # a replay of the first binding


def test_a_peer_cannot_fill_the_log_by_going_to_and_fro(run: Run) -> None:
    keys = [OwnerKey(bytes([i] * 16)) for i in range(MOST_OWNERS + 1)]
    run.accept(bound(run, keys[0], A))
    for i in range(1, MOST_OWNERS):
        run.accept(bound(run, keys[i], A, former=keys[i - 1]))
    assert "4 owners" in str(run.refuse(bound(run, keys[-1], A, former=keys[-2]), ErrorCode.BAD_REQUEST))


def test_what_is_not_signed_by_both_for_this_run_is_refused(run: Run) -> None:
    good = bound(run, ADA, A).binding
    for bad in (
        replace(good, peer=B.peer),
        replace(good, owner=EVE.owner),
        replace(good, peer_signature=b""),
        ADA.bind("another run", A.peer, A.sign),
        ADA.bind(run.state.run, B.peer, A.sign),
        bound(run, ADA, STRANGER).binding,
        OwnerBinding(A.peer, A.peer, b"", b""),
    ):
        run.refuse(BindOwner(bad), ErrorCode.BAD_REQUEST)
    assert not run.state.owners


def test_credit_is_summed_by_owner_and_no_token_counts_twice(run: Run, tmp_path: Path) -> None:
    run.accept(bound(run, ADA, A))
    play_rounds(run)
    run.accept(bound(run, ADA, B))
    run.accept(bound(run, EVE, A, former=ADA))  # its past goes with it
    run.accept(bound(run, ADA, C))
    history = write_history(tmp_path / "history.sqlite", run.spec, stored(run.events))
    found = history.credits()
    of = {each.owner: each for each in found.credits}
    assert (found.peers, found.owners) == (3, 2)
    assert {owner: each.nodes for owner, each in of.items()} == {ADA.owner: 2, EVE.owner: 1}
    assert sum(each.stage_tokens for each in found.credits) == found.stage_tokens
    assert of[ADA.owner].stage_tokens == 2 * of[EVE.owner].stage_tokens > 0
    assert sum(each.payload_bytes for each in found.credits) == found.payload_bytes
    assert found.credits[0].owner == ADA.owner
    assert found.credits[0].first_round == found.credits[0].last_round == 1
    credit = history.credit(B.peer)[2]
    assert credit is not None
    assert credit.nodes == 1, "that of the peer alone"
    assert history.summed(credit) == of[ADA.owner]
    assert [history.rank(each) for each in found.credits] == [(1, 2), (2, 2)]
    for order in CreditOrder:
        pages = [history.credits(order, Page(skip, 1)).credits for skip in (0, 1, 2)]
        assert [len(page) for page in pages] == [1, 1, 0]
    for text in (ADA.owner, B.peer):
        assert history.credits(find=text).credits == (of[ADA.owner],)


def test_without_owners_each_peer_stands_for_itself(run: Run, tmp_path: Path) -> None:
    play_rounds(run)
    found = write_history(tmp_path / "history.sqlite", run.spec, stored(run.events)).credits()
    assert (found.peers, found.owners) == (3, 3)
    assert {(each.owner, each.nodes) for each in found.credits} == {("", 1)}


def test_a_report_for_developers_names_no_owner_and_keeps_whose_is_whose(run: Run) -> None:
    run.accept(bound(run, ADA, A))
    run.accept(bound(run, ADA, B))
    first, second = (each for each in redacted_log(run.events) if isinstance(each, OwnerBound))
    assert first.binding.owner == second.binding.owner != ADA.owner
    assert first.binding.peer != second.binding.peer
    assert not first.binding.owner_signature
