"""Members of a group, each with libp2p's daemon of its own, that reduce the parts of one stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from hivemind.p2p import P2P, PeerID

from node.exchange.hive.reduction.part_exchange import PartExchange
from node.exchange.hive.reduction.part_plan import PartPlan, Reduction
from protocol.reduction.partition import PartRange, partition
from protocol.reduction.parts import Reducer, ReductionLayout, cut_payload, join_parts
from protocol.reduction.stage_reducers import StageReducers
from protocol.server.line import UNLIMITED, Line
from protocol.spec.outer import OuterSpec
from tests.support import reduction

GROUP = b"run/0/1"
LAYOUT = ReductionLayout(
    {"emb": (300, 400), "norm": (50,), "wq": (400, 300)},
    OuterSpec(exchange="reduced", chunk=256, top_k=32, reduced_top_k=0, quantizer="none"),
)
"""Its results are dense, so each reducer sends several messages."""


def payload_of(seed: int) -> bytes:
    return reduction.payload_of(LAYOUT, seed)


def plan_of(peers: Sequence[P2P], fractions: Sequence[float]) -> PartPlan:
    weights = tuple(1.0 + position for position in range(len(peers)))
    ranges = tuple(partition(LAYOUT.chunks.total, fractions))
    return PartPlan(LAYOUT, tuple(each.peer_id for each in peers), weights, ranges, (None,) * len(peers))


@dataclass(frozen=True)
class PartGroup:
    """Peers in the order of a group, all connected to each other; payloads by position."""

    peers: Sequence[P2P]
    payloads: list[bytes] = field(default_factory=lambda: [payload_of(seed) for seed in range(4)])

    def plan(self, fractions: Sequence[float] = (1, 1, 1, 1)) -> PartPlan:
        return plan_of(self.peers, fractions)

    def members(
        self,
        plan: PartPlan,
        seconds: float,
        *kinds: type[PartExchange],
        lines: Sequence[Line] = (UNLIMITED,) * 4,
    ) -> list[PartExchange]:
        """The first members of the group, of these kinds; without kinds all members of the usual one."""
        found = []
        for position, kind in enumerate(kinds or [PartExchange] * len(self.peers)):
            kind.__name__ = PartExchange.__name__  # hivemind names remote calls after the class
            network = self.peers[position], PartExchange, plan_prefix(plan), GROUP
            sent = cut_payload(LAYOUT, self.payloads[position], plan.all_parts)
            about = plan, sent, StageReducers(LAYOUT), seconds
            found.append(kind(*network, *about, lines[position]))
        return found

    async def run(self, members: Sequence[PartExchange], plan: PartPlan) -> list[Reduction]:
        """Serve the calls of all `members` and let them exchange."""
        peers = {each.peer_id: each for each in self.peers}
        async with AsyncExitStack() as stack:
            for each in members:
                where = {"p2p": peers[each.peer_id], "namespace": plan_prefix(plan)}
                await each.add_p2p_handlers(**where)
                stack.push_async_callback(each.remove_p2p_handlers, **where)
            return list(await asyncio.gather(*(each.exchange() for each in members)))

    def expected(self, plan: PartPlan, counted: Sequence[int]) -> bytes:
        """The result if the parts of these members count, and no others."""
        cut = [cut_payload(LAYOUT, self.payloads[position], plan.all_parts) for position in counted]
        weights = [plan.weights[position] for position in counted]
        parts = [
            Reducer(LAYOUT, part).reduce([each[number] for each in cut], weights)
            for number, part in enumerate(plan.all_parts)
        ]
        return join_parts(LAYOUT, parts, plan.all_parts)


def uncounted(reduction: Reduction, member: PeerID) -> tuple[PartRange, ...]:
    """The parts of the payload of `member` that reducers say they have not counted."""
    position, parts = reduction.plan.members.index(member), reduction.plan.all_parts
    pairs = zip(parts, reduction.parts, strict=True)
    return tuple(part for part, reduced in pairs if reduced is not None and position not in reduced.senders)


def plan_prefix(plan: PartPlan) -> str:
    """A namespace of the remote calls of one plan: members of one test do not answer another one."""
    return f"parts-{id(plan)}"


@asynccontextmanager
async def open_group(size: int = 4, others: Sequence[P2P] = ()) -> AsyncIterator[PartGroup]:
    """So many new peers, which are connected to `others`, too."""
    async with AsyncExitStack() as stack:
        peers: list[P2P] = []
        for _ in range(size):
            known = [address for each in (*others, *peers) for address in await each.get_visible_maddrs()]
            peers.append(await P2P.create(known, nat_port_map=False))
            stack.push_async_callback(peers[-1].shutdown)
        yield PartGroup(sorted(peers, key=lambda each: each.peer_id.to_base58()))
