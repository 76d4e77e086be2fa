"""Who may read the dashboard."""

from __future__ import annotations

import pytest

from coordinator.ops.dashboard.port import ReaderAccess

TOKEN = "a-token"


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:7780", "127.0.0.1", "127.0.0.1:1", "127.9.9.9:80", "[::1]:80", "LOCALHOST."],
)
def test_on_loopback_names_of_loopback_are_admitted(host: str) -> None:
    access = ReaderAccess("", "run")
    assert access.admits_host(host)
    assert access.admits(None)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:7780",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::1",
        "[::1]evil",
        "0.0.0.0",
        "127.0.0.1@evil.example",
        "\u2139",
    ],
)
def test_on_loopback_other_names_are_refused(host: str) -> None:
    """A name that a stranger lets point to 127.0.0.1 must not read the dashboard through a browser here."""
    assert not ReaderAccess("", "run").admits_host(host)


def test_with_a_token_only_its_cookie_is_admitted() -> None:
    access = ReaderAccess(TOKEN, "run")
    assert access.admits_host("anything.example")
    assert access.is_token(f" {TOKEN}\n")
    assert access.admits(access.cookie)
    for wrong in (None, "", TOKEN, access.cookie[:-1], f"{access.cookie}0", "\u2139"):
        assert not access.admits(wrong), wrong
    for wrong in ("", "another", access.cookie, "\u2139"):
        assert not access.is_token(wrong)


def test_without_a_token_nothing_is_the_token() -> None:
    assert not ReaderAccess("", "run").is_token("")


def test_cookies_of_two_runs_do_not_replace_each_other() -> None:
    assert ReaderAccess(TOKEN, "one").cookie_name != ReaderAccess(TOKEN, "other").cookie_name
    assert TOKEN not in ReaderAccess(TOKEN, "one").cookie
