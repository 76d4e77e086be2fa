"""What members that report by positions learn of a decision."""

from __future__ import annotations

import pytest

from coordinator.api.round_messages import Held, RoundMessages
from node.net.group_reports import GroupReports
from protocol.types import Aborted, Decision, ExchangeGroup, RolledBack
from protocol.wire.groups import group_digest, positions_of
from tests.builders import keyed, spec_of

PEERS = sorted((keyed(i) for i in range(2)), key=lambda each: each.peer)
GROUP = ExchangeGroup("group", tuple(each.payload(spec_of(), 0, 5) for each in PEERS))


@pytest.mark.parametrize("decision", [Aborted(0, 5, 1, "why"), RolledBack(0, 5, 1, "why", 2)])
def test_a_member_that_holds_all_learns_of_an_abort_and_of_a_rollback(decision: Decision) -> None:
    reports = GroupReports(PEERS[0].peer)
    reports.note(GROUP.descriptors[0], GROUP)
    positions = positions_of(GROUP.descriptors, GROUP.descriptors)
    assert positions is not None
    held = Held(GROUP.descriptors, group_digest(GROUP.descriptors), positions)
    answer = RoundMessages().of_decision(decision, True, held)
    assert reports.decision_of(answer, 0, 5) == decision
