"""Where the dashboard listens."""

from __future__ import annotations

import stat
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.api.dashboard import url_for_readers, url_in
from coordinator.ops.dashboard.port import DashboardPort, dashboard_listener, listen, listen_near
from protocol.errors import ErrorCode, HetnodeError
from tests.support.ports import free_port


def test_a_given_port_in_use_is_one_message() -> None:
    with listen("127.0.0.1:0") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HetnodeError, match="the dashboard cannot be served there") as error:
            listen(address)
    assert error.value.code is ErrorCode.PORT_IN_USE


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:", "203.0.113.1:0", "127.0.0.1:99999"])
def test_a_wrong_address_is_one_message(address: str) -> None:
    with pytest.raises(HetnodeError) as error:
        listen(address)
    assert error.value.code is ErrorCode.BAD_ADDRESS


def test_the_usual_port_in_use_gives_the_next_free_one() -> None:
    with listen(f"127.0.0.1:{free_port()}") as taken:
        port = taken.getsockname()[1]
        other = listen_near(f"127.0.0.1:{port}")
        assert other is not None
        with other:
            assert port < other.getsockname()[1] < port + 100


def test_without_a_free_port_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    assert listen_near("203.0.113.1:7780") is None
    assert "there is no dashboard" in caplog.text


async def test_none_is_wanted() -> None:
    async with AsyncExitStack() as stack:
        assert dashboard_listener(None, False, stack) is None


def test_on_loopback_there_is_no_token(tmp_path: Path) -> None:
    port = DashboardPort(listen("127.0.0.1:0"), tmp_path)
    assert port.token == ""
    assert url_in(tmp_path) == url_for_readers(tmp_path) == port.url
    port.close()
    assert url_in(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_beyond_loopback_the_address_has_a_token_that_only_its_owner_reads(tmp_path: Path) -> None:
    port = DashboardPort(listen("0.0.0.0:0"), tmp_path)
    (secret,) = (path for path in tmp_path.iterdir() if "token" in path.name)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(port.token) > 40
    assert url_in(tmp_path) == port.url
    assert port.token not in port.url
    assert url_for_readers(tmp_path) == f"{port.url}login#{port.token}"
    port.close()
    again = DashboardPort(listen("0.0.0.0:0"), tmp_path)
    assert again.token == port.token, "readers stay signed in over a restart"
    again.close()
