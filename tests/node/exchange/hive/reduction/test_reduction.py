"""A group reduces its payloads in parts between real processes of hivemind on loopback."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from node.core.model.shapes import parameter_shapes
from node.exchange.transport import ExchangeResult, RoundEnd
from node.security.identity import open_identity
from protocol.reduction.counted_result import CountedResult
from protocol.reduction.parts import ReductionLayout, decode_result
from protocol.types import ExchangeGroup, ManifestEntry, PayloadDescriptor
from tests.builders import spec_of
from tests.support.hive_nodes import BRIEF, PATIENT, RUN, Node, canonical, describe, start_as
from tests.support.reduction import payloads_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEC = spec_of(outer__exchange="reduced")
LAYOUT = ReductionLayout(parameter_shapes(SPEC, 0), SPEC.outer)
PAYLOADS = payloads_of(LAYOUT, 3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Node]]:
    folder: Path = tmp_path_factory.mktemp("reducing")
    async with AsyncExitStack() as stack:
        found: list[Node] = []
        identities = [open_identity(folder / f"{name}.key") for name in "abc"]
        allowed = [each.peer for each in identities]
        for identity in identities:
            known = [address for node in found for address in node.transport.addresses]
            about = identity, folder / identity.peer, (0,), known, False, allowed
            found.append(await start_as(*about, spec=SPEC))
            stack.push_async_callback(found[-1].transport.close)
        yield found


def group_of(nodes: Sequence[Node], round_number: int) -> ExchangeGroup:
    pairs = zip(nodes, PAYLOADS, strict=False)
    payloads = [describe(node.identity, data, 0, round_number) for node, data in pairs]
    return ExchangeGroup(f"{RUN}/0/{round_number}", canonical(payloads))


async def reduce(nodes: Sequence[Node], round_number: int, *absent: int) -> list[ExchangeResult]:
    group = group_of(nodes, round_number)
    return await asyncio.gather(
        *(
            node.transport.exchange(
                data,
                describe(node.identity, data, 0, round_number),
                group,
                expected=len(nodes),
                deadline=BRIEF if absent else PATIENT,
            )
            for position, (node, data) in enumerate(zip(nodes, PAYLOADS, strict=True))
            if position not in absent
        )
    )


async def fetch(asking: Node, found: ExchangeResult, round_number: int, *holders: Node) -> bytes:
    assert found.claim is not None
    named = PayloadDescriptor(
        run=RUN,
        stage=0,
        round_number=round_number,
        owner=holders[0].identity.peer,
        anchor_digest="",
        codec="",
        weight=0.0,
        nbytes=found.claim.nbytes,
        sha256=found.claim.sha256,
    )
    entry = ManifestEntry(named, tuple(holder.identity.peer for holder in holders))
    return (await asking.transport.fetch_payload(entry, PATIENT)).read(entry.descriptor.nbytes)


async def test_all_members_hold_one_result_whose_rest_follows_in_the_next_committed_round(
    nodes: list[Node],
) -> None:
    first = await reduce(nodes, 1)
    claims = {each.claim for each in first}
    assert len(claims) == 1
    data = [await fetch(node, first[0], 1, node) for node in nodes]
    assert len(set(data)) == 1
    counted = CountedResult.from_bytes(LAYOUT, data[0])
    assert set(counted.senders) == {(0, 1, 2)}
    assert set(decode_result(LAYOUT, counted.result)) == set(LAYOUT.shapes)
    # Equal payloads, and no residual yet: only a committed round changes what is sent.
    sha256 = hashlib.sha256(data[0]).hexdigest()
    await asyncio.gather(*(node.transport.end_round(RoundEnd(0, 1)) for node in nodes))
    again = await reduce(nodes, 2)
    assert [each.claim.sha256 for each in again if each.claim] == [sha256] * 3
    await asyncio.gather(*(node.transport.end_round(RoundEnd(0, 2, sha256)) for node in nodes))
    third = await reduce(nodes, 3)
    assert len({each.claim for each in third}) == 1
    assert third[0].claim is not None
    assert third[0].claim.sha256 != sha256
    await asyncio.gather(*(node.transport.end_round(RoundEnd(0, 3, rolled_back=True)) for node in nodes))
    fourth = await reduce(nodes, 4)
    assert [each.claim.sha256 for each in fourth if each.claim] == [sha256] * 3


async def test_without_a_reducer_nobody_has_a_result_and_the_exchange_ends_in_time(nodes: list[Node]) -> None:
    found = await reduce(nodes, 5, 2)
    assert [each.claim for each in found] == [None, None]
    assert [each.held[0].owner for each in found] == [node.identity.peer for node in nodes[:2]]


async def test_without_the_group_of_the_coordinator_nothing_is_reduced(nodes: list[Node]) -> None:
    own = describe(nodes[0].identity, PAYLOADS[0], 0, 6)
    found = await nodes[0].transport.exchange(PAYLOADS[0], own, None, expected=3, deadline=PATIENT)
    assert found == ExchangeResult((own,))
