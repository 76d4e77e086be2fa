"""The coordinator's own peer fetches and serves a contested payload: real processes, on loopback."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import torch

from node.core.model.shapes import parameter_shapes
from protocol.codec.payload import encode
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import sparsify
from protocol.trust.envelope import sign_descriptor
from protocol.types import ExchangeGroup, Finding, ManifestEntry
from tests.builders import spec_of
from tests.support.hive_nodes import PATIENT, Node, gone, hosted_in, start_node

SPEC = spec_of()
LAYOUT = PayloadLayout(parameter_shapes(SPEC, 1), SPEC.outer)
PAYLOAD = encode(LAYOUT, {name: sparsify(torch.ones(t.shape), t) for name, t in LAYOUT.tensors.items()})


async def started(folder: Path, name: str, stack: AsyncExitStack, *initial_peers: str) -> Node:
    node = await start_node(folder, name, (), initial_peers)
    stack.push_async_callback(node.transport.close)
    return node


async def test_the_processes_that_replace_a_dead_host_serve_what_was_contested(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        arbiter = await started(tmp_path, "arbiter", stack)
        await arbiter.transport.host_arbiter(SPEC, tmp_path / "contested")
        dht = arbiter.transport.addresses
        owner, member = [await started(tmp_path, name, stack, *dht) for name in ("owner", "member")]
        for node in (owner, member):
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

        await owner.transport.close()
        family = arbiter.processes
        family[0].kill()
        await gone(family)
        entry = ManifestEntry(own, (arbiter.identity.peer,))
        assert (await member.transport.fetch_payload(entry, PATIENT)).read(len(PAYLOAD)) == PAYLOAD
