"""Identity files: created once, private, locked while in use."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.folder import lock_folder
from node.security.identity import Identity, open_free_identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import is_signed_by


def test_a_new_identity_is_private_to_its_user(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "keys" / "peer.key")
    assert stat.S_IMODE(identity.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(identity.path.parent.stat().st_mode) == 0o700


def test_a_file_readable_by_others_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    _create(path)
    path.chmod(0o644)
    open_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_identity_stays_the_same_when_it_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    peer = _create(path)
    assert open_identity(path).peer == peer


def test_signatures_verify_only_with_the_peer_id_of_the_identity(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "peer.key")
    signature = identity.sign(b"message")
    assert is_signed_by(identity.peer, b"message", signature)
    assert not is_signed_by(identity.peer, b"another message", signature)


def test_an_identity_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    identity = open_identity(path)
    with pytest.raises(HetnodeError, match=str(path)) as refusal:
        open_identity(identity.path)
    assert refusal.value.code is ErrorCode.ALREADY_ACTIVE


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    for use in (open_identity, lock_folder):
        with pytest.raises(
            HetnodeError, match=f"{tmp_path}.* cannot be locked: No locks available"
        ) as refusal:
            use(tmp_path / "peer.key" if use is open_identity else tmp_path)
        assert refusal.value.code is ErrorCode.BAD_OPTION


def test_the_free_identity_is_the_first_unused_one(tmp_path: Path) -> None:
    identities: list[Identity] = [open_free_identity(tmp_path) for _ in range(3)]
    assert [identity.path.name for identity in identities] == ["peer-0.key", "peer-1.key", "peer-2.key"]
    assert len({identity.peer for identity in identities}) == 3


def test_the_identity_of_a_process_that_has_ended_is_free_again(tmp_path: Path) -> None:
    peer = _create(tmp_path / "peer-0.key")
    assert open_free_identity(tmp_path).peer == peer


@pytest.mark.parametrize(
    "content",
    [
        b"x",
        b"\x08\x01\x12\x40short",
        b"\0" * 68,
        b"\x08\x01\x12\x40" + b"k" * 65,
        b"\x08\x01\x12\x40" + b"k" * 64,  # the public half is not that of the seed
    ],
)
def test_a_file_without_a_key_is_refused_and_not_changed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peer.key"
    path.write_bytes(content)
    with pytest.raises(HetnodeError, match=str(path)) as refusal:
        open_identity(path)
    assert refusal.value.code is ErrorCode.BAD_OPTION
    assert path.read_bytes() == content


def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HetnodeError) as refusal:
        open_identity(tmp_path)
    assert refusal.value.code is ErrorCode.BAD_OPTION


def _create(path: Path) -> str:
    """The peer id of a new identity, made by a process that has ended since."""
    program = (
        "import sys, pathlib; from node.security.identity import open_identity;"
        "print(open_identity(pathlib.Path(sys.argv[1])).peer)"
    )
    command = [sys.executable, "-c", program, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
