"""What the benchmarks are made of, without their minutes: relays, predictions, tables."""

from __future__ import annotations

import asyncio
import math

from benchmarks.pipeline import (
    MODEL,
    Case,
    Result,
    arguments_of,
    compute_seconds,
    markdown_of,
    predict,
    rows_of,
    summary_of,
)
from benchmarks.pipeline_member import replica_of
from benchmarks.shaping import Relays
from protocol.spec import resolve

SPEC = resolve("tiny", overrides=MODEL)
WIDTH = SPEC.model.width


def result(k: int, seconds: float, predicted: float = 2.0) -> Result:
    case = Case(2, k, 10e6)
    return Result(case, k > 0, (0.1, 0.2), seconds, predicted, predicted, (0.5, 0.5), (0.5, 0.5), 1.0)


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


def test_compute_is_the_median_of_all_steps_but_the_first() -> None:
    def step(forward: float, backward: float) -> dict[str, object]:
        return {"passes": [["forward", forward], ["backward", backward]]}

    steps = [step(9, 9), step(1, 2), step(1, 4), step(1, 1)]
    assert compute_seconds([{"steps": steps}]) == (3,)


def test_every_member_of_a_chain_hosts_its_share_of_the_stages() -> None:
    for members in (2, 4):
        replica = replica_of(SPEC, members, 8, 4)
        assert [stage for each in replica.members for stage in each.stages] == [0, 1, 2, 3]
        assert [link.k for link in replica.links] == [8] * (members - 1)


def test_the_table_compares_with_uncompressed_activations() -> None:
    results = [result(0, 4.0), result(WIDTH // 8, 2.0), result(WIDTH, 4.4)]
    rows = list(rows_of(results, WIDTH))
    assert [row[0] for row in rows] == ["2", "2 paced", "2 paced"]
    assert [row[1] for row in rows] == ["uncompressed", "1/8", "1"]
    assert [row[-1] for row in rows] == ["", "2.00x", "0.91x"]
    assert markdown_of(results, WIDTH).count("\n") == 4
    assert summary_of(results).startswith("1 of 3 steps within 15 % of the prediction")


def test_the_quick_table_is_a_part_of_the_whole_one() -> None:
    whole, quick = arguments_of([]), arguments_of(["--quick"])
    assert (whole.members, whole.ratios, whole.bandwidths) == ([2, 4], [0, 1, 8, 32], [0, 10, 50, 100])
    for part, all_ in ((quick.members, whole.members), (quick.ratios, whole.ratios)):
        assert set(part) < set(all_)
