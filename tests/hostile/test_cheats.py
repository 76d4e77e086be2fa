"""Two of eight contributors cheat: what that costs, by the production code, beside the honest six alone.

``pytest -m hostile -s tests/hostile/test_cheats.py`` prints a line of the table of docs/findings.md for each
kind; one run has real processes. HETNODE_CHEATS_SEED chooses another seed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from coordinator.run.state.events import PeerWeighed
from protocol.types import Role
from tests.support.cheats import CHEATS, HONEST_ROUNDS, CheatPlan, cheat
from tests.support.faults import FaultPlan
from tests.support.processes import ProcessSwarm
from tests.virtual.network import current_machine
from tests.virtual.scenario import SPARSE, Play, contributions, swarm_spec
from tests.virtual.swarm import VirtualSwarm

HONEST, LIARS, ROUNDS = "abcdef", "gh", 20
SETTINGS = {
    **SPARSE,
    "seed": int(os.environ.get("HETNODE_CHEATS_SEED", "1")),
    "inner.steps": 6,
    "inner.microbatches": 1,
    "inner.warmup_steps": 12,
    "data.validation_batches": 8,
}


def played(folder: Path, kinds: Mapping[str, str], names: str, merge: str) -> VirtualSwarm:
    plan, members = FaultPlan(folder / "faults"), dict.fromkeys(names, Role.REPLICA)
    with pytest.MonkeyPatch.context() as patch:
        cheat(patch, kinds, current_machine)
        settings = {**SETTINGS, "outer.clip": 1.0, "outer.merge": merge}
        return Play(folder / "swarm", plan).to_the_end(None, members, ROUNDS, **settings)


def loss(swarm: VirtualSwarm) -> float:
    """The mean validation loss of the honest members after the last round."""
    return fmean(swarm.measured()[name, ROUNDS]["validation_loss"] for name in HONEST)


@cache
def alone(folder: Path, merge: str) -> float:
    return loss(played(folder / f"alone-{merge}", {}, HONEST, merge))


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("kind", "merge"),
    [*((kind, "mean") for kind in CHEATS), *((kind, "radial") for kind in ("flip", "scale", "adaptive"))],
)
def test_two_cheats_of_eight(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, kind: str, merge: str
) -> None:
    expected = alone(tmp_path_factory.getbasetemp(), merge)
    swarm = played(tmp_path, dict.fromkeys(LIARS, kind), HONEST + LIARS, merge)
    names = {swarm.peer(name): name for name in HONEST + LIARS}
    fell = {names[each.peer]: each.round_number for each in swarm.happened(PeerWeighed) if not each.counts}
    ends = {name: max(contributions(swarm, name)) for name in LIARS}
    cost = loss(swarm) / expected - 1
    print(f"| {kind}, {merge} | {loss(swarm):.3f} | {100 * cost:+.1f} % | {sorted(ends.values())} |")
    assert not fell.keys() & set(HONEST)
    assert max(ends.values()) <= HONEST_ROUNDS + (2 if kind == "adaptive" else 0)
    assert cost < 0.01


def real_loss(folder: Path, names: str, kinds: Mapping[str, str]) -> tuple[float, dict[str, set[int]]]:
    """The mean validation loss of the honest nodes of real processes, and the rounds in which each counts."""
    members = dict.fromkeys(names, Role.REPLICA)
    spec = swarm_spec(members, ROUNDS, **SETTINGS, **{"outer.clip": 1.0, "data.source": "builtin"})
    with ProcessSwarm(spec, folder, members, CheatPlan(folder / "faults", kinds)) as swarm:
        swarm.start()
        swarm.keep_running_to_the_end(stall_seconds=300)
        swarm.assert_all_agree(*HONEST)
        honest = {swarm.peer(name) for name in HONEST}
        losses = [
            each["validation_loss"]
            for each in swarm.events("measurement")
            if each["round"] == ROUNDS and each["peer"] in honest
        ]
        assert len(losses) == len(HONEST)
        return fmean(losses), {name: swarm.contributions(name) for name in names}


@pytest.mark.hostile
@pytest.mark.timeout(1800)
def test_two_real_processes_of_eight_cheat(tmp_path: Path) -> None:
    expected, _ = real_loss(tmp_path / "alone", HONEST, {})
    found, counted = real_loss(tmp_path / "eight", HONEST + LIARS, {"g": "altered", "h": "adaptive"})
    ends = {name: max(counted[name]) for name in LIARS}
    print(f"| real | {found:.3f} | {100 * (found / expected - 1):+.1f} % | {ends} |")
    assert all(len(counted[name]) == ROUNDS for name in HONEST)
    assert max(ends.values()) <= HONEST_ROUNDS + 2
    assert found / expected < 1.01
