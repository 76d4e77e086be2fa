"""What every transport does: hivemind's, between real processes on loopback, and the virtual network's.

Each scenario has the same four peers; rounds and names of further peers are its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from node.checkpoint.download import CheckpointDownload
from node.core.model.shapes import parameter_shapes
from node.exchange.hive import transport as hive
from node.exchange.transport import TransportPackage
from node.ipc.stored_payload import StoredPayload
from node.security.identity import open_identity
from protocol.codec.payload import encode
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import header_of, size_of
from protocol.math.outer_step import anchor_digest
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import sparsify
from protocol.trust.envelope import sign_descriptor
from protocol.types import ExchangeGroup, Finding, ManifestEntry, Part, PayloadDescriptor, PeerId, StateRecord
from tests.builders import spec_of
from tests.support.certificates import authority
from tests.support.hive_nodes import (
    BRIEF,
    CAPACITY,
    KEEP_ROUNDS,
    PATIENT,
    RUN,
    UNHURRIED,
    Node,
    canonical,
    describe,
    record_of,
)
from tests.support.peer_network import PeerNetwork, Run, hive_runs, virtual_runs
from tests.virtual.transport import VirtualPackage

PACKAGES: list[type[TransportPackage] | TransportPackage] = [hive, VirtualPackage]  # what mypy checks
CONTRACT: dict[str, Callable[[PeerNetwork], Coroutine[Any, Any, None]]] = {}


def scenario(work: Callable[..., Coroutine[Any, Any, None]], **options: Any) -> Callable[..., Any]:
    """A part of the contract, with each of the options that follow its name."""
    name = " ".join([work.__name__.replace("_", "-"), *map(str, options.values())])
    CONTRACT[name] = partial(work, **options)
    return work


@pytest.fixture(scope="module", params=[hive_runs, virtual_runs], ids=["hive", "virtual"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    authority()  # made once, on real time
    with request.param(tmp_path_factory.mktemp("peers")) as runs:
        yield runs


def given(**cases: tuple[Any, ...]) -> Callable[..., Any]:
    """A part of the contract for each value of its one option."""

    def register(work: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Any]:
        for name, values in cases.items():
            for value in values:
                scenario(work, **{name: value})
        return work

    return register


@scenario
async def a_group_gathers_the_payloads_of_two_stages_at_once(network: PeerNetwork) -> None:
    members = {0: (network.alice, network.bob), 1: (network.alice, network.bob, network.carol)}
    payloads = {(stage, node): os.urandom(CAPACITY - stage) for stage in members for node in members[stage]}
    descriptors = {
        (stage, node): node.descriptor(payload, stage, 1) for (stage, node), payload in payloads.items()
    }
    groups = {stage: canonical([descriptors[stage, node] for node in members[stage]]) for stage in members}
    held = await asyncio.gather(
        *(
            node.exchange(payload, descriptors[stage, node], groups[stage])
            for (stage, node), payload in payloads.items()
        )
    )
    for (stage, node), descriptors_held in zip(payloads, held, strict=True):
        assert descriptors_held == groups[stage]
        for owner in members[stage]:
            # The node asks only itself, so the payload can only come from the exchange.
            assert await node.fetch(descriptors[stage, owner], node) == payloads[stage, owner]


@given(nbytes=(0, 256 * 1024))
async def payloads_of_these_lengths_are_gathered(network: PeerNetwork, nbytes: int) -> None:
    payloads = bytes(nbytes), b"\1" * nbytes
    group = [
        node.descriptor(data, 1, 2) for node, data in zip((network.alice, network.bob), payloads, strict=True)
    ]
    held = await asyncio.gather(
        network.alice.exchange(payloads[0], group[0], group),
        network.bob.exchange(payloads[1], group[1], group),
    )
    assert held[0] == held[1] == canonical(group)


@scenario
async def a_payload_of_another_length_is_not_fetched(network: PeerNetwork) -> None:
    """All payloads of a stage and round have one length: a longer one is a waste of everybody's line."""
    own, longer = network.alice.descriptor(b"own", 1, 3), network.bob.descriptor(bytes(256 * 1024), 1, 3)
    async with asyncio.timeout(PATIENT / 2):
        assert await network.alice.exchange(b"own", own, [own, longer]) == (own,)


