"""A real Prometheus reads a swarm of real processes, while 200 slow clients hold on to every endpoint."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.trust.host_port import split_host_port
from protocol.types import Role
from tests.builders import spec_of
from tests.support.commands import hetnode
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.processes import COORDINATOR, ProcessSwarm
from tests.support.scrape import get
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.swarm,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="needs Debian's package prometheus (apt-get install prometheus)",
    ),
]

NODES = {"full": Role.REPLICA, "lower": Role.STAGE, "upper": Role.STAGE}


class MonitoredSwarm(ProcessSwarm):
    """Every process serves its metrics."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.endpoints = {name: f"127.0.0.1:{free_port()}" for name in (COORDINATOR, *self.members)}

    def network_options(self, name: str) -> Sequence[str]:
        return (*super().network_options(name), "--metrics", self.endpoints[name])


class Prometheus:
    """Scrapes the endpoints of a swarm every second, and evaluates the alert rules."""

    def __init__(self, folder: Path, endpoints: dict[str, str]) -> None:
        folder.mkdir()
        self.address, self._log = f"127.0.0.1:{free_port()}", folder / "log"
        targets = [
            {"targets": [address], "labels": {"instance": name}} for name, address in endpoints.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "docs" / "monitoring" / "alerts.yml")],
            "scrape_configs": [{"job_name": "hetnode", "static_configs": targets}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # every JSON file is YAML
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.address}",
                ],
                stdout=log,
                stderr=log,
            )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> dict[str, float]:
        """The newest value of each series by its instance; nothing before the first scrape."""
        target = f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            status, body = get(self.address, target)
        except OSError:
            return {}
        if status != 200:
            return {}
        found = json.loads(body)["data"]["result"]
        return {each["metric"].get("instance", ""): float(each["value"][1]) for each in found}

    def wait_for(self, expression: str, instances: set[str], seconds: float = 120) -> dict[str, float]:
        """Wait until the expression holds for exactly these instances."""
        wait_until(
            lambda: set(self.query(expression)) == instances,
            seconds,
            lambda: f"{expression} gives {self.query(expression)}\n{self._log.read_text()[-2000:]}",
        )
        return self.query(expression)


@contextmanager
def scraped(swarm: MonitoredSwarm, folder: Path) -> Iterator[Prometheus]:
    prometheus = Prometheus(folder, swarm.endpoints)
    try:
        yield prometheus
    finally:
        prometheus.end()


def lint(address: str) -> str:
    """What promtool says about the page."""
    status, page = get(address)
    assert status == 200
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    return (done.stdout + done.stderr).decode()


def test_prometheus_reads_a_swarm_and_sees_what_happens_to_it(tmp_path: Path) -> None:
    spec = spec_of(2, 1, 1, rounds=1000, timing__lost_after=6.0)
    everyone = {COORDINATOR, *NODES}
    with ExitStack() as stack:
        swarm = stack.enter_context(MonitoredSwarm(spec, tmp_path / "swarm", NODES))
        prometheus = stack.enter_context(scraped(swarm, tmp_path / "prometheus"))
        swarm.start_coordinator("--metrics", swarm.endpoints[COORDINATOR])
        for name in NODES:
            swarm.start_node(name)
        prometheus.wait_for("up == 1", everyone)
        prometheus.wait_for("hetnode_node_rounds_total >= 1", set(NODES))
        for address in swarm.endpoints.values():
            assert lint(address) == ""

        # Slow clients and garbage at every endpoint: neither the run nor Prometheus notices.
        for address in swarm.endpoints.values():
            for i in range(200):
                client = stack.enter_context(socket.create_connection(split_host_port(address)))
                client.sendall(b"GET /metrics HT" if i % 2 else b"\x16\x03\x01 garbage\xff")
        before = prometheus.query("hetnode_stage_rounds_committed_total")[COORDINATOR]
        more = f"hetnode_stage_rounds_committed_total >= {before + 6}"
        prometheus.wait_for(more, {COORDINATOR})
        assert prometheus.query("min_over_time(up[3s]) == 1").keys() == everyone

        # The figures of both sides belong together.
        assert prometheus.query('hetnode_node_activity{activity="training"} == 1').keys() == set(NODES)
        assert prometheus.query("hetnode_node_coordinator_connected == 1").keys() == set(NODES)
        assert prometheus.query("hetnode_node_device_memory_bytes > 1e6").keys() == set(NODES)
        assert prometheus.query("hetnode_node_tokens_total > 0").keys() == set(NODES)
        for figure in ("link_sent_bytes", "link_received_bytes"):
            assert prometheus.query(f"hetnode_node_{figure}_total > 0").keys() == {"lower", "upper"}
        assert prometheus.query("hetnode_tokens_committed_total > 0").keys() == {COORDINATOR}
        loss = prometheus.query("max by (instance) (hetnode_replica_validation_loss)")[COORDINATOR]
        assert 0 < loss < 10
        waited = prometheus.query('hetnode_node_waiting_seconds_total{cause="neighbour"} > 0')
        assert waited.keys() == {"lower", "upper"}
        assert not prometheus.query('ALERTS{alertstate="firing"}')

        swarm.kill("upper")
        prometheus.wait_for("up == 0", {"upper"})
        prometheus.wait_for('hetnode_peer_changes_total{change="lost"} == 1', {COORDINATOR})
        prometheus.wait_for("hetnode_replicas_complete == 1", {COORDINATOR})
        prometheus.wait_for('hetnode_node_activity{activity="following"} == 1', {"lower"})
        swarm.start_node("upper")
        prometheus.wait_for("hetnode_replicas_complete == 2", {COORDINATOR})
        prometheus.wait_for('hetnode_node_activity{activity="training"} == 1', set(NODES))

        # A paused node shows that it rests, and says nothing of its coordinator.
        hetnode("pause", str(swarm.folder / "full"), check=True)
        prometheus.wait_for('hetnode_node_activity{activity="resting"} == 1', {"full"})
        prometheus.wait_for("hetnode_node_coordinator_connected", {"lower", "upper"})
        hetnode("resume", str(swarm.folder / "full"), check=True)
        prometheus.wait_for('hetnode_node_activity{activity="training"} == 1', set(NODES))

        # Nodes show that their coordinator is away; its totals go on after its restart.
        swarm.kill(COORDINATOR)
        prometheus.wait_for("hetnode_node_coordinator_connected == 0", set(NODES))
        total = prometheus.query("last_over_time(hetnode_tokens_committed_total[10m])")[COORDINATOR]
        swarm.start_coordinator("--metrics", swarm.endpoints[COORDINATOR])
        prometheus.wait_for("hetnode_node_coordinator_connected == 1", set(NODES))
        prometheus.wait_for(f"hetnode_tokens_committed_total >= {total}", {COORDINATOR})
