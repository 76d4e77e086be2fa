"""What the folder of a standby is, and which options fit it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.authority import write_operator
from node.cli.standby import StandbyFolder, address_of, term_at
from protocol.errors import ErrorCode, HetnodeError
from tests.builders import spec_of
from tests.support.coordinator_process import running

HERE, THERE = "here.example.org:7700", "there.example.org:7700"


@pytest.fixture
def copy(tmp_path: Path) -> StandbyFolder:
    (tmp_path / "coordinator.sqlite").touch()
    (tmp_path / "address").write_text(THERE)
    return StandbyFolder(tmp_path, HERE)


def partner_of(standby: StandbyFolder) -> str:
    file = standby.folder / "partner"
    return file.read_text() if file.exists() else ""


def refusal(standby: StandbyFolder, follows: bool, takes_over: bool, listens: bool) -> str:
    with pytest.raises(HetnodeError) as error:
        standby.check(follows, takes_over, listens)
    assert error.value.code is ErrorCode.BAD_OPTION
    return f"{error.value.cause} {error.value.remedy}"


def test_options_that_do_not_fit_the_folder(copy: StandbyFolder, tmp_path: Path) -> None:
    assert "one of the two" in refusal(copy, True, True, True)
    for follows in (True, False):
        assert "--listen" in refusal(copy, follows, not follows, False)
        copy.check(follows, not follows, True)
        empty = StandbyFolder(tmp_path / "empty", HERE)
        assert "run backup" in refusal(empty, follows, not follows, True)
    copy.check(False, False, True)
    own = StandbyFolder(tmp_path, THERE)
    assert "address of this machine" in refusal(own, True, False, True)
    own.check(False, True, True)  # a name may have been moved to this machine
    copy.make_own()
    copy.mark()
    assert "--take-over goes on here" in refusal(copy, False, False, True)
    for follows in (True, False):  # where it listens is in the folder by now
        copy.check(follows, not follows, False)


def test_the_partner_of_a_copy_is_who_had_it_before(copy: StandbyFolder) -> None:
    (copy.folder / "partner").write_text("a former standby of that one")
    copy.make_own()
    assert partner_of(copy) == THERE
    copy.mark()
    (copy.folder / "address").write_text("whatever comes later")
    copy.make_own()
    assert partner_of(copy) == THERE


def test_who_has_taken_over_is_not_its_own_partner(copy: StandbyFolder) -> None:
    """Also if the option is given at each later start."""
    copy.make_own()
    (copy.folder / "address").write_text(HERE)
    copy.make_own()
    assert partner_of(copy) == THERE


def test_nodes_must_know_where_a_standby_will_be(copy: StandbyFolder) -> None:
    with pytest.raises(HetnodeError, match="port of a standby"):
        StandbyFolder(copy.folder, "here.example.org:0").mark()
    assert not copy.is_of_standby
    assert address_of("0.0.0.0:7700", "here.example.org") == HERE
    assert address_of("[::1]:7700", None) == "[::1]:7700"


def test_a_folder_that_has_decided_takes_nothing_over(copy: StandbyFolder, tmp_path: Path) -> None:
    """Its service may give the option at each start; a backup of a machine whose name has moved is none."""
    own = StandbyFolder(tmp_path, THERE)
    assert not own.has_decided
    (tmp_path / "history.sqlite").touch()
    assert own.has_decided
    own.check(False, True, False)
    assert not copy.has_decided
    own.mark()
    assert not own.has_decided
    (tmp_path / "standby").unlink()
    (tmp_path / "address").unlink()  # as a start leaves it that was refused
    assert own.has_decided


async def test_a_coordinator_is_there_whatever_the_clocks_say(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path / "run") as run:
        for hours in (-30, 3):
            write_operator(
                replace(run.authority, clock=lambda off=hours: time.time() + 3600 * off), run.folder
            )  # type: ignore[misc]
            assert await term_at(run.folder)(run.address) == 0


async def test_who_answers_tells_its_term(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path / "run") as run:
        assert await term_at(run.folder)(run.address) == 0
        async with running(spec_of(rounds=7), tmp_path / "other") as other:
            assert await term_at(run.folder)(other.address) is None
        address = run.address
    assert await term_at(tmp_path / "run")(address) is None