@given(served=("other bytes", "too few bytes", "too many bytes"))
async def a_payload_that_differs_from_its_announcement_is_kept_by_no_other_peer(
    network: PeerNetwork, served: str
) -> None:
    round_number = {"other bytes": 3, "too few bytes": 4, "too many bytes": 5}[served]
    good, announced = os.urandom(300_000), os.urandom(300_000)
    bad = {"other bytes": bytes(300_000), "too few bytes": announced[:-1], "too many bytes": announced + b"x"}
    nodes = (network.alice, network.bob)
    descriptors = [node.descriptor(good, 1, round_number) for node in nodes]
    corrupt = network.carol.descriptor(announced, 1, round_number)
    group = [*descriptors, corrupt]
    *held, held_by_corrupt = await asyncio.gather(
        *(node.exchange(good, own, group, BRIEF) for node, own in zip(nodes, descriptors, strict=True)),
        network.carol.exchange(bad[served], corrupt, group, BRIEF),
    )
    assert held == [canonical(descriptors)] * 2
    assert held_by_corrupt == canonical(group)


@scenario
async def a_group_with_a_dead_member_ends_at_the_deadline_with_the_rest(network: PeerNetwork) -> None:
    payload = os.urandom(300_000)
    nodes = (network.alice, network.bob)
    descriptors = [node.descriptor(payload, 1, 6) for node in nodes]
    dead = describe(open_identity(network.folder / "dead.key"), payload[:-1], 1, 6)
    held = await asyncio.gather(
        *(
            node.exchange(payload, own, [*descriptors, dead], BRIEF)
            for node, own in zip(nodes, descriptors, strict=True)
        )
    )
    assert held == [canonical(descriptors)] * 2


@scenario
async def a_forbidden_announcement_is_left_out_at_once(network: PeerNetwork) -> None:
    payload = os.urandom(1000)
    own = network.alice.descriptor(payload, 1, 7)
    honest = network.bob.descriptor(payload, 1, 7)
    unfit = [
        replace(honest, weight=5.0),
        network.bob.descriptor(bytes(CAPACITY + 1), 1, 7),
        replace(honest, owner="not a peer id"),
    ]
    for descriptor in unfit:
        # If the announcement counted, this would take the whole deadline: no peer holds such a payload.
        async with asyncio.timeout(PATIENT / 2):
            assert await network.alice.exchange(payload, own, [own, descriptor]) == (own,)


@scenario
async def a_payload_is_fetched_from_a_third_peer_by_hash(network: PeerNetwork) -> None:
    payload, others = os.urandom(300_000), os.urandom(300_000)
    wanted, other = network.alice.descriptor(payload, 1, 9), network.bob.descriptor(others, 1, 9)
    await asyncio.gather(
        network.alice.exchange(payload, wanted, [wanted, other]),
        network.bob.exchange(others, other, [wanted, other]),
    )
    assert await network.carol.fetch(wanted, network.bob) == payload
    # Carol holds what she fetched, and serves it to others.
    assert await network.carol.fetch(wanted, network.carol) == payload


@scenario
async def a_fetched_payload_is_a_file_and_only_where_the_disk_refuses_bytes(network: PeerNetwork) -> None:
    payload = os.urandom(300_000)
    wanted = network.alice.descriptor(payload, 0, 9)
    await network.alice.exchange(payload, wanted, [wanted])
    guest = await network.start("guest", (1,))  # it hosts another stage than that of the payload
    try:
        await network.admit(guest)
        await guest.transport.admit([network.alice.identity.peer])
        stored = await fetched(guest, wanted, network.alice)
        assert stored.path is not None
        assert stored.path.is_absolute()
        assert (stored.path.read_bytes(), stored.data) == (payload, None)
    finally:
        await network.admit()
        await guest.transport.close()
    refused = await fetched(network.carol, wanted, network.bob, network.alice)
    assert (refused.path, refused.data) == (None, payload)


