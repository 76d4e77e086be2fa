"""'hetnode join https://HOST/' with a real coordinator and its real dashboard."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.api.dashboard import url_in
from coordinator.membership.open_places import OpenTerms
from node.cli.run_page import published
from node.here import known_runs
from node.security.identity import open_identity
from protocol.errors import ErrorCode, HetnodeError
from tests.builders import spec_of
from tests.support.certificates import enrolled
from tests.support.commands import hetnode, start
from tests.support.coordinator_process import running
from tests.support.waiting import until

LOOPBACK = "127.0.0.1:0"


async def test_an_open_run_is_shown_and_joined(tmp_path: Path) -> None:
    """A newcomer has its turn when members with invites train, so it waits here."""
    run, own = tmp_path / "run", ("--identity", str(tmp_path / "key"), "--folder", str(tmp_path / "node"))
    async with running(spec_of(), run, dashboard=LOOPBACK, terms=OpenTerms(4, 4)) as coordinator:
        url = url_in(run)
        assert url
        process = start("join", url, "--yes", "--no-measure", *own, log=(log := tmp_path / "log"))
        try:
            await until(lambda: "in the waiting list" in log.read_text(), 60.0, log.read_text)
            said = log.read_text()
        finally:
            process.kill()
        assert f"run {coordinator.run}, as " in said
        assert coordinator.authority.pin.hex() in said
        assert [each.place for each in (await coordinator.status()).waiting] == [1]


async def test_a_run_that_needs_an_invite_says_how_to_ask_for_one(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK, contact="ada@example.org") as coordinator:
        url = url_in(tmp_path)
        assert url
        done = await asyncio.to_thread(hetnode, "join", url)
        assert done.returncode == ErrorCode.NO_CREDENTIALS.exit_code
        assert "[no-credentials]" in done.stderr
        assert "Ask for one: ada@example.org. Then type 'hetnode join INVITE'." in done.stderr
        assert coordinator.run in done.stderr


async def test_a_machine_that_is_in_the_run_comes_back_by_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_runs, "user_config_path", lambda _: tmp_path / "home")
    async with running(spec_of(), tmp_path / "run", dashboard=LOOPBACK, contact="ask") as coordinator:
        (tmp_path / "home").mkdir()
        enrolled(open_identity(tmp_path / "home" / "peer-0.key"), coordinator.run).save()
        found = await asyncio.to_thread(published, url_in(tmp_path / "run"))
        assert found is not None
        assert (found.invite, found.run) == (None, coordinator.run)


async def test_what_names_no_page_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "invite.txt").write_text("hetnode1-")
    for text in (None, "tiny", "invite.txt", "peer-0"):
        assert published(text) is None
    with pytest.raises(HetnodeError) as refused:
        published("http://192.0.2.1/")
    assert refused.value.code is ErrorCode.BAD_ADDRESS
