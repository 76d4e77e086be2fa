"""Nodes that start before their coordinator wait for it, and then train."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from node.ipc.template import ForkedProcess
from node.views import run_history
from protocol.errors import ExitCode
from tests.builders import spec_of
from tests.support.commands import hetnode, start
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.swarm

SPEC = spec_of(1, 2, rounds=100_000)  # the test ends it: a node that is slow to come is never too late


def test_nodes_that_start_first_wait_and_then_train(tmp_path: Path) -> None:
    run, spec, invite = tmp_path / "run", tmp_path / "run.toml", tmp_path / "invite"
    spec.write_text(SPEC.toml)
    ports = free_port(), free_port()
    processes: list[ForkedProcess] = []

    def coordinator() -> ForkedProcess:
        (run / "address").unlink(missing_ok=True)
        log = tmp_path / "coordinator.log"
        process = start(
            *("coordinator", "--config", str(spec), "--folder", str(run)),
            *("--listen", f"127.0.0.1:{ports[0]}", "--enrolment-port", str(ports[1])),
            log=log,
        )
        processes.append(process)
        wait_until((run / "address").exists, 60, lambda: log.read_text()[-3000:])
        return process

    def node(name: str, destination: tuple[str, ...]) -> ForkedProcess:
        process = start(
            *("join", *destination, "--identity", str(tmp_path / f"{name}.key"), "--no-measure"),
            *("--folder", str(tmp_path / name), "--threads", "1", "--role", "replica"),
            log=tmp_path / f"{name}.log",
        )
        processes.append(process)
        return process

    def wait_for(name: str, text: str, times: int = 1) -> None:
        log = tmp_path / f"{name}.log"
        wait_until(lambda: log.read_text().count(text) >= times, 60, lambda: log.read_text()[-3000:])

    def both_contribute() -> bool:
        events = run_history.read_events(run / "metrics.jsonl")
        return any(event["event"] == "decision" and len(event["owners"]) == 2 for event in events)

    newcomer = ("--invite-file", str(invite))
    try:
        first = coordinator()
        hetnode("invite", "create", "--uses", "2", "--folder", str(run), "--out", str(invite), check=True)
        a = node("a", newcomer)
        wait_for("a", "joined run")  # it keeps its certificate; the run waits for one more replica
        known = (next((tmp_path / "a.runs").iterdir()).name,)
        a.kill()
        a.wait(30)
        first.send_signal(signal.SIGINT)
        first.wait(60)

        early = {"a": node("a", known), "b": node("b", newcomer)}
        for name, process in early.items():
            wait_for(name, "waiting for the coordinator")
            process.send_signal(signal.SIGINT)
        assert [process.wait(30) for process in early.values()] == [ExitCode.INTERRUPTED] * 2
        a, b = node("a", known), node("b", newcomer)
        wait_for("a", "waiting for the coordinator", times=2)
        wait_for("b", "waiting for the coordinator", times=2)

        coordinator()
        wait_until(both_contribute, 120, lambda: (tmp_path / "coordinator.log").read_text()[-3000:])
        for name, process in (("a", a), ("b", b)):
            text = (tmp_path / f"{name}.log").read_text()
            assert process.poll() is None, text[-3000:]
            assert "the coordinator answers after" in text
    finally:
        for process in processes:
            process.kill()
            process.wait()
