"""``hetnode owner`` as it is typed."""

from __future__ import annotations

import io
import re
import stat
from pathlib import Path

import pytest

from node.cli.owner import owner as command
from node.security import owner
from node.security.owner import former_file, load_owner, owner_file
from protocol.errors import ErrorCode, HetnodeError
from tests.support.hugging_face import output_of


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "user_config_path", lambda _: tmp_path / "config")


def recover(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdin", io.StringIO(text))
        command(recover=True)


def phrase_in(text: str) -> str:
    found = re.search(r"^ +(\S{4}(?:-\S{4}){7})$", text, re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_phrase_is_shown_once_and_makes_the_same_owner_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    made = output_of("owner")
    assert stat.S_IMODE(owner_file().stat().st_mode) == 0o600
    first = load_owner(owner_file())
    assert first is not None
    assert first.owner in made
    shown = output_of("owner")
    assert first.owner in shown
    assert first.phrase not in shown
    owner_file().unlink()
    recover(f"{phrase_in(made).lower()}\n", monkeypatch)
    again = load_owner(owner_file())
    assert again is not None
    assert again.owner == first.owner
    assert not former_file(owner_file()).exists()


def test_another_owner_takes_over_and_the_former_phrase_stays() -> None:
    output_of("owner")
    first = load_owner(owner_file())
    second = owner.new_owner()
    owner.keep_owner(second, owner_file())
    former, now = load_owner(former_file(owner_file())), load_owner(owner_file())
    assert first is not None
    assert former is not None
    assert now is not None
    assert (former.owner, now.owner) == (first.owner, second.owner)
    assert stat.S_IMODE(former_file(owner_file()).stat().st_mode) == 0o600


def test_a_wrong_phrase_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    output_of("owner")
    before = owner_file().read_bytes()
    with pytest.raises(HetnodeError, match="no recovery phrase") as caught:
        recover("ABCD-EFGH\n", monkeypatch)
    assert caught.value.code is ErrorCode.BAD_OPTION
    assert owner_file().read_bytes() == before
    owner_file().write_text("something else")
    with pytest.raises(HetnodeError, match="cannot be read"):
        output_of("owner")