async def fetched(node: Node, wanted: PayloadDescriptor, *holders: Node) -> StoredPayload:
    entry = ManifestEntry(wanted, tuple(holder.identity.peer for holder in holders))
    return await node.transport.fetch_payload(entry, PATIENT)


@scenario
async def a_payload_that_no_holder_has_is_unavailable(network: PeerNetwork) -> None:
    missing = network.alice.descriptor(b"never offered", 1, 9)
    with pytest.raises(HetnodeError, match="does not hold") as failure:
        await network.carol.fetch(missing, network.alice, network.bob, deadline=BRIEF)
    assert failure.value.code is ErrorCode.PAYLOAD_UNAVAILABLE


@scenario
async def a_node_without_any_stage_cannot_fetch(network: PeerNetwork) -> None:
    with pytest.raises(HetnodeError) as failure:
        await network.bootstrap.fetch(network.alice.descriptor(b"x", 1, 9), network.alice)
    assert failure.value.code is ErrorCode.PAYLOAD_UNAVAILABLE


@scenario
async def old_rounds_are_dropped(network: PeerNetwork) -> None:
    old, new = (network.alice.descriptor(b"payload", 1, number) for number in (10, 10 + KEEP_ROUNDS))
    await network.alice.exchange(b"payload", old, [old])
    stored = await fetched(network.bob, old, network.alice)
    await network.alice.exchange(b"payload", new, [new])
    assert await network.bob.fetch(new, network.alice) == b"payload"
    assert stored.path is not None
    assert not stored.path.exists()
    with pytest.raises(HetnodeError):
        await network.carol.fetch(old, network.alice, deadline=BRIEF)


@scenario
async def without_a_coordinator_one_group_of_the_known_size_forms_through_the_dht(
    network: PeerNetwork,
) -> None:
    nodes = (network.alice, network.bob, network.carol)
    payloads = [os.urandom(300_000) for _ in nodes]
    for round_number in (12, 13):
        descriptors = [
            node.descriptor(payload, 1, round_number) for node, payload in zip(nodes, payloads, strict=True)
        ]
        held = await asyncio.gather(
            *(
                node.exchange(payload, own, None, UNHURRIED, expected=3)
                for node, payload, own in zip(nodes, payloads, descriptors, strict=True)
            )
        )
        assert held == [canonical(descriptors)] * 3


@given(fault=("run", "signature"))
async def a_misfit_payload_is_left_out_of_a_group_found_through_the_dht(
    network: PeerNetwork, fault: str
) -> None:
    round_number = {"run": 17, "signature": 18}[fault]
    own = network.alice.descriptor(b"payload", 1, round_number)
    theirs = network.bob.descriptor(b"payload", 1, round_number)
    if fault == "run":
        theirs = sign_descriptor(replace(theirs, run="another"), network.bob.identity.sign)
    else:
        theirs = replace(theirs, weight=5.0)
    held, _ = await asyncio.gather(
        network.alice.exchange(b"payload", own, None, UNHURRIED, expected=2),
        network.bob.exchange(b"payload", theirs, None, UNHURRIED, expected=2),
    )
    assert held == (own,)


@scenario
async def a_peer_without_a_group_holds_only_its_own_payload(network: PeerNetwork) -> None:
    own = network.alice.descriptor(b"payload", 1, 14)
    assert await network.alice.exchange(b"payload", own, None, BRIEF, expected=2) == (own,)
    alone = network.alice.descriptor(b"payload", 1, 15)
    assert await network.alice.exchange(b"payload", alone, None, expected=1) == (alone,)


