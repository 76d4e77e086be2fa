"""A coordinator that is started again listens where the peers of its run look for it."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli.coordinator import CoordinatorOptions
from protocol.errors import ExitCode
from tests.support import commands
from tests.support.waiting import wait_until

GIVEN = CoordinatorOptions("127.0.0.1:0", "example.org", relay="none", dashboard="127.0.0.1:7790")


def noted(folder: Path, given: CoordinatorOptions = GIVEN) -> CoordinatorOptions:
    """What the folder of a coordinator has after a start that got the ports 7710 and 7720."""
    (folder / "places.json").write_text(given.places("example.org:7710", "example.org:7720"))
    return replace(given, listen="127.0.0.1:7710", enrollment_port=7720)


def test_what_is_not_given_is_as_it_was(tmp_path: Path) -> None:
    assert CoordinatorOptions().as_before(tmp_path) == CoordinatorOptions()
    before = noted(tmp_path)
    assert CoordinatorOptions().as_before(tmp_path) == before
    moved = CoordinatorOptions(advertise="example.net").as_before(tmp_path)
    assert moved == replace(before, advertise="example.net")


def test_one_port_stays_one_port(tmp_path: Path) -> None:
    before = noted(tmp_path, CoordinatorOptions(one_port=True))
    again = CoordinatorOptions().as_before(tmp_path)
    assert again == replace(before, enrollment_port=None)
    assert again.addresses().one_port


def test_who_says_where_to_listen_says_all(tmp_path: Path) -> None:
    noted(tmp_path)
    given = CoordinatorOptions("127.0.0.1:7700")
    assert given.as_before(tmp_path) == given


@pytest.mark.parametrize("left", ["", "{", "[]", '{"unknown": 1}'])
def test_what_a_crash_has_left_stops_no_start(tmp_path: Path, left: str) -> None:
    (tmp_path / "places.json").write_text(left)
    assert CoordinatorOptions().as_before(tmp_path) == CoordinatorOptions()


def test_the_folder_alone_is_enough(tmp_path: Path) -> None:
    """It gets the ports that it had; a host that nobody finds is named before an invite is made."""
    run, log = tmp_path / "run", tmp_path / "log"
    addresses = []
    options = ("--preset", "nano", "--listen", "127.0.0.1:0", "--dashboard", "none", "--relay", "none")
    for given in (options, (), ("--advertise", "nowhere.invalid")):
        process = commands.start("coordinator", "--folder", str(run), *given, log=log)
        try:
            told = "hetnode invite create" if "--advertise" not in given else "does not reach itself"
            wait_until(lambda told=told: told in log.read_text(), 60, log.read_text)  # type: ignore[misc]
            addresses.append([(run / name).read_text() for name in ("address", "enrolment-address")])
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == ExitCode.INTERRUPTED
            log.write_text("")
        finally:
            process.kill()
    first, second, third = addresses
    assert first == second
    assert third == [each.replace("127.0.0.1", "nowhere.invalid") for each in first]


@pytest.mark.parametrize("option", ["--open-members", "--open-joins"])
def test_limits_of_peers_without_an_invite_need_a_run_that_is_open(tmp_path: Path, option: str) -> None:
    done = commands.hetnode("coordinator", "--preset", "nano", "--folder", str(tmp_path / "run"), option, "3")
    assert done.returncode == ExitCode.USAGE
    assert "need --open" in done.stderr
    assert not (tmp_path / "run").exists()
