"""Helpers that failed are left out for some rounds."""

from __future__ import annotations

from node.transport.helpers import HelpFailures
from protocol.types import PeerId

LIAR, OTHER, ALICE, BOB, CAROL = map(PeerId, ("liar", "other", "alice", "bob", "carol"))


def test_a_helper_is_left_out_for_one_payload_and_after_two_owners_for_all() -> None:
    failures = HelpFailures()
    failures.note(1, [(LIAR, ALICE)])
    failures.note(2, [])
    assert failures.leave_out(LIAR, ALICE)
    assert not failures.leave_out(LIAR, CAROL), "alice may have sent it nothing"
    assert not failures.leave_out(OTHER, ALICE)
    failures.note(3, [(LIAR, BOB)])
    assert failures.leave_out(LIAR, CAROL)


def test_failures_are_forgotten() -> None:
    failures = HelpFailures()
    failures.note(1, [(LIAR, ALICE), (LIAR, BOB)])
    failures.note(17, [])
    assert failures.leave_out(LIAR, CAROL)
    failures.note(18, [])
    assert not failures.leave_out(LIAR, ALICE)
