"""Another transport is a package and a line: a swarm trains with the virtual one, without hivemind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from node.exchange.transport import transport_in_use
from node.ipc import modules

SCRIPT = """
import sys
from pathlib import Path
sys.modules["hivemind"] = sys.modules["node.exchange.hive"] = None  # whoever imports them fails
from tests.builders import spec_of
from tests.virtual.swarm import play
from protocol.types import Role

async def train(swarm):
    swarm.start()
    await swarm.until_over()
    swarm.assert_all_agree()
    print(swarm.committed())

members = {"a": Role.REPLICA, "b": Role.STAGE, "c": Role.STAGE}
play(train, spec_of(2, 1, 1, rounds=2), Path(sys.argv[1]), members)
"""


def test_a_swarm_trains_without_hivemind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[0] == "[1, 2]"


def test_one_line_names_the_transport(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "loopback").mkdir()
    (tmp_path / "loopback" / "transport.py").write_text("async def start(*_):\n    return 'loopback'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(modules, "TRANSPORT", "loopback")
    with pytest.raises(StopIteration) as started:
        transport_in_use().start(None, None).send(None)  # type: ignore[arg-type,attr-defined]
    assert started.value.value == "loopback"