@scenario
async def a_peer_that_only_dials_takes_part(network: PeerNetwork) -> None:
    dialer = await network.start("dialer", (1,), client_mode=True)
    others = (network.alice, network.bob, network.carol)
    try:
        assert dialer.transport.addresses == ()
        await network.admit(dialer)
        await dialer.transport.admit([node.identity.peer for node in (*others, dialer)])
        nodes = (*others, dialer)
        payloads = [os.urandom(CAPACITY) for _ in nodes]
        descriptors = [node.descriptor(payload, 1, 16) for node, payload in zip(nodes, payloads, strict=True)]
        held = await asyncio.gather(
            *(
                node.exchange(payload, own, descriptors)
                for node, payload, own in zip(nodes, payloads, descriptors, strict=True)
            )
        )
        assert held == [canonical(descriptors)] * 4
        for node in nodes:
            assert await node.fetch(descriptors[-1], node) == payloads[-1]
    finally:
        await network.admit()
        await dialer.transport.close()


@scenario
async def a_certified_peer_outside_the_plan_cannot_fetch_or_push(network: PeerNetwork) -> None:
    payload = os.urandom(1000)
    wanted = network.alice.descriptor(payload, 1, 20)
    await network.alice.exchange(payload, wanted, [wanted])
    stranger = await network.start("stranger", (1,))
    try:
        assert await stranger.transport.lookup() is not None  # the DHT is open to it
        with pytest.raises(HetnodeError) as refused:
            await stranger.fetch(wanted, network.alice, deadline=BRIEF)
        assert refused.value.code is ErrorCode.PAYLOAD_UNAVAILABLE
        assert "not in the plan" in str(refused.value), "its holder says why"
        await network.admit(stranger)
        assert await stranger.fetch(wanted, network.alice) == payload
        await network.admit(stranger, banned=[stranger])
        other = network.bob.descriptor(b"another payload", 1, 20)
        await network.bob.exchange(b"another payload", other, [other])
        with pytest.raises(HetnodeError, match="banned"):
            await stranger.fetch(other, network.bob, deadline=BRIEF)
    finally:
        await network.admit()
        await stranger.transport.close()


@scenario
async def published_records_are_found_and_replaced(network: PeerNetwork) -> None:
    alice, bob = record_of(network.alice.identity), record_of(network.bob.identity)
    await network.alice.transport.publish(alice, ttl=900)
    await network.bob.transport.publish(bob, ttl=900)
    assert await network.carol.transport.lookup() == {alice.peer: alice, bob.peer: bob}
    moved = record_of(network.bob.identity, endpoint="127.0.0.1:5000")
    await network.bob.transport.publish(moved, ttl=1200)
    assert (await network.carol.transport.lookup())[moved.peer] == moved


@scenario
async def a_transport_that_starts_again_has_its_place_and_its_payloads(network: PeerNetwork) -> None:
    peer = await network.start("again", (1,))
    await network.admit(peer)
    everybody = [each.identity.peer for each in (peer, network.alice, network.bob, network.carol)]
    await peer.transport.admit(everybody)
    await peer.transport.publish(record_of(peer.identity), ttl=900)
    wanted, addresses = peer.descriptor(b"payload", 1, 30), peer.transport.addresses
    assert await peer.exchange(b"payload", wanted, [wanted]) == (wanted,)
    await peer.transport.restart()
    assert peer.identity.peer in await peer.transport.lookup()
    assert peer.transport.addresses == addresses
    assert await network.alice.fetch(wanted, peer) == b"payload"
    await peer.transport.disconnect([network.alice.identity.peer])
    await peer.transport.contact({})
    assert await network.bob.fetch(wanted, peer) == b"payload"
    ended = asyncio.create_task(peer.transport.wait_closed())
    await peer.transport.close()
    await peer.transport.close()
    await ended
    await network.admit()


@scenario
async def a_peer_that_returns_serves_the_payloads_on_its_disk(network: PeerNetwork) -> None:
    before = await network.start("returning", (1,))
    wanted = before.descriptor(b"payload", 1, 31)
    await before.exchange(b"payload", wanted, [wanted])
    await before.transport.close()
    after = await network.start("returning", (1,), identity=before.identity)
    await after.transport.admit([network.alice.identity.peer])
    await network.admit(after)
    assert await network.alice.fetch(wanted, after) == b"payload"
    await after.transport.close()
    await network.admit()


