"""Real processes whose payloads pass through one fast uplink, and a round in which that helper fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.run.state.apply import replay
from coordinator.run.state.events import GroupClosed
from coordinator.run.state.state import State
from coordinator.store.log_copy import read_copy
from protocol.math.gathering import schedule_of
from protocol.types import Role
from tests.builders import spec_of
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.processes import ProcessSwarm

pytestmark = pytest.mark.swarm

MEMBERS = {"alice": Role.REPLICA, "bob": Role.REPLICA, "strong": Role.REPLICA}
ROUNDS = 6


class UnequalLines(ProcessSwarm):
    """`strong` sends a hundred times as fast as the others."""

    def network_options(self, name: str) -> Sequence[str]:
        limit = "800" if name == "strong" else "8"
        return (*super().network_options(name), "--upload-limit", limit)


def helped_rounds(swarm: ProcessSwarm) -> dict[int, set[str]]:
    """The rounds whose group has helpers, with the names of these."""
    spec, log = read_copy(swarm.run)
    names = {swarm.peer(name): name for name in swarm.members}
    state, found = State(spec, swarm.run_id), dict[int, set[str]]()
    for event in log:
        state = replay(state, [event])
        if not isinstance(event, GroupClosed):
            continue
        group = state.round_of(event.stage, event.round_number).group
        assert group is not None
        lines = dict(zip((each.owner for each in group.descriptors), group.lines, strict=False))
        schedule = schedule_of(group.group_id, lines)
        if schedule is not None:
            helpers = {names[helper] for owner in schedule.members for helper in schedule.helpers(owner)}
            found.setdefault(event.round_number, set()).update(helpers)
    return found


@pytest.mark.slow  # tests/virtual/test_exchange.py plays the same faults in an exchange without a coordinator
def test_a_round_is_committed_while_its_helper_is_killed(tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "faults")
    plan.fail_at("strong", 0, 3, Moment.SENDING, Action.KILL)
    spec = spec_of(2, 3, rounds=ROUNDS, recovery__checkpoint_every=2)
    with UnequalLines(spec, tmp_path, MEMBERS, plan) as swarm:
        swarm.start()
        swarm.keep_running_to_the_end()
        swarm.assert_all_agree()
        plan.assert_all_fired()
        helped = helped_rounds(swarm)
        assert "strong" in helped[3]
        everybody = set(range(1, ROUNDS + 1))
        assert swarm.contributions("alice") == swarm.contributions("bob") == everybody
