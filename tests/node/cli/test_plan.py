"""``hetnode plan`` at the command line: tables, JSON, figures, and messages for wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from node.cli.main import app
from node.cli.plan import COLUMNS, read_peers
from protocol.errors import ErrorCode, ExitCode, HetnodeError

HEADER = ",".join(COLUMNS)
GOOD = "alice,50,200,30,24,40,alice.example:7711"


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def refused(*arguments: str) -> HetnodeError:
    error = plan(*arguments).exception
    assert isinstance(error, HetnodeError), error
    assert error.code.exit_code is ExitCode.USAGE
    return error


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    return tmp_path / "peers.csv"


def test_uniform_peers_and_full_replicas_as_tables() -> None:
    result = plan("--preset", "178m", "--stage-peers", "6", "--replicas", "2", "--pipelines", "2")
    assert result.exit_code == 0, result.output
    for word in ("full-0", "peer-0", "tokens/s", "bottleneck", "2 full replicas and 2 pipelines", "a day"):
        assert word in result.output


def test_a_narrow_terminal_has_room_for_the_whole_header() -> None:
    arguments = ["plan", "--preset", "1b", "--stage-peers", "8"]
    lines = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).output.splitlines()
    assert max(map(len, lines)) <= 80
    header = " ".join(lines[:2])
    assert "…" not in header
    for word in ("replica", "peers:", "stages", "batches", "step", "busy", "round", "waits"):
        assert word in header


def test_uncompressed_links_are_named_so(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "178m"\n[link]\nk = 64\nleast_k = 64\nmost_k = 128\nuncompressed = true\n')
    options = ("--config", str(file), "--stage-peers", "2", "--bandwidth", "100000")
    result = plan(*options)
    assert result.exit_code == 0, result.output
    assert "uncompressed" in result.output
    assert set(json.loads(plan(*options, "--json").output)["replicas"][0]["k"]) == {0}


SEVEN_STEPS = ("--set", "inner.steps=7", "--set", "link.k=64")


def test_the_same_as_json() -> None:
    result = plan("--preset", "178m", "--stage-peers", "4", *SEVEN_STEPS, "--json")
    found = json.loads(result.output)
    assert found["round_seconds"] == pytest.approx(found["inner_seconds"] + found["outer_seconds"])
    assert found["inner_seconds"] == pytest.approx(7 * found["replicas"][0]["step_seconds"])
    assert set(found["replicas"][0]["k"]) == {64}
    members = found["replicas"][0]["members"]
    assert members[0]["stages"][0] == 0
    assert members[-1]["stages"][1] == 4
    assert all(0 < each["utilization_in_round"] <= each["utilization_in_step"] <= 1 for each in members)
    assert all(each["bytes_sent_per_day"] > 0 for each in members)


def test_lines_that_are_too_slow_for_the_time_to_gather_give_a_warning(tmp_path: Path) -> None:
    options = ("--stage-peers", "4", "--pipelines", "1", "--replicas", "60", "--bandwidth", "2", "--json")
    (warning,) = json.loads(plan("--preset", "178m", *options).output)["warnings"]
    found = re.search(
        r"takes ([\d,.]+) s and timing.fetch allows 120 s: .*Set timing.fetch to (\d+)", warning
    )
    assert found is not None
    taken, least = (float(each.replace(",", "")) for each in found.groups())
    assert least > taken > 120
    file = tmp_path / "run.toml"
    file.write_text(f'preset = "178m"\n[timing]\nfetch = {least}\ndecide = {2 * least}\n')
    assert json.loads(plan("--config", str(file), *options).output)["warnings"] == []


def test_microbatches_and_stages_are_those_that_were_given() -> None:
    settings = ("--set", "swarm.stages=4", "--set", "inner.microbatches=16")
    result = plan("--stage-peers", "4", *settings, "--json")
    found = json.loads(result.output)
    assert [each["microbatches"] for each in found["replicas"]] == [16]


def test_peers_from_a_file_in_any_order_of_columns(peers: Path) -> None:
    order = tuple(reversed(COLUMNS))
    rows = [dict(zip(COLUMNS, (f"p{n}", 50 + n, 100, 20, 24, 40, "h:1"), strict=True)) for n in range(3)]
    lines = [",".join(order), *(",".join(str(row[column]) for column in order) for row in rows)]
    peers.write_text("\n".join(lines) + "\n")
    found = read_peers(peers)
    assert list(found) == ["p0", "p1", "p2"]
    able, endpoint = found["p1"]  # type: ignore[index]
    assert (able.uplink, able.downlink, able.round_trip) == (51e6 / 8, 100e6 / 8, 0.02)
    assert (able.memory_bytes, able.flops, endpoint) == (24 * 2**30, 40e12, "h:1")
    result = plan("--preset", "178m", "--peers", str(peers), "--json")
    assert result.exit_code == 0, result.exception
    taken = {each["peer"] for replica in json.loads(result.output)["replicas"] for each in replica["members"]}
    assert taken <= {"p0", "p1", "p2"}


def test_peers_with_little_memory_on_their_card_use_main_memory(peers: Path) -> None:
    memory = enumerate([(8, 64), (80, 4), (80, 4)])
    rows = [f"p{n},100,100,10,{card},40,h:1,{main}" for n, (card, main) in memory]
    peers.write_text("\n".join([f"{HEADER},main_gib", *rows]) + "\n")
    options = "--preset", "1b", "--peers", str(peers), "--set", "swarm.stages=3"
    found = json.loads(plan(*options, "--json").output)
    needs = {each["peer"]: each["memory"] for each in found["replicas"][0]["members"]}
    assert needs["p0"]["policy"] == "moments in main memory and layers computed again"
    assert needs["p0"]["device_bytes"] < 0.9 * 8 * 2**30
    assert needs["p2"]["policy"] == "all on the device"
    assert "all on the device: 2 of 3 peers" in plan(*options).output


def test_fewer_strong_peers_than_stages_share_them(peers: Path) -> None:
    peers.write_text(f"{HEADER}\nalice,100,100,10,48,40,h:1\nbob,100,100,10,48,40,h:2\n")
    found = json.loads(plan("--preset", "512m", "--peers", str(peers), "--json").output)
    assert [each["stages"] for each in found["replicas"][0]["members"]] == [[0, 2], [2, 4]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["header"]),
        ("name,uplink\n", ["Line 1", "header", "uplink"]),
        (f"{HEADER}\n", ["names no peer"]),
        (f"{HEADER}\n{GOOD}\nbob,50,200,30,24\n", ["Line 3", "columns"]),
        (f"{HEADER}\n{GOOD},more\n", ["Line 2", "columns"]),
        (f"{HEADER}\n{GOOD}\n{GOOD}\n", ["Line 3", "column name", "alice"]),
        (f"{HEADER}\n,50,200,30,24,40,h:1\n", ["Line 2", "column name"]),
        (f"{HEADER}\nbob,fast,200,30,24,40,h:1\n", ["Line 2", "column uplink_mbps", "fast"]),
        (f"{HEADER}\nbob,50,0,30,24,40,h:1\n", ["Line 2", "column downlink_mbps", "'0'"]),
        (f"{HEADER}\nbob,50,200,-1,24,40,h:1\n", ["Line 2", "column round_trip_ms", "-1"]),
        (f"{HEADER}\nbob,50,200,30,nan,40,h:1\n", ["Line 2", "column memory_gib", "nan"]),
        (f"{HEADER}\nbob,50,200,30,24,inf,h:1\n", ["Line 2", "column tflops", "inf"]),
    ],
)
def test_a_wrong_file_of_peers_is_refused_with_line_and_column(
    peers: Path, text: str, words: list[str]
) -> None:
    peers.write_text(text)
    error = refused("--peers", str(peers))
    assert error.code is ErrorCode.BAD_OPTION
    assert str(peers) in error.cause
    assert HEADER in error.remedy
    for word in words:
        assert word in error.cause


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_a_file_of_peers_that_cannot_be_read(peers: Path, content: bytes | None) -> None:
    if content is not None:
        peers.write_bytes(content)
    assert "cannot be read" in refused("--peers", str(peers)).cause


def test_a_plan_without_peers_is_refused() -> None:
    assert "no peers" in refused().cause


def test_two_lists_of_peers_are_refused(peers: Path) -> None:
    peers.write_text(f"{HEADER}\n{GOOD}\n")
    assert "--stage-peers" in refused("--peers", str(peers), "--stage-peers", "4").cause


def test_peers_that_cannot_train_the_run_are_told_why() -> None:
    error = refused("--preset", "70b", "--stage-peers", "4", "--memory", "24")
    assert "memory" in error.cause
    assert "more stage peer" in refused("--stage-peers", "1").cause


def test_a_spec_that_is_none() -> None:
    assert refused("--preset", "giant", "--replicas", "1").code is ErrorCode.UNKNOWN_PRESET
    assert refused("--set", "link.k=5000", "--replicas", "1").code is ErrorCode.BAD_SPEC
