"""hivemind as the main process uses it: real processes, a real libp2p daemon, on loopback."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from node.hive.transport import HivemindTransport
from node.security.identity import Identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import sign_descriptor
from protocol.wire.records import seal_record
from tests.support.certificates import authority, credentials
from tests.support.hive_nodes import (
    BRIEF,
    CAPACITY,
    KEEP_ROUNDS,
    PATIENT,
    REFUSED,
    RUN,
    Node,
    canonical,
    certified,
    describe,
    record_of,
    start_node,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Network:
    bootstrap: Node
    alice: Node
    bob: Node
    carol: Node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    """The bootstrap peer without stages; alice and bob host stages 0 and 1; carol hosts stage 1.

    Carol's disk takes no payloads, so hers are in memory, where nobody verifies them before they are sent.
    """
    folder = tmp_path_factory.mktemp("identities")
    async with AsyncExitStack() as stack:
        bootstrap = await start_node(folder, "bootstrap", ())
        stack.push_async_callback(bootstrap.hivemind.close)
        addresses = bootstrap.hivemind.addresses
        starting = [
            asyncio.create_task(start_node(folder, name, stages, addresses, payloads=payloads))
            for name, stages, payloads in (
                ("alice", (0, 1), None),
                ("bob", (0, 1), None),
                ("carol", (1,), REFUSED),
            )
        ]
        nodes = await asyncio.gather(*starting)
        for node in nodes:
            stack.push_async_callback(node.hivemind.close)
        network = Network(bootstrap, *nodes)
        await admit(network)
        yield network


async def admit(network: Network, *others: Node, banned: Sequence[Node] = ()) -> None:
    """The plan has places for alice, bob, carol and the others."""
    members = (network.alice, network.bob, network.carol)
    peers = [node.identity.peer for node in (*members, *others)]
    for node in members:
        await node.hivemind.admit(peers, [node.identity.peer for node in banned])


async def test_the_peer_id_is_the_one_that_libp2p_derives(network: Network) -> None:
    (address,) = network.bootstrap.hivemind.addresses
    assert address.endswith(f"/p2p/{network.bootstrap.identity.peer}")


async def test_a_group_gathers_the_payloads_of_two_stages_at_once(network: Network) -> None:
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
            # Its holder being itself, it can only come from what the exchange has brought.
            assert await node.fetch(descriptors[stage, owner], node) == payloads[stage, owner]


async def test_an_empty_payload_and_one_of_a_single_chunk_are_gathered(network: Network) -> None:
    empty, chunk = network.alice.descriptor(b"", 1, 2), network.bob.descriptor(bytes(256 * 1024), 1, 2)
    group = canonical([empty, chunk])
    held = await asyncio.gather(
        network.alice.exchange(b"", empty, group), network.bob.exchange(bytes(256 * 1024), chunk, group)
    )
    assert held[0] == held[1] == group


@pytest.mark.parametrize("served", ["other bytes", "too few bytes", "too many bytes"])
async def test_a_payload_that_differs_from_its_announcement_is_kept_by_no_other_peer(
    network: Network, served: str
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


async def test_a_group_with_a_dead_member_ends_at_the_deadline_with_the_rest(
    network: Network, tmp_path: Path
) -> None:
    payload = os.urandom(300_000)
    nodes = (network.alice, network.bob)
    descriptors = [node.descriptor(payload, 1, 6) for node in nodes]
    dead = describe(open_identity(tmp_path / "dead.key"), payload[:-1], 1, 6)
    held = await asyncio.gather(
        *(
            node.exchange(payload, own, [*descriptors, dead], BRIEF)
            for node, own in zip(nodes, descriptors, strict=True)
        )
    )
    assert held == [canonical(descriptors)] * 2


async def test_a_forbidden_announcement_is_left_out_at_once(network: Network) -> None:
    payload = os.urandom(1000)
    own = network.alice.descriptor(payload, 1, 7)
    honest = network.bob.descriptor(payload, 1, 7)
    unfit = [
        replace(honest, weight=5.0),
        network.bob.descriptor(bytes(CAPACITY + 1), 1, 7),
        replace(honest, owner="not a peer id"),
    ]
    for descriptor in unfit:
        # Were it let in, this would take the whole deadline: nobody holds such a payload.
        async with asyncio.timeout(PATIENT / 2):
            assert await network.alice.exchange(payload, own, [own, descriptor]) == (own,)


async def test_a_payload_is_fetched_from_a_third_peer_by_hash(network: Network) -> None:
    payload = os.urandom(300_000)
    wanted, other = network.alice.descriptor(payload, 1, 9), network.bob.descriptor(b"other", 1, 9)
    await asyncio.gather(
        network.alice.exchange(payload, wanted, [wanted, other]),
        network.bob.exchange(b"other", other, [wanted, other]),
    )
    assert await network.carol.fetch(wanted, network.bob) == payload
    # What was fetched is held, and so is served to others.
    assert await network.carol.fetch(wanted, network.carol) == payload


async def test_a_payload_of_a_stage_that_is_not_hosted_can_be_fetched(network: Network) -> None:
    payload = os.urandom(300_000)
    wanted = network.alice.descriptor(payload, 0, 9)
    await network.alice.exchange(payload, wanted, [wanted])
    assert await network.carol.fetch(wanted, network.bob, network.alice) == payload


async def test_a_payload_that_no_holder_has_is_unavailable(network: Network) -> None:
    missing = network.alice.descriptor(b"never offered", 1, 9)
    with pytest.raises(HetnodeError, match="does not hold") as failure:
        await network.carol.fetch(missing, network.alice, network.bob, deadline=BRIEF)
    assert failure.value.code is ErrorCode.PAYLOAD_UNAVAILABLE


async def test_a_node_without_any_stage_cannot_fetch(network: Network) -> None:
    with pytest.raises(HetnodeError) as failure:
        await network.bootstrap.fetch(network.alice.descriptor(b"x", 1, 9), network.alice)
    assert failure.value.code is ErrorCode.PAYLOAD_UNAVAILABLE


async def test_old_rounds_are_dropped(network: Network) -> None:
    old, new = (network.alice.descriptor(b"payload", 1, number) for number in (10, 10 + KEEP_ROUNDS))
    await network.alice.exchange(b"payload", old, [old])
    await network.alice.exchange(b"payload", new, [new])
    assert await network.bob.fetch(new, network.alice) == b"payload"
    with pytest.raises(HetnodeError):
        await network.carol.fetch(old, network.alice, deadline=BRIEF)


async def test_without_a_coordinator_one_group_of_the_known_size_forms_through_the_dht(
    network: Network,
) -> None:
    nodes = (network.alice, network.bob, network.carol)
    payloads = [os.urandom(300_000) for _ in nodes]
    for round_number in (12, 13):
        descriptors = [
            node.descriptor(payload, 1, round_number) for node, payload in zip(nodes, payloads, strict=True)
        ]
        held = await asyncio.gather(
            *(
                node.exchange(payload, own, None, expected=3)
                for node, payload, own in zip(nodes, payloads, descriptors, strict=True)
            )
        )
        assert held == [canonical(descriptors)] * 3


@pytest.mark.parametrize("fault", ["run", "signature"])
async def test_a_misfit_payload_is_left_out_of_a_group_found_through_the_dht(
    network: Network, fault: str
) -> None:
    round_number = {"run": 17, "signature": 18}[fault]
    own = network.alice.descriptor(b"payload", 1, round_number)
    theirs = network.bob.descriptor(b"payload", 1, round_number)
    if fault == "run":
        theirs = sign_descriptor(replace(theirs, run="another"), network.bob.identity.sign)
    else:
        theirs = replace(theirs, weight=5.0)
    held, _ = await asyncio.gather(
        network.alice.exchange(b"payload", own, None, expected=2),
        network.bob.exchange(b"payload", theirs, None, expected=2),
    )
    assert held == (own,)


async def test_a_peer_without_a_group_holds_only_its_own_payload(network: Network) -> None:
    own = network.alice.descriptor(b"payload", 1, 14)
    assert await network.alice.exchange(b"payload", own, None, BRIEF, expected=2) == (own,)
    alone = network.alice.descriptor(b"payload", 1, 15)
    assert await network.alice.exchange(b"payload", alone, None, expected=1) == (alone,)


async def test_a_peer_that_only_dials_takes_part(network: Network, tmp_path: Path) -> None:
    dialer = await start_node(
        tmp_path, "dialer", (1,), network.bootstrap.hivemind.addresses, client_mode=True
    )
    others = (network.alice, network.bob, network.carol)
    try:
        assert dialer.hivemind.addresses == ()
        await admit(network, dialer)
        await dialer.hivemind.admit([node.identity.peer for node in (*others, dialer)])
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
        await admit(network)
        await dialer.hivemind.close()


async def test_a_certified_peer_outside_the_plan_cannot_fetch_or_push(
    network: Network, tmp_path: Path
) -> None:
    payload = os.urandom(1000)
    wanted = network.alice.descriptor(payload, 1, 20)
    await network.alice.exchange(payload, wanted, [wanted])
    stranger = await start_node(tmp_path, "stranger", (1,), network.bootstrap.hivemind.addresses)
    try:
        assert await stranger.hivemind.lookup() is not None  # the DHT is open to it
        with pytest.raises(HetnodeError, match="not in the plan") as refused:
            await stranger.fetch(wanted, network.alice, deadline=BRIEF)
        assert refused.value.code is ErrorCode.PAYLOAD_UNAVAILABLE
        await admit(network, stranger)
        assert await stranger.fetch(wanted, network.alice) == payload
        await admit(network, stranger, banned=[stranger])
        other = network.bob.descriptor(b"another payload", 1, 20)
        await network.bob.exchange(b"another payload", other, [other])
        with pytest.raises(HetnodeError, match="banned"):
            await stranger.fetch(other, network.bob, deadline=BRIEF)
    finally:
        await admit(network)
        await stranger.hivemind.close()


@pytest.mark.parametrize("caller", ["of another authority", "whose time is over", "banned"])
async def test_the_dht_refuses_a_caller(network: Network, tmp_path: Path, caller: str) -> None:
    identity = open_identity(tmp_path / "caller.key")
    shown = certified(identity, authority("another") if caller == "of another authority" else None)
    # It believes our authority, so that it is not the caller who breaks off.
    shown["authority"] = certified(network.bootstrap.identity)["authority"]
    if caller == "whose time is over":
        shown["certificate"].write_bytes(credentials(identity.peer, ended=True).certificate)
    if caller == "banned":
        await network.bootstrap.hivemind.admit((), [identity.peer])
    with pytest.raises(HetnodeError) as refused:
        await HivemindTransport.start(
            identity=identity, **shown, run=RUN, initial_peers=network.bootstrap.hivemind.addresses
        )
    assert refused.value.code is ErrorCode.DHT_UNREACHABLE
    await network.bootstrap.hivemind.admit((), ())


async def test_a_renewed_certificate_is_shown_without_a_restart(network: Network) -> None:
    identity = network.alice.identity
    before = certified(identity)["certificate"].read_bytes()
    await network.alice.hivemind.publish(record_of(identity, endpoint="127.0.0.1:7001"), ttl=40)
    found = await network.carol.hivemind.lookup()
    assert before != certified(identity)["certificate"].read_bytes()
    assert found[identity.peer].endpoint == "127.0.0.1:7001"


async def test_published_records_are_found_and_replaced(network: Network) -> None:
    alice, bob = record_of(network.alice.identity), record_of(network.bob.identity)
    await network.alice.hivemind.publish(alice, ttl=60)
    await network.bob.hivemind.publish(bob, ttl=60)
    found = await network.carol.hivemind.lookup()
    assert found == {alice.peer: alice, bob.peer: bob}
    moved = record_of(network.bob.identity, endpoint="127.0.0.1:5000")
    await network.bob.hivemind.publish(moved, ttl=90)
    assert (await network.carol.hivemind.lookup())[moved.peer] == moved


async def test_a_forged_or_replayed_record_is_refused_by_every_peer(network: Network, tmp_path: Path) -> None:
    """By a member of the run: others do not even get into the DHT."""
    victim, forger = network.carol.identity, open_identity(tmp_path / "forger.key")
    shown = certified(forger)
    own_certificate, victims_certificate = map(der_of, (forger, victim))
    honest = record_of(victim)
    await network.carol.hivemind.publish(honest, ttl=60)
    now = time.time()
    later = now + 600
    lie = record_of(victim, endpoint="127.0.0.1:6666")
    old = seal_record(lie, victim.sign, now + 30, victims_certificate)  # as it said a while ago
    forgeries = [
        (victim.peer, seal_record(lie, forger.sign, later, victims_certificate), later),
        (victim.peer, seal_record(record_of(forger), forger.sign, later, own_certificate), later),
        (forger.peer, seal_record(honest, forger.sign, later, own_certificate), later),
        (victim.peer, old, later),
        (victim.peer, old, now + 30),  # an honest repetition, but older than what is there
        (victim.peer, b"garbage", later),
        (victim.peer, bytes(5000), later),
    ]
    allowed = seal_record(record_of(forger), forger.sign, later, own_certificate)
    stored = await store_without_validator(
        network, forger, shown, [*forgeries, (forger.peer, allowed, later)]
    )
    assert stored == ["False"] * len(forgeries) + ["True"]
    for node in (network.alice, network.bob, network.carol):
        found = await node.hivemind.lookup()
        assert found[victim.peer] == honest
        assert found[forger.peer] == record_of(forger)


def der_of(identity: Identity) -> bytes:
    pem = certified(identity)["certificate"].read_bytes()
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


async def store_without_validator(
    network: Network, forger: Identity, shown: dict[str, Path], entries: Sequence[tuple[str, bytes, float]]
) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.hive_forger",
        f"{RUN}.peers",
        network.bootstrap.hivemind.addresses[0],
        *(str(path) for path in (forger.path, shown["certificate"], shown["authority"])),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    lines = "".join(f"{peer} {value.hex()} {expires!r}\n" for peer, value, expires in entries)
    output, _ = await process.communicate(lines.encode())
    return output.decode().split()


async def test_a_dht_that_does_not_answer_is_unreachable(network: Network, tmp_path: Path) -> None:
    nobody = open_identity(tmp_path / "nobody.key").peer
    with pytest.raises(HetnodeError) as failure:
        await start_node(tmp_path, "node", (), [f"/ip4/127.0.0.1/tcp/9/p2p/{nobody}"])
    assert failure.value.code is ErrorCode.DHT_UNREACHABLE


async def test_an_invalid_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HetnodeError, match="nonsense") as failure:
        await start_node(tmp_path, "node", (), ["nonsense"])
    assert failure.value.code is ErrorCode.BAD_ADDRESS


async def test_a_port_in_use_is_refused(network: Network, tmp_path: Path) -> None:
    port = int(network.bootstrap.hivemind.addresses[0].split("/")[4])
    identity = open_identity(tmp_path / "peer.key")
    with pytest.raises(HetnodeError) as failure:
        await HivemindTransport.start(identity=identity, **certified(identity), run=RUN, listen_port=port)
    assert failure.value.code is ErrorCode.PORT_IN_USE


async def test_the_advertised_address_is_announced_to_other_peers(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "peer.key")
    hivemind = await HivemindTransport.start(
        identity=identity,
        **certified(identity),
        run=RUN,
        listen_host="0.0.0.0",
        advertise="node.example.org",
    )
    try:
        (address,) = hivemind.addresses
        assert address.startswith("/dns/node.example.org/tcp/")
        assert address.endswith(f"/p2p/{identity.peer}")
    finally:
        await hivemind.close()


async def test_the_validator_recognises_a_padded_key() -> None:
    from hivemind.dht.routing import DHTID  # noqa: PLC0415 - slow to import, and for this test alone
    from hivemind.dht.validation import DHTRecord  # noqa: PLC0415

    from node.hive.records import OwnRecordValidator, peers_key  # noqa: PLC0415

    key = DHTID.generate(source=peers_key(RUN)).to_bytes()
    validator = OwnRecordValidator(RUN, authority().certificate)
    for spelling in (key, b"\0" + key):
        assert not validator.validate(DHTRecord(spelling, b"\xa1x", b"\xc4\x01x", 1.0))
    other = DHTID.generate(source="another key").to_bytes()
    assert validator.validate(DHTRecord(other, b"\xa1x", b"\xc4\x01x", 1.0))
