"""``hetnode doctor``: what it looks at, what it says to do, and that it leaves the run alone."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from coordinator.api.public_ports import RelayOptions
from coordinator.placement.cost_model import memory_needed
from node.cli import doctor, doctor_checks
from node.cli.doctor import examine, findings_view
from node.cli.doctor_checks import (
    CheckResult,
    NodeSettings,
    Severity,
    check_certificate,
    check_disk,
    check_listening,
    check_memory,
)
from node.cli.doctor_reach import check_reach
from node.cli.main import app
from node.net.coordinator_channel import fetch_status
from node.net.link_server import LinkServer
from node.security.credentials import RunCredentials, folder_of
from node.security.identity import Identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.run_files.resolve import resolve
from protocol.spec.fixed import MEMORY_RESERVE
from protocol.spec.run import RunSpec
from protocol.types import Capacity, StageRange
from protocol.wire.operator_calls import ListInvites
from tests.builders import keyed, spec_of
from tests.support.certificates import credentials
from tests.support.commands import hetnode
from tests.support.coordinator_process import COORDINATOR, Running, running

WANTED = NodeSettings("cpu", 1, "127.0.0.1", 0, None, None)
SPEED = CheckResult("speed", Severity.OK, "as fast as ever")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doctor, doctor.known_runs):
        monkeypatch.setattr(module, "user_config_path", lambda _: tmp_path / "config")
        monkeypatch.setattr(module, "user_data_path", lambda _: tmp_path / "data")
    monkeypatch.setattr(doctor_checks, "user_config_path", lambda _: tmp_path / "config")
    monkeypatch.setattr(doctor_checks, "user_data_path", lambda _: tmp_path / "data")
    monkeypatch.setattr(doctor.command_runner, "configure_logging", lambda: None)


@pytest.fixture
def _computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing is another test's."""

    async def computing(
        wanted: NodeSettings, spec: RunSpec, folder: Path
    ) -> tuple[Capacity | None, list[CheckResult]]:
        return Capacity("cpu", 2**34, 1, 1e9), [SPEED]

    monkeypatch.setattr(doctor_checks, "check_compute", computing)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(spec_of(replicas=0, pipelines=1), tmp_path / "coordinator") as coordinator:
        yield coordinator


def member(run: Running, tmp_path: Path, key: Path | None = None) -> Identity:
    """An identity of this machine that was let into the run."""
    identity = open_identity(key or tmp_path / "config" / "peer-0.key")
    folder = folder_of(identity.path, run.run)
    tls = credentials(identity.peer, run.authority)
    RunCredentials(folder, run.run, run.address, COORDINATOR.peer, None, tls).save()
    return identity


def by_subject(findings: list[CheckResult]) -> dict[str, CheckResult]:
    found = {each.subject: each for each in findings}
    assert len(found) == len(findings)
    for each in findings:
        assert each.found
        assert each.severity is Severity.OK or each.remedy
        assert (each.severity is Severity.PROBLEM) == (each.code is not None)
    return found


def problems(findings: list[CheckResult]) -> list[ErrorCode | None]:
    return [each.code for each in findings if each.severity is Severity.PROBLEM]


@pytest.mark.usefixtures("_computed")
def test_without_a_run_the_machine_alone_is_examined() -> None:
    result = CliRunner().invoke(app, ["doctor", "nano"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for words in (SPEED.found, "this machine is in none", "hetnode doctor INVITE", "--listen none"):
        assert words in result.output


async def test_a_real_process_takes_the_only_run_and_is_dialled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real worker process, over real sockets; as JSON."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    spec, relay = spec_of(replicas=0, pipelines=1), RelayOptions()
    async with running(spec, tmp_path / "coordinator", relay=relay, dial_back=None) as run:
        key = tmp_path / "hetnode" / "peer-0.key"
        identity = member(run, tmp_path, key)
        options = ("--json", "--listen", "127.0.0.1:0")
        result = await asyncio.to_thread(hetnode, "doctor", *options)
        relays = (await run.stub(identity).TryAddresses(pb.TryAddressesRequest(peer=identity.peer))).relays
    assert result.returncode == 0, result.stderr
    found = {each["subject"]: each for each in json.loads(result.stdout)}
    assert run.run in found["coordinator"]["found"]
    for subject in ("links", "payloads"):
        assert found[subject]["severity"] == "OK"
        assert "reachable: the coordinator connects to this machine at 127.0.0.1:" in found[subject]["found"]
    assert found["NAT"]["found"] == "none: the coordinator sees this machine at its own address 127.0.0.1"
    assert f"{relays[0].endpoint}, " in found["relay"]["found"]
    assert "ms there and back" in found["relay"]["found"]
    assert " CPU threads" in found["device"]["found"]
    assert "tokens/s of stage" in found["speed"]["found"]


def test_a_device_that_is_not_there_is_a_problem_with_its_exit_status() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "cuda:77"], env={"COLUMNS": "200"})
    assert result.exit_code == ErrorCode.DEVICE_UNAVAILABLE.exit_code
    assert "cuda:77" in result.output


