"""A proxy in the environment is for downloads: coordinators and peers are dialled without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.cli.doctor_checks import check_proxy
from node.net.coordinator_channel import fetch_status
from node.net.enrollment import enroll
from node.security.identity import open_identity
from tests.builders import spec_of
from tests.support.coordinator_process import running
from tests.support.ports import free_port


async def test_a_coordinator_is_reached_where_the_proxy_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(spec_of(), tmp_path / "run") as run:
        identity, invite = open_identity(tmp_path / "key"), await run.invite()
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
        known = await enroll(invite, identity, 10.0)
        assert (await fetch_status(known.api, known.tls)).run == run.run
    assert "127.0.0.1" in check_proxy()[0].found


def test_where_no_proxy_is_named_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert check_proxy() == []
