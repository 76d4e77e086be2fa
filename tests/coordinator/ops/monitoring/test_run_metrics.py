"""The coordinator's metrics: what they show of a run, after a restart, and while clients are in the way."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import pytest

from coordinator.ops.monitoring.run_metrics import METRICS
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.server.metrics import SHARED
from protocol.types import Lifecycle, Role
from protocol.wire.operator_calls import BanPeer
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import Running, refusal_of, running
from tests.support.coordinator_run import play_round, started
from tests.support.ports import free_port
from tests.support.scrape import Scraped, scrape, scrape_until

A, B, C = (keyed(i) for i in range(3))
FREE = "127.0.0.1:0"


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


def measurement(number: int, **changes: object) -> pb.Measurement:
    fields = {
        "peer": A.peer,
        "round": number,
        "validation_loss": 5.5,
        "train_loss": 5.25,
        "tokens": 1000,
        "inner_seconds": 3.0,
        "outer_seconds": 2.0,
        "compute_seconds": 1.0,
        "link_bytes_sent": 11,
        "payload_bytes": 22,
        "complete": True,
    }
    return pb.Measurement(**(fields | changes))


async def measure_health(run: Running) -> None:
    """A and B measure round 1, and B the payload of A, which is the next one."""
    figures = {"stage": 0, "cosine": 0.25, "norm": 2.0, "mean_norm": 1.0, "alike": -0.5}
    agreements = [pb.PayloadAgreement(owner=A.peer, **figures)]
    await run.stub(A).Measure(measurement(1, progress_norm=1.0, error_norm=3.0))
    await run.stub(B).Measure(measurement(1, peer=B.peer, replica=1, agreements=agreements))


def assert_health(found: Scraped) -> None:
    """The health of round 1, of which B has measured the payload of A."""
    assert found("hetnode_health_round") == 1
    assert found("hetnode_payload_cosine", stage="0", statistic="median") == 0.25
    assert found("hetnode_payload_cosine", stage="0", statistic="min") == 0.25
    assert found("hetnode_payload_pair_cosine", stage="0", kinds="same") == -0.5
    assert found("hetnode_payload_norm", stage="0") == 2
    assert found("hetnode_committed_norm", stage="0") == 1
    assert found("hetnode_error_feedback_ratio") == 0.75
    assert found("hetnode_health_findings") == found("hetnode_training_alarm") == 0


async def test_every_declared_metric_is_shown_with_its_value(tmp_path: Path, address: str) -> None:
    spec = spec_of()
    began = time.time()
    async with running(spec, tmp_path, metrics=address) as run:
        gathering = await scrape(address)
        assert gathering("hetnode_run_phase", phase="gathering") == 1
        assert gathering("hetnode_run_stalled") == 1
        assert "hetnode_last_commit_timestamp_seconds" not in gathering.names
        await run.join(A)
        await run.join(B)
        await run.settle(0, 1, A, B)
        await run.settle(1, 1, A, B)
        await measure_health(run)
        await scrape_until(address, lambda page: "hetnode_payload_cosine" in page.names)
        await run.ask(BanPeer(C.peer))
        await refusal_of(run.stub(C).Join(pb.JoinRequest(peer=C.peer)))
        found = await scrape_until(address, lambda page: "hetnode_refusals_total" in page.names)
        assert {metric.name for metric in (*METRICS, *SHARED)} <= found.names
        assert found.labels_of("hetnode_run_info")[0].keys() == {"run", "spec", "version"}
        assert found("hetnode_run_phase", phase="training") == 1
        assert found("hetnode_run_phase", phase="gathering") == 0
        assert found("hetnode_run_rounds") == 3
        assert found("hetnode_rounds_decided_total") == 1
        assert found("hetnode_stage_rounds_committed_total") == 2
        assert found("hetnode_stage_rounds_aborted_total") == found("hetnode_rollbacks_total") == 0
        assert found("hetnode_tokens_committed_total") == 2 * spec.samples_per_round() * spec.model.context
        assert began - 1 < found("hetnode_last_commit_timestamp_seconds") <= time.time()
        assert began - 1 < found("hetnode_round_start_timestamp_seconds") <= time.time()
        assert found("hetnode_run_stalled") == 0
        assert found("hetnode_anchors_agree") == 1
        assert found("hetnode_peers", role="replica", lifecycle="training") == 2
        assert len(found.labels_of("hetnode_peers")) == len(Role) * len(Lifecycle)
        assert found("hetnode_peers_banned") == 1
        assert found("hetnode_peer_changes_total", change="joined") == 2
        assert found("hetnode_peer_changes_total", change="banned") == 1
        assert found("hetnode_peer_changes_total", change="lost") == 0
        assert found("hetnode_refusals_total", code="banned") == 1
        assert found("hetnode_replicas") == found("hetnode_replicas_complete") == 2
        assert found("hetnode_replica_members", replica="1") == 1
        assert found("hetnode_replica_round", replica="0") == 1
        assert found("hetnode_replica_validation_loss", replica="0") == 5.5
        assert found("hetnode_replica_train_loss", replica="0") == 5.25
        assert found("hetnode_replica_tokens_per_second", replica="0") == 200
        assert found("hetnode_replica_phase_seconds", replica="0", phase="outer") == 2
        assert found("hetnode_replica_link_bytes", replica="0") == 11
        assert found("hetnode_replica_payload_bytes", replica="0") == 22
        assert 0 < found("hetnode_round_seconds") < time.time() - began + 1
        assert_health(found)
        assert found("hetnode_event_log_bytes") > 1000
        assert found("hetnode_disk_free_bytes") > 0
        # No name of a peer is a label.
        assert not any(peer.peer.encode() in found.page for peer in (A, B, C))


async def test_figures_of_the_run_survive_a_restart(tmp_path: Path, address: str) -> None:
    async with running(spec_of(), tmp_path, metrics=address) as first:
        await first.join(A)
        await first.join(B)
        await first.settle(0, 1, A, B)
        before = await scrape(address)
        assert before("hetnode_round_seconds") > 0
    async with running(spec_of(), tmp_path, metrics=address):
        after = await scrape(address)
    totals = "hetnode_stage_rounds_committed_total", "hetnode_tokens_committed_total"
    for name in (*totals, "hetnode_round_seconds"):
        assert after(name) == before(name) > 0
    name = "hetnode_last_commit_timestamp_seconds"
    assert after(name) == pytest.approx(before(name), abs=0.5)


async def test_without_the_option_there_is_no_endpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(spec_of(), tmp_path):
        assert "/metrics" not in caplog.text


async def test_a_port_in_use_ends_the_start_before_anything_is_written(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(HetnodeError) as error:
            async with running(spec_of(), tmp_path / "run", metrics=taken):
                pass
    assert error.value.code is ErrorCode.PORT_IN_USE
    assert not (tmp_path / "run").exists()


async def test_tokens_count_the_part_of_a_phase_that_was_done() -> None:
    run = started(2)
    spec = run.spec
    whole = spec.samples_per_round() * spec.model.context
    play_round(run)
    assert run.state.tokens == 2 * whole
    play_round(run, done={1: 0.5})
    assert run.state.tokens == 3.5 * whole