@pytest.mark.usefixtures("_computed")
async def test_a_known_run_is_measured_and_left_alone(run: Running, tmp_path: Path) -> None:
    member(run, tmp_path)
    before = await run.status()
    findings = await examine(WANTED, run.run)
    found = by_subject(findings)
    assert not problems(findings)
    assert run.run in found["coordinator"].found
    assert found["clock"].severity is Severity.OK
    assert found["certificate"].severity is Severity.OK
    for words in ("Mb/s up", "Mb/s down", "ms there and back"):
        assert words in found["connection"].found
    assert "2 stages fit" in found["fit"].found
    after = await run.status()
    assert (after.phase, list(after.peers)) == (before.phase, [])


@pytest.mark.usefixtures("_computed")
async def test_neighbours_of_the_plan_are_echoed_and_not_disturbed(run: Running, tmp_path: Path) -> None:
    member(run, tmp_path)
    first, second = keyed(1), keyed(2)
    server = LinkServer(lambda: credentials(first.peer, run.authority))
    server.limit_probes_while(lambda: True)
    port = await server.start("127.0.0.1", 0)
    try:
        await run.join(first, role="stage", endpoint=f"127.0.0.1:{port}")
        await run.join(second, role="stage", endpoint="127.0.0.1:9")
        watch = run.stub(first).Watch(pb.WatchRequest(peer=first.peer))
        async for update in watch:
            if update.signed_plan:
                break
        watch.cancel()
        found = by_subject(await examine(WANTED, run.run))
    finally:
        await server.close()
    assert "ms there and back" in found[f"neighbour {first.peer[-8:]}"].found
    assert found[f"neighbour {first.peer[-8:]}"].severity is Severity.OK
    assert found[f"neighbour {second.peer[-8:]}"].severity is Severity.WARNING


@pytest.mark.usefixtures("_computed")
async def test_without_a_name_the_only_run_is_taken(run: Running, tmp_path: Path) -> None:
    identity = member(run, tmp_path)
    await run.join(identity, role="stage")
    found = by_subject(await examine(WANTED, None))
    assert run.run in found["coordinator"].found
    assert found["node"].found.startswith("runs (stage); others reach it")
    assert {"NAT", "relay"} <= set(found)
    assert not {"links", "payloads", "listening"} & set(found)


@pytest.mark.usefixtures("_computed")
async def test_of_several_runs_one_has_to_be_named(run: Running, tmp_path: Path) -> None:
    identity = member(run, tmp_path)
    tls = credentials(identity.peer)
    second = folder_of(identity.path, "other-0123456789ab")
    RunCredentials(second, "other-0123456789ab", run.address, COORDINATOR.peer, None, tls).save()
    found = by_subject(await examine(WANTED, None))["run"]
    assert run.run in found.found
    assert "other-0123456789ab" in found.found
    assert "hetnode doctor RUN" in found.remedy
    ended = credentials(identity.peer, ended=True)
    RunCredentials(second, "other-0123456789ab", run.address, COORDINATOR.peer, None, ended).save()
    assert doctor.known_runs.runs_here() == [run.run]


async def test_a_port_that_is_taken_in_a_run_is_a_problem(run: Running, tmp_path: Path) -> None:
    identity = member(run, tmp_path)
    address, tls = doctor.known_runs.member(run.run) or ("", credentials(identity.peer))
    status = await fetch_status(address, tls)
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        found = await check_reach(address, tls, identity.peer, status, replace(WANTED, port=port))
    assert problems(found) == [ErrorCode.PORT_IN_USE]


@pytest.mark.usefixtures("_computed")
async def test_the_operator_may_ask_too(run: Running) -> None:
    (run.folder / "address").write_text(run.address)
    findings = await examine(WANTED, str(run.folder))
    assert not problems(findings)
    found = by_subject(findings)
    assert "Mb/s up" in found["connection"].found
    assert "of the run's nodes 0 are open" in found["reachability"].found
    assert "belong to no node" in found["reachability"].found
    assert "none stands between" in found["router"].found


@pytest.mark.usefixtures("_computed")
async def test_an_invite_is_not_spent(run: Running) -> None:
    invite = await run.invite(uses=1)
    findings = await examine(WANTED, invite.encode())
    found = by_subject(findings)
    assert not problems(findings)
    for door, address in (("coordinator", run.address), ("enrollment", run.enrollment)):
        assert address in found[door].found
    assert "would be spent" in found["connections"].found
    assert "none stands between" in found["router"].found
    (kept,) = await run.ask(ListInvites())
    assert list(kept.peers) == []


