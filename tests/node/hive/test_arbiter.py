"""The coordinator's own peer fetches and serves a contested payload: real processes, on loopback."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.hive.lasting import LastingTransport
from node.hive.transport import HivemindTransport
from node.model.shapes import parameter_shapes
from node.security.identity import open_identity
from protocol.algorithm.topk import sparsify
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import sign_descriptor
from protocol.types import ExchangeGroup, Finding, ManifestEntry
from protocol.wire.payload_codec import PayloadLayout, encode
from tests.builders import spec_of
from tests.support.hive_nodes import BRIEF, PATIENT, RUN, Node, certified, gone, hosted_in

SPEC = spec_of()
LAYOUT = PayloadLayout(parameter_shapes(SPEC, 1), SPEC.outer)
PAYLOAD = encode(LAYOUT, {name: sparsify(torch.ones(t.shape), t) for name, t in LAYOUT.tensors.items()})


async def lasting(folder: Path, name: str, stack: AsyncExitStack, *initial_peers: str) -> Node:
    identity = open_identity(folder / f"{name}.key")

    async def begin(port: int) -> HivemindTransport:
        return await HivemindTransport.start(
            identity=identity,
            **certified(identity),
            run=RUN,
            initial_peers=initial_peers,
            listen_port=port,
        )

    hivemind = await LastingTransport.start(begin, 0)
    stack.push_async_callback(hivemind.close)
    return Node(identity, hivemind)


async def test_a_contested_payload_reaches_a_member_through_the_arbiter(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        arbiter = await lasting(tmp_path, "arbiter", stack)
        await arbiter.hivemind.host_arbiter(SPEC, tmp_path / "contested")
        dht = arbiter.hivemind.addresses
        owner, member, stranger = [
            await lasting(tmp_path, name, stack, *dht) for name in ("owner", "member", "stranger")
        ]
        for node in (owner, member, stranger):
            folder = tmp_path / node.identity.peer
            await node.hivemind.host_stages(hosted_in(folder, {1: LAYOUT.nbytes}))
            await node.hivemind.admit([arbiter.identity.peer])
        await arbiter.hivemind.admit([owner.identity.peer, member.identity.peer])
        unsigned = replace(owner.descriptor(PAYLOAD, 1, 1), codec=LAYOUT.codec, signature=b"")
        own = sign_descriptor(unsigned, owner.identity.sign)
        group = ExchangeGroup("group", (own,))
        await owner.hivemind.exchange(PAYLOAD, own, group, expected=1, deadline=PATIENT)

        verdict = await arbiter.hivemind.arbitrate(own, [owner.identity.peer], PATIENT)
        assert verdict.finding is Finding.HELD, verdict
        denied = await arbiter.hivemind.arbitrate(
            replace(own, sha256="0" * 64), [owner.identity.peer], PATIENT
        )
        assert (denied.finding, denied.refuted) == (Finding.NOT_FOUND, (owner.identity.peer,))

        await owner.hivemind.close()
        family = arbiter.processes
        family[0].kill()
        await gone(family)
        entry = ManifestEntry(own, (arbiter.identity.peer,))
        assert await member.hivemind.fetch_payload(entry, PATIENT) == PAYLOAD, "the new processes serve it"
        with pytest.raises(HetnodeError) as refused:
            await stranger.hivemind.fetch_payload(entry, BRIEF)
        assert refused.value.code is ErrorCode.PAYLOAD_UNAVAILABLE

        await arbiter.hivemind.forget_payloads(2)
        with pytest.raises(HetnodeError):
            await (await lasting_member(tmp_path, stack, dht, arbiter)).fetch_payload(entry, BRIEF)


async def lasting_member(
    folder: Path, stack: AsyncExitStack, dht: tuple[str, ...], arbiter: Node
) -> LastingTransport:
    """Another member, which has nothing yet."""
    node = await lasting(folder, "late", stack, *dht)
    assert isinstance(node.hivemind, LastingTransport)
    await node.hivemind.host_stages(hosted_in(folder / "late", {1: LAYOUT.nbytes}))
    await arbiter.hivemind.admit([node.identity.peer])
    return node.hivemind
