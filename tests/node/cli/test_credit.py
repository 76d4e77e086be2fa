"""``hetnode credit`` as it is typed, and its table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from coordinator.store.history_answers import Credit, Credits
from node.cli.credit import credit_view
from protocol.types import PeerId
from tests.builders import keyed
from tests.support import commands
from tests.support.coordinator_run import play_rounds, started_and_attested
from tests.support.history import stored, write_history


def shown(credits: Credits) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(credit_view(credits))
    return capture.get()


def many(rows: int, peers: int) -> Credits:
    """Figures of the greatest run, with peer ids of the usual length."""
    found = tuple(
        Credit(PeerId(f"12D3KooW{n:044d}"), 10**15 - n, 10**7, 10**14, 10**14, 1, 10_000, 10**9)
        for n in range(rows)
    )
    return Credits("a" * 200, 10**9, peers, 32, 10**14, 10**16, 10**8, 10**15, 10**15, found, peers)


def test_the_table_fits_80_columns() -> None:
    text = shown(many(50, 1000))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text.partition("\n")[2]
    named = many(2, 2)
    names = "Ada", "W" * 32
    credits = tuple(replace(each, name=name) for each, name in zip(named.credits, names, strict=True))
    text = shown(replace(named, credits=credits))
    assert "Ada" in text
    assert "WWWW" in text
    assert max(map(len, text.splitlines())) <= 80
    text = shown(many(50, 1000))
    assert "50 of 1000 contributors are shown; --most shows more." in text.replace("\n", " ")


def test_a_run_without_peers_says_so() -> None:
    assert shown(many(0, 0)) == "No peer has joined yet.\n"


def test_the_credit_of_a_folder_is_shown(tmp_path: Path) -> None:
    run = started_and_attested(2, 1)
    play_rounds(run, 3)
    write_history(tmp_path / "history.sqlite", run.spec, stored(run.events))
    table = commands.hetnode("credit", str(tmp_path))
    assert table.returncode == 0, table.stderr
    assert all(keyed(i).peer[-8:] in table.stdout for i in range(4))
    found = commands.hetnode("credit", str(tmp_path), "--json", "--most", "1")
    data = json.loads(found.stdout)
    assert [each["peer"] for each in data["credits"]] == [keyed(0).peer]
    assert data["stage_tokens"] == 2 * data["tokens"]
    lost = commands.hetnode("credit", str(tmp_path / "nowhere"))
    assert lost.returncode == 7
    assert "[no-history]" in lost.stderr


def test_credit_shows_public_names_as_pages_do(tmp_path: Path) -> None:
    run = started_and_attested(2)
    play_rounds(run, 1)
    run.accept(replace(keyed(0).join(run.spec), name="Ada"))
    write_history(tmp_path / "history.sqlite", run.spec, stored(run.events))
    table, found = (commands.hetnode("credit", str(tmp_path), *json) for json in ((), ("--json",)))
    assert "Ada" in table.stdout
    assert {each["name"] for each in json.loads(found.stdout)["credits"]} == {"Ada", ""}
