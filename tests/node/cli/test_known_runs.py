"""The run that a command names: commands share it, so its errors name no command."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from node.folder import keep_only_run, remember_node_folder
from node.here import known_runs
from node.here.known_runs import Destination
from node.here.nodes import place_of
from node.security.identity import open_identity, peer_in
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.invite import Invite
from protocol.types import Role
from tests.builders import spec_of
from tests.support.certificates import authority, credentials, enrolled


def test_the_remedy_for_a_missing_destination_fits_join_and_relay() -> None:
    with pytest.raises(HetnodeError) as caught:
        known_runs.destination(None, None)
    assert caught.value.code is ErrorCode.BAD_OPTION
    assert "the file that holds it" in str(caught.value)
    assert "hetnode join" not in str(caught.value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's identities are: four that no process uses."""
    monkeypatch.setattr(known_runs, "user_config_path", lambda _: tmp_path)
    for number in range(4):
        (tmp_path / f"peer-{number}.key").touch()
    return tmp_path


def let_in(home: Path, number: int, role: Role | None = None, ended: bool = False, name: str = "a") -> None:
    """Give an identity credentials for the run of an authority."""
    identity, issuer = open_identity(home / f"peer-{number}.key"), authority(name)
    tls = credentials(identity.peer, issuer, ended)
    run = issuer.run_id(spec_of())
    replace(enrolled(identity, run, issuer=issuer), role=role, tls=tls).save()
    os.close(identity.lock)


def test_an_invite_takes_a_free_identity_that_is_already_in_the_run(home: Path) -> None:
    let_in(home, 0, name="another run")
    let_in(home, 1, ended=True)
    let_in(home, 2, role=Role.STAGE)
    let_in(home, 3, role=Role.RELAY)
    invite = Destination(Invite("h:1", "h:2", authority("a").pin, "00" * 6, bytes(16)))
    taken = [known_runs.identity_for(invite, None) for _ in range(5)]
    assert [each.path.stem for each in taken] == [f"peer-{number}" for number in (2, 1, 0, 3, 4)]


def test_a_relay_takes_the_identity_that_was_a_relay(home: Path) -> None:
    let_in(home, 1)
    let_in(home, 2, role=Role.RELAY)
    invite = Destination(Invite("h:1", "h:2", authority("a").pin, "00" * 6, bytes(16)))
    assert known_runs.identity_for(invite, None, relays=True).path.stem == "peer-2"


def test_a_run_is_named_by_its_beginning_or_its_end(home: Path) -> None:
    let_in(home, 0)
    let_in(home, 1)
    run = authority("a").run_id(spec_of())
    for text in (run, spec_of().name, run[:8], run[-8:], f"..{run[-8:]}"):
        assert known_runs.destination(text).run == run
        assert [each.run for each in known_runs.memberships(text)] == [run, run]
    assert known_runs.destination(run[:3]).run == run[:3], "too little to name anything"
    let_in(home, 2, name="another")
    other = authority("another").run_id(spec_of())
    assert known_runs.destination(run[-8:]).run == run
    with pytest.raises(HetnodeError, match=other) as caught:
        known_runs.destination(spec_of().name)
    assert caught.value.code is ErrorCode.BAD_OPTION
    assert run in str(caught.value)


def test_the_name_that_a_card_shows_is_taken_where_the_coordinator_is_too(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a coordinator has that name, and the credentials of a node the run's whole id."""
    monkeypatch.setattr(known_runs, "user_data_path", lambda _: home)
    folder = home / "runs" / spec_of().name / "coordinator"
    folder.mkdir(parents=True)
    (folder / "operator.pem").touch()
    let_in(home, 1)
    run = authority("a").run_id(spec_of())
    wanted = known_runs.destination(spec_of().name)
    assert wanted.run == run
    assert known_runs.identity_for(wanted, None).path.stem == "peer-1"
    assert [each.run for each in known_runs.memberships(spec_of().name)] == [run]
    assert list(known_runs.coordinator_folders(spec_of().name)) == [folder]


def test_the_coordinator_that_runs_is_meant_where_there_are_several(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of swarms in ./runs are here, too."""
    monkeypatch.setattr(known_runs, "user_data_path", lambda _: home)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HetnodeError, match="No coordinator has its folder in"):
        known_runs.only_coordinator()
    folders = [home / "runs" / "one" / "coordinator", Path("runs/nano-1"), Path("runs/nano-2")]
    for number, folder in enumerate(folders, 1):
        folder.mkdir(parents=True)
        (folder / "operator.pem").touch()
        identity = open_identity(folder / "identity.key")
        assert known_runs.only_coordinator() == folder
        assert list(known_runs.coordinator_folders(None)) == [folder]
        assert known_runs.runs_here() == [str(folder)]
        os.close(identity.lock)
        assert known_runs.runs_here() == [str(folders[0])]  # a swarm that has ended is no run to take part in
        if number > 1:
            with pytest.raises(HetnodeError, match=f"{number} coordinators here.*runs/nano-1"):
                known_runs.only_coordinator()


def test_a_swarm_below_runs_is_called_by_its_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every command: those of the run, and those of its model."""
    monkeypatch.setattr(known_runs, "user_data_path", lambda _: home)
    monkeypatch.setattr("node.here.nodes.user_config_path", lambda _: home)
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/tiny-1")
    folder.mkdir(parents=True)
    (folder / "operator.pem").touch()
    assert list(known_runs.coordinator_folders("tiny-1")) == [folder]
    assert known_runs.operator_folder("tiny-1") == folder
    assert place_of(Path("tiny-1")) == folder
    assert place_of(Path("tiny-2")) == Path("tiny-2")
    assert known_runs.destination("tiny-1").run == "tiny-1", "nobody joins a swarm by its folder"


def test_the_model_of_a_node_is_named_as_the_node_is(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.here.nodes.user_config_path", lambda _: home)
    monkeypatch.chdir(tmp_path)
    run = authority("a").run_id(spec_of())
    for number in range(2):
        let_in(home, number)
        kept = home / f"kept-{number}"
        kept.mkdir()
        keep_only_run(kept, run, "coordinator")
        remember_node_folder(home / f"peer-{number}.runs" / run, kept)
    assert place_of(Path("peer-1")) == home / "kept-1"
    assert place_of(home / "peer-0.runs" / run) == home / "kept-0"
    assert place_of(Path(peer_in(home / "peer-0.key")[-8:])) == home / "kept-0"
    with pytest.raises(HetnodeError, match="Several nodes"):
        place_of(Path(run))


def test_a_given_identity_decides(home: Path) -> None:
    let_in(home, 1)
    invite = Destination(Invite("h:1", "h:2", authority("a").pin, "00" * 6, bytes(16)))
    assert known_runs.identity_for(invite, home / "peer-0.key").path.stem == "peer-0"