@scenario
async def a_longer_payload_than_its_stage_has_is_corrupt(network: PeerNetwork) -> None:
    wanted = network.alice.descriptor(bytes(CAPACITY + 1), 1, 32)
    with pytest.raises(HetnodeError) as refused:
        await network.bob.fetch(wanted, network.alice)
    assert refused.value.code is ErrorCode.PAYLOAD_CORRUPT


TENSORS = {"emb": torch.randn(60_000), "norm": torch.randn(64)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def download_from(network: PeerNetwork, *donors: Node) -> CheckpointDownload:
    hosts: dict[PeerId, int] = {donor.identity.peer: 1 for donor in donors}
    record = StateRecord(RUN, 0, Part.STAGE, 20, anchor_digest(TENSORS), tuple(hosts))
    return CheckpointDownload(
        record, hosts, size_of(SHAPES), header_of(SHAPES), network.folder / "downloaded" / "part"
    )


@scenario
async def a_checkpoint_is_fetched_from_those_that_have_it(network: PeerNetwork) -> None:
    download = download_from(network, network.alice, network.bob)
    with pytest.raises(HetnodeError) as missing:
        await network.carol.transport.fetch_checkpoint(download, BRIEF)
    assert missing.value.code is ErrorCode.STATE_UNAVAILABLE
    path = network.folder / "alice" / "checkpoints" / "round-000020" / "stage-00.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(TENSORS, path)
    stranger = await network.start("without-a-plan", (1,))
    for asking, why in ((stranger, "not in the plan"), (network.bootstrap, "")):
        with pytest.raises(HetnodeError) as refused:
            await asking.transport.fetch_checkpoint(download, BRIEF)
        assert refused.value.code is ErrorCode.STATE_UNAVAILABLE
        assert why in str(refused.value)
    with_one_that_lacks_it = download_from(network, network.bob, network.alice)
    await network.carol.transport.fetch_checkpoint(with_one_that_lacks_it, PATIENT)
    assert download.into.read_bytes() == b"".join(TENSORS[name].numpy().tobytes() for name in sorted(TENSORS))


@scenario
async def a_contested_payload_reaches_a_member_through_the_arbiter(network: PeerNetwork) -> None:
    spec = spec_of()
    layout = PayloadLayout(parameter_shapes(spec, 1), spec.outer)
    payload = encode(layout, {name: sparsify(torch.ones(t.shape), t) for name, t in layout.tensors.items()})
    identity, arbiter = await network.start_arbiter("arbiter", spec)
    owner, member, stranger = network.alice, network.bob, network.carol
    for node in (owner, member, stranger):
        await node.transport.admit([identity.peer])
    await arbiter.admit([owner.identity.peer, member.identity.peer])
    unsigned = replace(owner.descriptor(payload, 1, 33), codec=layout.codec, signature=b"")
    own = sign_descriptor(unsigned, owner.identity.sign)
    await owner.transport.exchange(payload, own, ExchangeGroup("g", (own,)), expected=1, deadline=PATIENT)
    verdict = await arbiter.arbitrate(own, [owner.identity.peer], PATIENT)
    assert verdict.finding is Finding.HELD, verdict
    lie = replace(own, sha256="0" * 64)
    denied = await arbiter.arbitrate(lie, [owner.identity.peer], PATIENT)
    assert (denied.finding, denied.refuted) == (Finding.NOT_FOUND, (owner.identity.peer,))

    entry = ManifestEntry(own, (identity.peer,))
    assert (await member.transport.fetch_payload(entry, PATIENT)).read(len(payload)) == payload
    with pytest.raises(HetnodeError) as refused:
        await stranger.transport.fetch_payload(entry, BRIEF)
    assert refused.value.code is ErrorCode.PAYLOAD_UNAVAILABLE
    await arbiter.forget_payloads(34)
    await arbiter.admit([stranger.identity.peer])
    with pytest.raises(HetnodeError) as forgotten:
        await stranger.transport.fetch_payload(entry, BRIEF)
    assert forgotten.value.code is ErrorCode.PAYLOAD_UNAVAILABLE
    await network.admit()


@pytest.mark.parametrize("name", CONTRACT)
def test_a_transport(run: Run, name: str) -> None:
    run(CONTRACT[name])
