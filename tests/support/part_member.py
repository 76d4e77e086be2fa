"""A member of a group that reduces in parts, as a process: ``POSITION FRACTIONS SECONDS STALLS ADDRESS...``.

It prints its peer id and an address, reads the sorted peer ids of the group, and exchanges the payload of its
position. One that stalls prints "stalled" when it has sent its first answer as a reducer, and its first parts
as a sender, and does no more. The others print as JSON the digest of the result, the positions of the
reducers whose parts are missing, and the positions that are not counted in all parts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows only typing's in rpc signatures

from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto.averaging_pb2 import AveragingData

from node.exchange.hive.reduction.part_exchange import PartExchange
from node.exchange.hive.reduction.part_plan import PartPlan, Reduction
from protocol.reduction.partition import partition
from protocol.reduction.parts import cut_payload
from protocol.reduction.stage_reducers import StageReducers
from tests.support.part_group import GROUP, LAYOUT, payload_of, uncounted


class StallingExchange(PartExchange):
    """Stops for ever after its first answer."""

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[AveragingData], context: P2PContext
    ) -> AsyncIterator[AveragingData]:
        async for message in super().rpc_aggregate_part(stream, context):
            yield message
            await stall()


async def stall() -> None:
    print("stalled", flush=True)
    await asyncio.Event().wait()


StallingExchange.__name__ = PartExchange.__name__  # hivemind names remote calls after the class


async def join(position: int, fractions: list[float], seconds: float, stalls: bool, known: list[str]) -> None:
    p2p = await P2P.create(known, nat_port_map=False)
    print(p2p.peer_id.to_base58(), (await p2p.get_visible_maddrs())[0], flush=True)
    members = tuple(map(PeerID.from_base58, (await asyncio.to_thread(sys.stdin.readline)).split()))
    weights = tuple(1.0 for _ in members)
    ranges = tuple(partition(LAYOUT.chunks.total, fractions))
    plan = PartPlan(LAYOUT, members, weights, ranges, (None,) * len(members))
    kind = StallingExchange if stalls else PartExchange
    about = cut_payload(LAYOUT, payload_of(position), plan.all_parts), StageReducers(LAYOUT)
    exchange = kind(p2p, PartExchange, "parts", GROUP, plan, *about, seconds)
    await exchange.add_p2p_handlers(p2p, namespace="parts")
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps(outcome(await exchange.exchange())), flush=True)
    await asyncio.to_thread(sys.stdin.readline)  # others may still wait for its answers
    await p2p.shutdown()


def outcome(reduction: Reduction) -> dict[str, Any]:
    plan, result = reduction.plan, reduction.result
    owners = [owner for owner, parts in zip(plan.members, plan.parts, strict=True) for _ in parts]
    pairs = list(zip(owners, reduction.parts, strict=True))
    reduced = b"".join(part.data for part in reduction.parts if part is not None)
    return {
        "digest": None if result is None else hashlib.sha256(result).hexdigest(),
        "reduced": hashlib.sha256(reduced).hexdigest(),
        "missing": sorted({owner.to_base58() for owner, part in pairs if part is None}),
        "uncounted": [member.to_base58() for member in plan.members if uncounted(reduction, member)],
    }


def main() -> None:
    position, fractions, seconds, stalls, *known = sys.argv[1:]
    shares = [float(each) for each in fractions.split(",")]
    asyncio.run(join(int(position), shares, float(seconds), stalls == "stalls", known))


if __name__ == "__main__":
    main()
