"""The rest of docs/protocol: a link with a hetnode node over a whole run, and a record in the DHT."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from coordinator.base.phrases import short
from protocol.types import Role
from tests.builders import spec_of
from tests.hostile.link import Link, number
from tests.hostile.peer import Peer, Refused, cancel, join_all
from tests.support import commands
from tests.support.processes import ProcessSwarm

ROUNDS, STEPS = 2, 2


async def test_a_record_in_the_dht(tmp_path: Path) -> None:
    with ProcessSwarm(spec_of(1, 1), tmp_path, {}) as run:
        run.start_coordinator()
        [peer] = await join_all(run.invite(), [Peer()])
        given: dict[str, Any] = {
            "run": peer.run,
            "endpoint": "127.0.0.1:7",
            "dht_peers": list(peer.dht_peers),
        }
        for name, content in (("identity", peer.identity.file), ("certificate", peer.certificate)):
            (tmp_path / name).write_bytes(content)
            given[name] = str(tmp_path / name)
        (tmp_path / "given").write_text(json.dumps(given))
        done = await asyncio.to_thread(commands.run, "tests.hostile.dht_record", str(tmp_path / "given"))
        assert done.returncode == 0, done.stderr
        stored, *found = done.stdout.split()
        assert stored == "stored"
        # The coordinator has a record of its own.
        assert found[found.index(peer.id) + 1] == "127.0.0.1:7"
        await peer.close()


async def inner_phase(link: Link, spec: dict[str, Any], round_number: int, k: int, step: int = 0) -> int:
    """The last member of a pipeline from `step` on, with gradients of zeros. Returns the step left out."""
    inner, context = spec["inner"], spec["model"]["context"]
    shape = (inner["microbatch_size"], context, k)
    zeros = bytes(2 * shape[0] * shape[1] * shape[2])
    while True:
        phase = await link.receive()
        assert (phase.kind, phase.round_number, phase.step) == ("phase", round_number, step)
        if phase.value == 0.0:
            return step
        for microbatch in range(inner["microbatches"]):
            frame = await link.receive()
            assert (frame.kind, frame.step, frame.microbatch) == ("forward", step, microbatch)
            assert list(frame.tensors) == ["activation", "tokens"]
            assert frame.tensors["activation"][1:3] == ("bf16", shape)
            assert frame.tensors["tokens"][1:3] == ("u8", (shape[0], context + 1))
            await link.send("backward", round_number, step, [("gradient", "bf16", shape, zeros)], microbatch)
        await link.send("norm", round_number, step, number(0.0))
        assert (await link.receive()).kind == "step"
        step += 1


@asynccontextmanager
async def member_of(
    run: ProcessSwarm,
) -> AsyncIterator[tuple[Peer, Link, int, asyncio.Task[None], dict[str, Any]]]:
    """The second member of the pipeline, before round 1: peer, link, k, heartbeats, and specification."""
    peer = Peer()
    await peer.enroll(run.invite())
    await wait_for_node(peer)
    # Without an endpoint, so that this end dials; no speed, so that the order of arrival is kept.
    capacity = {"device": "cpu", "memory_bytes": 1 << 33, "threads": 1}
    await peer.join(role="stage", capacity=capacity)
    alive = asyncio.create_task(peer.keep_alive(1.0))
    try:
        fields, plan = json.loads(peer.spec_json), await peer.first_plan()
        await peer.attest(1, 0)
        link, k = await dial_with_retries(peer, plan, 1)
        try:
            await validation(link, fields, 0)
            yield peer, link, k, alive, fields
        finally:
            await link.close()
    finally:
        await cancel(alive)
        await peer.close()


async def test_a_member_whose_gradients_hold_one_nan_is_named_and_kept_apart(
    tmp_path: Path,
) -> None:
    spec = spec_of(2, 0, 1, rounds=ROUNDS, inner__steps=STEPS)
    with ProcessSwarm(spec, tmp_path, {"node": Role.STAGE}) as run:
        run.start()
        async with member_of(run) as (peer, link, k, _, fields):
            assert (await link.receive()).kind == "phase"
            forward = await link.receive()
            shape = (fields["inner"]["microbatch_size"], fields["model"]["context"], k)
            poison = b"\xc0\x7f" + bytes(2 * shape[0] * shape[1] * shape[2] - 2)
            await link.send("backward", 1, 0, [("gradient", "bf16", shape, poison)], forward.microbatch)
            apart = (
                f"{short(peer.id)} are apart for a while: Tensor 'gradient' holds values that are not finite"
            )
            await asyncio.to_thread(run.wait_log, "coordinator", apart, 60)


async def validation(link: Link, spec: dict[str, Any], round_number: int) -> None:
    for microbatch in range(spec["data"]["validation_batches"]):
        frame = await link.receive()
        assert (frame.kind, frame.round_number, frame.microbatch) == ("evaluate", round_number, microbatch)


async def wait_for_node(peer: Peer) -> None:
    """Return when the node has joined. The first peer gets the first stage."""
    while True:
        if (await peer.call("Status")).peers:
            return
        await asyncio.sleep(0.1)


async def dial_with_retries(peer: Peer, plan: Any, round_number: int) -> tuple[Link, int]:
    """The link to the member before, and its k. The neighbour may see the plan later than this peer."""
    (replica,) = plan.replicas
    upstream, own = replica.members
    assert own.peer == peer.id
    assert replica.links[0].dialer == "downstream"
    while True:
        try:
            link = await Link.dial(
                peer,
                upstream.endpoint,
                upstream.peer,
                plan.epoch,
                round_number,
                replica=replica.index,
                position=1,
            )
        except Refused as refused:
            if refused.code != "unknown-peer" and refused.status.name != "UNAVAILABLE":
                raise
            await asyncio.sleep(0.2)
        else:
            return link, replica.links[0].k


async def test_a_pipeline_of_a_node_and_a_scripted_member(tmp_path: Path) -> None:
    spec = spec_of(2, 0, 1, rounds=ROUNDS, inner__steps=STEPS)
    with ProcessSwarm(spec, tmp_path, {"node": Role.STAGE}) as run:
        run.start()
        async with member_of(run) as (peer, link, k, alive, fields):
            for round_number in range(1, ROUNDS + 1):
                assert await inner_phase(link, fields, round_number, k) == STEPS
                decision = await peer.contribute(1, round_number)
                assert decision.committed
                assert (await peer.call("AwaitDecision", stage=0, round=round_number)).committed
                await inner_phase(link, fields, round_number, k, STEPS + 1)
                await validation(link, fields, round_number)
            await link.part()
            await cancel(alive)
            await peer.call("Leave", reason="finished")
            run.wait_over(60, "node")
        assert [line["committed"] for line in run.decisions()] == [True] * ROUNDS * 2
