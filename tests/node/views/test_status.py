"""What `hetnode status` and the live view of a local swarm show of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from node.views.status import as_of_note, batch_part, progress_line, replica_table, status_view
from node.views.text import bar, count, duration, megabits
from node.views.watch import sparkline
from protocol.run_files.resolve import resolve
from protocol.status import Cause, CauseCode, Measurement, RunPhase, Wait
from protocol.types import (
    Capacity,
    Dialer,
    Estimates,
    Link,
    LinkEstimate,
    Member,
    PeerId,
    Plan,
    Replica,
    StageRange,
)
from tests.builders import status_of

FAST = Estimates(Capacity("cpu", 0, 1, flops=2e9, uplink=5e6, downlink=1e7, round_trip=0.02))


def measurement(peer: str, round_number: int, position: int, sent: int) -> Measurement:
    return Measurement(
        PeerId(peer),
        round_number,
        replica=1,
        position=position,
        complete=position == 1,
        validation_loss=2.5,
        link_bytes_sent=sent,
        link_bytes_dense=8 * sent,
        inner_seconds=1.0,
        tokens=100,
    )


def shown(view: object, width: int = 200) -> str:
    console = Console(width=width, height=24)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def test_a_replaced_member_no_longer_counts_in_its_replica() -> None:
    measurements = (
        measurement("new", 9, 0, 1000),
        measurement("former", 5, 0, 500_000),
        measurement("last", 9, 1, 1000),
    )
    text = shown(replica_table(status_of(measurements=measurements)))
    assert "1 (2 members)" in text
    assert "2.0 kB  8x" in text


@pytest.mark.parametrize(
    ("ks", "text"), [((8,), "8"), ((0,), "uncompressed"), ((0, 8, 8), "8, uncompressed")]
)
def test_the_k_of_the_links_of_a_replica_is_shown(ks: tuple[int, ...], text: str) -> None:
    members = tuple(Member(PeerId(f"m{i}"), StageRange(i, i + 1), "h:1") for i in range(1 + len(ks)))
    replica = Replica(1, members, tuple(Link(k, Dialer.UPSTREAM) for k in ks))
    measurements = tuple(measurement(f"m{i}", 9, i, 1000) for i in range(2))
    status = replace(status_of(measurements=measurements), plan=Plan(1, 1, 0, (replica,), "test"))
    assert shown(replica_table(status)).splitlines()[-1].rstrip().endswith(f" {text}")


def test_a_replica_without_a_measurement_of_its_last_member_has_no_row() -> None:
    assert not status_of(measurements=[measurement("first", 9, 0, 1000)]).figures


def test_the_status_shows_peers_their_speed_and_what_the_run_does() -> None:
    link = LinkEstimate(PeerId("x" * 40 + "friend"), 0.01, 0.0, incoming=1e6)
    capacity = Capacity("cpu", 0, 1, flops=2e9, uplink=5e6, downlink=1e7, round_trip=0.02)
    status = status_of(estimates=Estimates(capacity, 0.25, (link,)))
    text = shown(status_view(status))
    for part in (
        "r0 stages 0-1",
        "2.0 GFLOP/s",
        "250 ms/microbatch",
        "40.0 Mb/s up, 80.0 down, 20 ms",
        "8.0 Mb/s from friend",
        "training: round 2 of 3",
        "3 stage rounds committed, 1 aborted, anchors agree",
    ):
        assert part in text


def test_the_status_fits_a_small_terminal() -> None:
    measured = tuple(measurement(name, 9, at, 123_456) for at, name in enumerate(("first", "last")))
    status = replace(status_of(estimates=FAST, measurements=measured), round_number=2)
    peer = replace(
        status.peers[0],
        waits=tuple(Wait),
        assignment="replica-12, stages 10-15",
        rests=True,
        round_number=12345,
    )
    text = shown(status_view(replace(status, peers=(peer,) * 3)), width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    for part in (
        "r12 stages",
        "12345",
        "1/2",
        "1.5 s",
        "assignment",
        "val. loss",
        "payloads per round",
        "2.5000",
    ):
        assert part in text
    row = next(line for line in text.splitlines() if line.startswith(peer.peer[-8:]))
    assert "paused" in row
    # Speeds and connections need more room.
    assert "GFLOP/s" not in text
    assert "2.0 GFLOP/s" in shown(status_view(status), width=120)


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[31m\x1b]0;title\x07red",
        "[bold]x[/bold] [/] [link=http://x]y",
        "a\u202etxt.exe\nb",
        "x" * 100_000,
    ],
)
def test_what_peers_write_is_shown_as_text_and_cut(hostile: str) -> None:
    status = status_of()
    peer = replace(
        status.peers[0],
        problem=hostile,
        role_reason=hostile,
        cause=Cause(CauseCode.MEMORY_LACKING, detail=hostile),
        assignment=hostile,
        peer=hostile,
    )
    text = shown(status_view(replace(status, cause=peer.cause, run=hostile, peers=(peer,))), width=80)
    assert len(text) < 6000
    assert "\x1b" not in text.replace("\x1b[0m", "")
    assert "\u202e" not in text
    if "[bold]" in hostile:
        assert "[bold]x[/bold] [/]" in text


def test_many_notes_about_peers_are_cut() -> None:
    status = status_of()
    peers = tuple(replace(status.peers[0], problem=f"problem {i}") for i in range(100))
    text = shown(status_view(replace(status, peers=peers)))
    assert "problem 0" in text
    assert "more: 'hetnode status --json' has all" in text
    assert "problem 50" not in text


def test_a_status_from_a_folder_says_as_of_when() -> None:
    status = replace(status_of(), time=1000.0)
    note = as_of_note(status, 1090.0)
    text = shown(status_view(status, live=False, notes=[note]))
    assert "The coordinator is not running. This is as of" in text
    assert "1:30 min ago" in text
    assert "seen" not in text
    note = as_of_note(replace(status_of(), time=0.0), 1.0, "Full.")
    assert note.plain == "Full. Nothing has happened in this run yet."


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"round_number": 2, "round_seconds": 3.0}, "this round 3.0 s, end unknown"),
        (
            {
                "round_number": 2,
                "round_seconds": 75.0,
                "expected_round_seconds": 90.0,
                "remaining_seconds": 9000.0,
            },
            "this round 1:15 min of about 1:30 min, end in 2 h 30 min",
        ),
        ({"phase": RunPhase.FINISHED, "rounds_decided": 3, "remaining_seconds": 0.0}, "3/3 rounds"),
    ],
)
def test_the_line_of_progress(changes: dict[str, Any], expected: str) -> None:
    line = progress_line(replace(status_of(rounds=3), **changes)).plain
    assert expected in line
    assert ("end" in line) is (changes.get("phase") is not RunPhase.FINISHED)


def test_figures_for_people() -> None:
    assert [duration(each) for each in (0, 0.4, 9.96, 59.6, 61, 3600, 1e6, None, math.nan, math.inf)] == [
        *("0 s", "0.4 s", "10 s", "1:00 min", "1:01 min", "1 h 0 min", "11 d 13 h", "?", "?", "?")
    ]
    assert [count(each) for each in (0, 999, 12_400, 3.1e6, 2e9, 1e18)] == [
        *("0", "999", "12.4k", "3.1M", "2.0G", "1000P")
    ]
    assert (megabits(1e6), megabits(1e8)) == ("8.0 Mb/s", "800 Mb/s")
    assert [len(bar(share, 10)) for share in (-1, 0, 0.33, 1, 7)] == [10] * 5


def test_steps_done_are_those_of_the_slowest_member() -> None:
    status = status_of(round_number=4, inner_step=1)  # two steps a round
    assert status.steps_done == 7
    last = replace(measurement("last", 9, 1, 0), peer=status.peers[0].peer)
    assert replace(status, measurements=(last,)).steps_done == 18
    assert replace(status, peers=()).steps_done == 0


def test_a_line_of_losses_fits_its_width() -> None:
    assert sparkline([], 10) == sparkline([math.nan], 10) == sparkline([1.0], 0) == ""
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([3.0, math.nan, 1.0, math.inf, 2.0], 10) == "█▁▅"
    assert sparkline([float(i // 10) for i in range(80)], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([1.0, 2.0] * 5000, 33)) == 33


@pytest.mark.parametrize(
    ("shares", "more", "expected"),
    [
        ([0, 0], {}, "batch 16"),
        ([6, 6], {"global_batch": 24}, "batch 24 of 24"),
        ([1] * 13, {"global_batch": 24}, "batch 26 of 24"),
    ],
)
def test_the_batch_of_the_swarm(shares: list[int], more: dict[str, Any], expected: str) -> None:
    constant = {f"grouping.{name}": value for name, value in {"batch": "constant", **more}.items()}
    overrides = {"inner.microbatches": 4, "inner.microbatch_size": 2, **(constant if more else {})}
    replicas = [Replica(index, (), (), microbatches=share) for index, share in enumerate(shares)]
    assert batch_part(resolve("nano", overrides=overrides), replicas) == expected
