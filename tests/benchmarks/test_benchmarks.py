"""What the benchmarks are made of, without their minutes: relays, predictions, sums, tables."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accounting, coordinator, rounds
from benchmarks.__main__ import PARTS, measure
from benchmarks.overlap import round_seconds
from benchmarks.pipeline import MODEL, Chain, compute_seconds, handling_seconds, predict
from benchmarks.pipeline_member import PipelineMember, replica_of
from benchmarks.pipeline_results import Case, Result, document_of, rows_of, summary_of
from benchmarks.rounds import tcp_bytes
from benchmarks.shaping import Relays
from benchmarks.tables import NotHere, Table, machine
from protocol.math.payload_layout import PayloadLayout
from protocol.run_files.resolve import resolve

SPEC = resolve("tiny", overrides=MODEL)
WIDTH = SPEC.model.width


def result(k: int, seconds: float, predicted: float = 2.0) -> Result:
    ratio, half = seconds / predicted, (0.5, 0.5)
    return Result(
        Case(2, k, 10e6), k > 0, (0.1, 0.2), half, seconds, predicted, 1.0, ratio, 1.2, half, half, 1.0
    )


async def test_relays_carry_every_byte_both_ways_in_order() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readexactly(300_000))[::-1])
        writer.close()

    sent = bytes(range(250)) * 1200
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    relays = Relays(delay=0.001)
    [endpoint] = await relays.join([1, 2], [server.sockets[0].getsockname()[1]])
    await relays.shape(100e6)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.split(":")[1]))
    writer.write(sent)
    assert await reader.read(-1) == sent[::-1]
    writer.close()
    await relays.close()
    server.close()


def test_a_prediction_is_the_cost_models_step() -> None:
    unshaped = predict(SPEC, Case(2, 0, math.inf), (0.3, 0.3), 1.0, 0.0)
    # 8 microbatches, and the fill and drain of one more member.
    assert math.isclose(unshaped.seconds, 9 * 0.3)
    shaped = predict(SPEC, Case(2, 0, 10e6), (0.3, 0.3), 1.0, 0.0)
    narrower = predict(SPEC, Case(2, WIDTH // 8, 10e6), (0.3, 0.3), 1.0, 0.0)
    assert unshaped.seconds < narrower.seconds < shaped.seconds


def test_a_microbatch_takes_the_median_of_the_steps() -> None:
    def step(forward: float, backward: float, handled: float) -> dict[str, object]:
        return {"passes": [["forward", forward], ["backward", backward]], "handled": handled}

    steps = [step(1, 2, 5), step(1, 4, 7), step(1, 1, 6)]
    assert compute_seconds([steps], 1) == (3,)
    assert compute_seconds([steps], 2) == (1.5,)
    assert handling_seconds([steps], paced=False) == (6,)
    assert handling_seconds([steps], paced=True) == (0,)


def test_every_member_of_a_chain_hosts_its_share_of_the_stages() -> None:
    for members in (2, 4):
        replica = replica_of(SPEC, members, 8, 4)
        assert [stage for each in replica.members for stage in each.stages] == [0, 1, 2, 3]
        assert [link.k for link in replica.links] == [8] * (members - 1)


async def test_the_commands_of_a_pipeline_have_the_arguments_that_its_members_take() -> None:
    class Asked(Chain):
        async def ask(self, arguments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            return list(arguments)

    for each in await Asked(["member"] * 2).train(8, steps=2, microbatches=4):
        arguments = {name: value for name, value in each.items() if name != "do"}
        inspect.signature(getattr(PipelineMember, each["do"])).bind("member", **arguments)


def test_the_table_compares_with_uncompressed_activations() -> None:
    results = [result(0, 4.0), result(WIDTH // 8, 2.0), result(WIDTH, 4.4)]
    rows = list(rows_of(results, WIDTH))
    assert [row[0] for row in rows] == ["2", "2 paced", "2 paced"]
    assert [row[1] for row in rows] == ["uncompressed", "1/8", "1"]
    assert [row[-1] for row in rows] == ["", "2.00x", "0.91x"]
    assert document_of(results, WIDTH, "command").rows == tuple(map(tuple, rows))
    found = summary_of(results).split("; ")
    assert found[0].startswith("1 of 3 steps within 15 % of the prediction from live figures")
    assert found[1].startswith("3 of 3 steps within 15 % of the prediction from those measured alone")
    assert found[2].startswith("0 of 3")


def test_a_table_in_markdown_has_numbers_to_the_right_and_no_stray_bars() -> None:
    table = Table("Title", "command", ("name", "bytes"), (("a|b", "1,234.5"), ("c", "-2 %")), ("A note.",))
    assert table.markdown.splitlines() == [
        *("### Title", "", "    command", ""),
        *("| name | bytes |", "| --- | ---: |", r"| a\|b | 1,234.5 |", "| c | -2 % |", "", "- A note."),
    ]


def test_the_line_about_the_machine_names_neither_host_nor_path() -> None:
    assert platform.node() not in machine()
    assert "/" not in machine()


def test_every_part_of_make_bench_offers_a_table() -> None:
    for part in PARTS:
        assert callable(importlib.import_module(f"benchmarks.{part}").table), part


@pytest.mark.parametrize(("error", "failed"), [(NotHere("no root"), False), (RuntimeError("broken"), True)])
def test_a_part_that_cannot_be_measured_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, failed: bool
) -> None:
    def table(quick: bool) -> Table:
        raise error

    monkeypatch.setattr(accounting, "table", table)
    measured = measure("accounting")
    assert measured.failed == failed
    assert str(error) in measured.markdown


def bytes_per_chunk(bits: accounting.Bits) -> float:
    chunks = 4096
    return bits(PayloadLayout({"matrix": (chunks, 4096)}, resolve("178m").outer)) / 8 / chunks


def test_accounting_gives_the_known_figures_of_a_chunk() -> None:
    assert bytes_per_chunk(accounting.dense(32)) == 16384
    assert bytes_per_chunk(accounting.dense(16, times=3)) == 3 * 8192
    assert bytes_per_chunk(accounting.chosen(12, 2)) == 56
    assert bytes_per_chunk(accounting.chosen(64, 8)) == 288
    assert math.isclose(bytes_per_chunk(accounting.entropy_bound), 41.27, abs_tol=0.005)


def test_a_payload_lies_between_the_entropy_bound_and_twelve_bit_indices() -> None:
    bound, twelve = bytes_per_chunk(accounting.entropy_bound), bytes_per_chunk(accounting.chosen(12, 2))
    enumerative = bytes_per_chunk(accounting.coded(indices="enumerative", quantizer="2bit"))
    elias_fano = bytes_per_chunk(accounting.coded(indices="elias-fano", quantizer="2bit"))
    assert bound < enumerative < 42.2 < elias_fano < twelve


LISTING = """\
ESTAB 0 0 10.78.0.1:4000 10.78.0.2:5000 users:(("p2pd",pid=7,fd=9)) cubic rto:204 bytes_sent:150 \
bytes_retrans:50 bytes_acked:100 bytes_received:23 segs_out:3
LISTEN 0 4096 0.0.0.0:4000 0.0.0.0:* users:(("p2pd",pid=7,fd=8)) cubic cwnd:10
ESTAB 0 0 10.78.0.1:4001 10.78.0.2:5001 users:(("p2pd",pid=77,fd=9)) cubic bytes_acked:1000
"""


def test_socket_bytes_are_those_of_the_processes_that_were_asked_for() -> None:
    assert tcp_bytes(LISTING, {7}) == 123
    assert tcp_bytes(LISTING, {7, 77}) == 1123
    assert tcp_bytes(LISTING, {8}) == 0


def test_a_round_is_held_against_what_the_link_can_carry() -> None:
    case = rounds.Case("name", (600_000, 400_000), 8e6)
    [row] = rounds.rows_of([rounds.Result(case, 3, 4_040_000.0, 4.2)])
    ideal = 2 * 1.0 * 1514 / 1448  # two others' megabyte, a second each, and the headers of the frames
    assert row == (
        "name",
        "3",
        "8 Mb/s",
        "4,000.0",
        "4,040.0",
        "1.00 %",
        "2.09",
        "4.20",
        f"{4.2 / ideal:.2f}",
    )


def decision(round_number: int, time: float, stage: int = 0, committed: bool = True) -> dict[str, object]:
    what = {"event": "decision", "stage": stage, "round": round_number, "reason": "no payloads"}
    return {**what, "time": time, "committed": committed}


def test_a_round_lasts_from_last_decision_to_last_decision_after_the_warm_up() -> None:
    events = [
        *(decision(1, 100.0), decision(2, 110.0), decision(2, 111.0, stage=1), {"event": "finished"}),
        *(decision(3, 113.0), decision(3, 112.0, stage=1), decision(4, 116.0)),
    ]
    assert round_seconds(events) == pytest.approx(2.5)


@pytest.mark.parametrize(
    "events", [[], [decision(2, 1.0)], [decision(2, 1.0), decision(3, 2.0, committed=False)]]
)
def test_a_swarm_that_did_not_get_far_has_no_time_per_round(events: list[dict[str, object]]) -> None:
    with pytest.raises(RuntimeError):
        round_seconds(events)


def test_latencies_are_those_of_the_first_process_and_waits_end_with_the_last_call_of_all(
    tmp_path: Path,
) -> None:
    asked = {"Match 0 1": 1.0, "Match 0 2": 10.0}
    observed = {"plain": {"Join": {"7": 2}}, "asked": asked, "answered": {"Match 0 2": [12.25, 12.5]}}
    other = {"plain": {"Join": {"9": 1}}, "asked": {"Match 0 2": 12.0}, "answered": {"Match 0 2": [19.0]}}
    paths = [tmp_path / "observed.json", tmp_path / "other.json"]
    for path, part in zip(paths, (observed, other), strict=True):
        path.write_text(json.dumps(part))
    found = coordinator.latencies_of(paths)
    assert found == {"Join": Counter({7: 2}), "Match": Counter({250: 1, 500: 1})}
    assert coordinator.percentile(found["Match"], 0.5) == 250
    assert coordinator.percentile(found["Match"], 0.99) == 500