@pytest.mark.usefixtures("_computed")
async def test_an_enrolled_peer_can_measure_with_an_invite_too(run: Running, tmp_path: Path) -> None:
    member(run, tmp_path)
    file = tmp_path / "invite"
    file.write_text((await run.invite()).encode())
    assert "Mb/s up" in by_subject(await examine(WANTED, str(file)))["connection"].found


@pytest.mark.usefixtures("_computed")
async def test_a_coordinator_that_is_away_is_a_problem(run: Running, tmp_path: Path) -> None:
    member(run, tmp_path)
    invite = await run.invite()
    await run.stop()
    assert problems(await examine(WANTED, run.run)) == [ErrorCode.COORDINATOR_UNREACHABLE]
    away = problems(await examine(WANTED, replace(invite, pin=bytes(32)).encode()))
    assert set(away) == {ErrorCode.COORDINATOR_UNREACHABLE}


@pytest.mark.usefixtures("_computed")
async def test_a_clock_that_is_wrong_is_said_to_be(
    run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member(run, tmp_path)
    slow = SimpleNamespace(time=lambda: time.time() - 600)
    monkeypatch.setattr(doctor_checks, "time", slow)
    clock = by_subject(await examine(WANTED, run.run))["clock"]
    assert clock.severity is Severity.WARNING
    seconds = re.search(r"[\d.]+", clock.found)
    assert seconds is not None
    assert float(seconds[0]) == pytest.approx(600, abs=10)  # a loaded machine answers late
    assert "behind" in clock.found


async def test_a_run_that_is_not_known_is_refused() -> None:
    with pytest.raises(HetnodeError) as refused:
        await examine(WANTED, "tiny-000000000000")
    assert refused.value.code is ErrorCode.NO_CREDENTIALS


async def test_what_is_no_invite_is_refused() -> None:
    with pytest.raises(HetnodeError) as refused:
        await examine(WANTED, "hetnode1-nonsense")
    assert refused.value.code is ErrorCode.BAD_INVITE


async def test_a_port_that_is_taken_is_a_problem() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    taken = check_listening(replace(WANTED, port=port))
    server.close()
    await server.wait_closed()
    assert taken.code is ErrorCode.PORT_IN_USE


@pytest.mark.parametrize(
    ("advertise", "port", "severity"),
    [
        (None, 0, Severity.WARNING),
        ("192.168.1.5", 0, Severity.WARNING),
        ("home.example.org", 0, Severity.WARNING),
    ],
)
def test_it_is_said_what_is_not_known_of_the_port(
    advertise: str | None, port: int, severity: Severity
) -> None:
    found = check_listening(replace(WANTED, advertise=advertise, port=port))
    assert found.severity is severity
    assert "--listen none" in found.remedy


def test_a_certificate_that_has_ended_is_a_problem() -> None:
    assert check_certificate(credentials("a")).severity is Severity.OK
    assert check_certificate(credentials("a", ended=True)).code is ErrorCode.CERTIFICATE_REFUSED


def test_the_stages_that_fit_into_memory_are_named() -> None:
    spec = resolve("178m")
    whole = check_memory(spec, Capacity("cuda", 2**40, 1))
    assert whole.severity is Severity.OK
    assert "a full replica" in whole.found
    nothing = check_memory(spec, Capacity("cuda", 2**20, 1))
    assert nothing.code is ErrorCode.DEVICE_UNAVAILABLE
    assert nothing.remedy
    smallest = memory_needed(spec, StageRange(3, 4), 1, "cuda")
    some = check_memory(spec, Capacity("cuda", int(smallest / (1 - MEMORY_RESERVE)) + 1, 1))
    assert some.severity is Severity.OK
    assert "stage 3" in some.found
    assert "of 4 stages" in some.found
    card = Capacity("cuda", int(smallest / (1 - MEMORY_RESERVE)) // 2, 1, main_bytes=2**35)
    assert "stage 3, moments in main memory and layers computed again" in check_memory(spec, card).found


def test_words_with_brackets_are_shown_as_they_are() -> None:
    from rich.console import Console  # noqa: PLC0415

    console = Console(width=120)
    with console.capture() as captured:
        console.print(findings_view([CheckResult("a", Severity.WARNING, "[bold]x[/y] [/]", "[red]")]))
    assert "[bold]x[/y] [/]" in captured.get()


def test_a_home_that_cannot_be_written_is_a_problem_before_a_node_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve("tiny")
    assert check_disk(spec).severity is not Severity.PROBLEM
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path)  # root may write everywhere
    found = check_disk(spec)
    assert (found.severity, found.code) == (Severity.PROBLEM, ErrorCode.BAD_OPTION)
    assert str(tmp_path / "config") in found.found
