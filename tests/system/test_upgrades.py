"""A swarm that trains goes on while its coordinator and nodes get another version, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.support import commands
from tests.support.paths import ROOT
from tests.support.processes import COORDINATOR, ProcessSwarm

OLDER = "1d57096a"
"""A commit of the day before standbys, repairs, changes and mixtures came; it speaks the same protocol."""
NODES = {"a": Role.REPLICA, "b": Role.STAGE, "c": Role.STAGE}


@pytest.fixture(scope="module")
def older_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of OLDER."""
    folder = tmp_path_factory.mktemp("older")
    archive = subprocess.run(["git", "-C", ROOT, "archive", OLDER], check=False, capture_output=True)
    if archive.returncode:
        pytest.skip(f"this checkout does not have the commit {OLDER}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    command = ["env", f"PYTHONPATH={folder}", sys.executable, "-P", "-c", "import node; print(node.__file__)"]
    assert Path(subprocess.check_output(command, text=True).strip()).is_relative_to(folder)
    return folder


class Upgraded(ProcessSwarm):
    """A swarm whose processes run the source in `older`, but for those in `upgraded`."""

    older: Path
    upgraded: frozenset[str] = frozenset()

    def host_command(self, name: str) -> list[str]:
        return [] if name in self.upgraded else ["env", f"PYTHONPATH={self.older}"]

    def upgrade(self, name: str) -> None:
        """End a process in order, and start it again with the present source."""
        process, tree = self.started[name].process, self.started[name].tree()
        process.terminate()
        process.wait(150)  # a node finishes its round, in at most 120 s
        assert not psutil.wait_procs(tree, 20)[1], f"processes that outlived {name}"
        self.upgraded |= {name}
        if name == COORDINATOR:
            self.start_coordinator()
        else:
            self.start_node(name)

    def wait_payloads(self, seconds: float, *names: str) -> None:
        """Wait until payloads of all these nodes count in rounds that begin after this call."""
        now = self.round_number + 1

        def count() -> bool:
            return all(max(self.contributions(name), default=0) > now for name in names)

        self.wait_until(count, seconds, f"payloads of {names} after round {now}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [(COORDINATOR, *NODES), (*NODES, COORDINATOR)], ids=["coordinator", "nodes"]
)
def test_no_round_is_lost_but_those_that_were_open(
    tmp_path: Path, older_tree: Path, order: tuple[str, ...]
) -> None:
    spec = spec_of(2, 1, 1, rounds=2000, inner__steps=10, recovery__checkpoint_every=2)
    with Upgraded(spec, tmp_path, NODES) as swarm:
        swarm.older = older_tree
        swarm.start()
        swarm.wait_round(2, 240)
        for name in order:
            swarm.upgrade(name)
            swarm.wait_payloads(240, *([name] if name in NODES else NODES))
        last = swarm.round_number + 8
        done = commands.hetnode("run", "change", str(swarm.run), "--set", f"rounds={last}")
        assert done.returncode == 0, done.stderr
        swarm.wait_over(240)
        decisions = swarm.decisions()
        keys = [(each["round"], each["stage"]) for each in decisions]
        assert len(keys) == len(set(keys)) == last * spec.swarm.stages, "each is decided once"
        lost = {each["round"] for each in decisions if not each["owners"]}
        assert len(lost) <= len(order)
        assert not swarm.events("diverged")
        anchors = {stage: set[str]() for stage in range(spec.swarm.stages)}
        for name in NODES:
            for stage, digest in swarm.anchors(name, last).items():
                anchors[stage].add(digest)
        assert all(len(each) == 1 for each in anchors.values()), anchors
