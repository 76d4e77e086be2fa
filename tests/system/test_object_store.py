"""Swarms of real processes with an object store: one that works, is silent for a while, and is back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.support.object_store import LOCATION, StoreProcess, object_store
from tests.support.processes import COORDINATOR, ProcessSwarm

NODES = {"a": Role.REPLICA, "b": Role.REPLICA, "c": Role.REPLICA}


def rounds_in(store: StoreProcess, stage: int) -> dict[int, int]:
    """How many payloads of `stage` the store has, by round."""
    found: dict[int, int] = {}
    for key in store.names():
        *_, number, kind, its_stage, _ = key.split("/")
        if (kind, its_stage) == ("payloads", f"{stage:03d}"):
            round_number = int(number.removeprefix("round-"))
            found[round_number] = found.get(round_number, 0) + 1
    return found


@pytest.mark.slow
@pytest.mark.swarm
def test_rounds_go_through_a_store_and_go_on_without_it(tmp_path: Path) -> None:
    spec = spec_of(2, 3, 0, rounds=100_000, inner__steps=10)
    with object_store() as store, ProcessSwarm(spec, tmp_path, NODES) as swarm:
        swarm.start_coordinator("--objects", LOCATION)
        for name in NODES:
            swarm.start_node(name)
        swarm.wait_round(5, 240)
        assert all(rounds_in(store, stage).get(4) == 3 for stage in range(2))
        store.process.send_signal(signal.SIGSTOP)  # it takes connections and never answers
        silent_from = swarm.round_number
        swarm.wait_round(silent_from + 4, 240)
        store.process.send_signal(signal.SIGCONT)
        swarm.wait_round(silent_from + 12, 240)
        assert max(rounds_in(store, 0)) > silent_from + 4
        # The coordinator looks for old objects every half minute.
        swarm.wait_until(lambda: min(rounds_in(store, 0)) > 1, 240, "that old objects are removed")
        last = swarm.round_number + 5
        swarm.ask("run", "change", str(swarm.run), "--set", f"rounds={last}")
        swarm.wait_over(240)
        assert all(each["committed"] for each in swarm.decisions())
        assert swarm.anchors("a", last) == swarm.anchors("b", last) == swarm.anchors("c", last)
        for name in (COORDINATOR, *NODES):
            assert "X-Amz" not in swarm.log(name)
            assert "the-secret-of-a-key" not in swarm.log(name)
        assert "; peers are asked instead" in "".join(map(swarm.log, NODES))
