"""The coordinator's own peer fetches and serves a contested payload: real processes, on loopback."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.model.shapes import parameter_shapes
from protocol.algorithm.topk import sparsify
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import sign_descriptor
from protocol.types import ExchangeGroup, Finding, ManifestEntry
from protocol.wire.payload_codec import PayloadLayout, encode
from tests.builders import spec_of
from tests.support.hive_nodes import BRIEF, PATIENT, Node, gone, hosted_in, start_node

SPEC = spec_of()
LAYOUT = PayloadLayout(parameter_shapes(SPEC, 1), SPEC.outer)
PAYLOAD = encode(LAYOUT, {name: sparsify(torch.ones(t.shape), t) for name, t in LAYOUT.tensors.items()})


async def started(folder: Path, name: str, stack: AsyncExitStack, *initial_peers: str) -> Node:
    node = await start_node(folder, name, (), initial_peers)
    stack.push_async_callback(node.transport.close)
    return node


async def test_a_contested_payload_reaches_a_member_through_the_arbiter(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        arbiter = await started(tmp_path, "arbiter", stack)
        await arbiter.transport.host_arbiter(SPEC, tmp_path / "contested")
        dht = arbiter.transport.addresses
        owner, member, stranger = [
            await started(tmp_path, name, stack, *dht) for name in ("owner", "member", "stranger")
        ]
        for node in (owner, member, stranger):
            folder = tmp_path / node.identity.peer
            await node.transport.host_stages(hosted_in(folder, {1: LAYOUT.nbytes}))
            await node.transport.admit([arbiter.identity.peer])
        await arbiter.transport.admit([owner.identity.peer, member.identity.peer])
        unsigned = replace(owner.descriptor(PAYLOAD, 1, 1), codec=LAYOUT.codec, signature=b"")
        own = sign_descriptor(unsigned, owner.identity.sign)
        group = ExchangeGroup("group", (own,))
        await owner.transport.exchange(PAYLOAD, own, group, expected=1, deadline=PATIENT)

        verdict = await arbiter.transport.arbitrate(own, [owner.identity.peer], PATIENT)
        assert verdict.finding is Finding.HELD, verdict
        denied = await arbiter.transport.arbitrate(
            replace(own, sha256="0" * 64), [owner.identity.peer], PATIENT
        )
        assert (denied.finding, denied.refuted) == (Finding.NOT_FOUND, (owner.identity.peer,))

        await owner.transport.close()
        family = arbiter.processes
        family[0].kill()
        await gone(family)
        entry = ManifestEntry(own, (arbiter.identity.peer,))
        assert await member.transport.fetch_payload(entry, PATIENT) == PAYLOAD, "the new processes serve it"
        with pytest.raises(HetnodeError) as refused:
            await stranger.transport.fetch_payload(entry, BRIEF)
        assert refused.value.code is ErrorCode.PAYLOAD_UNAVAILABLE

        await arbiter.transport.forget_payloads(2)
        late = await started(tmp_path, "late", stack, *dht)  # a member which has nothing yet
        await late.transport.host_stages(hosted_in(tmp_path / "late", {1: LAYOUT.nbytes}))
        await arbiter.transport.admit([late.identity.peer])
        with pytest.raises(HetnodeError):
            await late.transport.fetch_payload(entry, BRIEF)
