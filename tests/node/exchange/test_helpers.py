"""How long helpers have, and for how many rounds those that failed are left out."""

from __future__ import annotations

import pytest

from node.exchange.helpers import Helpers, HelpFailures
from protocol.types import MemberLine, PeerId

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


@pytest.mark.parametrize(
    ("downlink", "gather", "seconds"),
    # The slowest uplink takes 50 s for its payload; it takes 100 s to receive two as slowly.
    [(10**7, 1000, 200), (0, 1000, 400), (10**7, 100, 50)],
)
async def test_helpers_have_a_multiple_of_the_schedule_or_half_of_the_time(
    downlink: int, gather: float, seconds: float
) -> None:
    lines = {LIAR: MemberLine(10**9, 10**9, True)}
    lines |= {peer: MemberLine(10**6, downlink, True) for peer in (ALICE, BOB)}
    helpers = Helpers(ALICE, "group", lines, gather, 50 * 10**6, HelpFailures())
    assert helpers.to_ask(BOB) == [LIAR]
    assert seconds - 5 < helpers.seconds_left <= seconds
    assert helpers.seconds_to_finish == pytest.approx(1.5 * seconds, abs=5)


async def test_a_helper_that_failed_is_asked_for_nothing_more() -> None:
    strong, home = MemberLine(10**9, 10**9, True), MemberLine(10**6, 10**7, True)
    lines = {LIAR: strong, OTHER: strong, ALICE: home, BOB: home, CAROL: home}
    failures = HelpFailures()
    helpers = Helpers(ALICE, "group", lines, 1000, 10**6, failures)
    first, second, *_ = helpers.to_supply()
    helpers.give_up(first)
    assert not helpers.is_usable(first)
    assert helpers.is_usable(second)
    failures.note(1, [(first, ALICE)])
    assert helpers.to_supply() == [second], "it does not get the payload first in the next rounds"
