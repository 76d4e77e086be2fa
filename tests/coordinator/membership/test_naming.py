"""Public names: a peer chooses its own, and the operator can take it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.run.state.commands import Leave, Unname
from coordinator.run.state.events import PeerJoined, PeerNamed
from coordinator.status.messages import event_message
from coordinator.status.run_status import run_status
from protocol.errors import ErrorCode
from protocol.types import PeerId
from tests.builders import keyed, spec_of
from tests.support.coordinator_run import Run

A, B = keyed(0), keyed(1)


@pytest.fixture
def run() -> Run:
    return Run(spec_of())


def join(run: Run, name: str = "") -> tuple[type, ...]:
    """The kinds of events of a join of A, after it has left."""
    if A.peer in run.state.peers:
        run.accept(Leave(A.peer, "r"))
    return tuple(map(type, run.accept(replace(A.join(run.spec), name=name))))


def test_a_peer_without_a_name_writes_nothing_about_it(run: Run) -> None:
    assert join(run) == (PeerJoined,)
    assert run.state.name_of(A.peer) == ""


def test_a_name_lasts_until_the_peer_chooses_another_or_none(run: Run) -> None:
    assert join(run, "Ada") == (PeerJoined, PeerNamed)
    run.accept(Leave(A.peer, "r"))
    assert run.state.name_of(A.peer) == "Ada"
    assert join(run, "Ada") == (PeerJoined,)
    assert join(run, "Eve") == (PeerJoined, PeerNamed)
    assert run.state.name_of(A.peer) == "Eve"
    assert join(run) == (PeerJoined, PeerNamed)
    assert run.state.name_of(A.peer) == ""


def test_a_join_whose_answer_was_lost_may_bring_another_name(run: Run) -> None:
    join(run, "Ada")
    assert run.accept(replace(A.join(run.spec), name="Ada")) == ()
    assert run.accept(replace(A.join(run.spec), name="Eve")) == (PeerNamed(run.now, A.peer, "Eve"),)


def test_two_peers_may_have_one_name(run: Run) -> None:
    run.accept(replace(A.join(run.spec), name="Ada"))
    run.accept(replace(B.join(run.spec), name="Ada"))
    assert [peer.name for peer in run_status(run.state, (), run.now, 0.0).peers] == ["Ada", "Ada"]


@pytest.mark.parametrize("name", ["x" * 33, "<b>", "Jose\u0301", "A\u202eda"])
def test_a_bad_name_is_refused_before_the_peer_is_let_in(run: Run, name: str) -> None:
    run.refuse(replace(A.join(run.spec), name=name), ErrorCode.BAD_REQUEST)
    assert not run.events


def test_a_name_that_the_operator_takes_stays_away_until_one_is_allowed(run: Run) -> None:
    join(run, "Ada")
    run.accept(Unname(A.peer))
    assert run.accept(Unname(A.peer)) == ()
    assert run.state.name_of(A.peer) == ""
    assert join(run, "Ada") == (PeerJoined,)
    assert join(run, "Eve") == (PeerJoined,)
    assert run.state.name_of(A.peer) == ""
    run.accept(Unname(A.peer, allow=True))
    assert run.accept(Unname(A.peer, allow=True)) == ()
    assert run.state.name_of(A.peer) == ""
    join(run, "Ada")
    assert run.state.name_of(A.peer) == "Ada"


def test_only_a_peer_of_the_run_loses_its_name(run: Run) -> None:
    run.refuse(Unname(B.peer), ErrorCode.UNKNOWN_PEER)
    run.refuse(Unname(PeerId("nobody")), ErrorCode.BAD_REQUEST)


def test_a_log_line_shows_a_name_as_text() -> None:
    hostile = PeerNamed(0.0, A.peer, "\x1b[31m" + "x" * 10**5)
    assert event_message(hostile) == f"..{A.peer[-8:]} is called ?[31m{'x' * 27}"
    assert event_message(PeerNamed(0.0, A.peer, "")).endswith("has no public name any more")
    assert event_message(PeerNamed(0.0, A.peer, "", refused=True)).endswith("may have no public name")
