"""Groups gather payloads, and peers fetch them, between real processes of hivemind on loopback."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from node.security.identity import open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import sign_descriptor
from tests.support.hive_network import HiveNetwork
from tests.support.hive_nodes import (
    BRIEF,
    CAPACITY,
    KEEP_ROUNDS,
    PATIENT,
    UNHURRIED,
    canonical,
    describe,
    start_node,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_group_gathers_the_payloads_of_two_stages_at_once(network: HiveNetwork) -> None:
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


@pytest.mark.parametrize("nbytes", [0, 256 * 1024], ids=["empty", "a single chunk"])
async def test_payloads_of_these_lengths_are_gathered(network: HiveNetwork, nbytes: int) -> None:
    payloads = bytes(nbytes), b"\1" * nbytes
    group = [
        node.descriptor(data, 1, 2) for node, data in zip((network.alice, network.bob), payloads, strict=True)
    ]
    held = await asyncio.gather(
        network.alice.exchange(payloads[0], group[0], group),
        network.bob.exchange(payloads[1], group[1], group),
    )
    assert held[0] == held[1] == canonical(group)


async def test_a_payload_of_another_length_is_not_fetched(network: HiveNetwork) -> None:
    """All payloads of a stage and round have one length: a longer one is a waste of everybody's line."""
    own, longer = network.alice.descriptor(b"own", 1, 3), network.bob.descriptor(bytes(256 * 1024), 1, 3)
    async with asyncio.timeout(PATIENT / 2):
        assert await network.alice.exchange(b"own", own, [own, longer]) == (own,)


@pytest.mark.parametrize("served", ["other bytes", "too few bytes", "too many bytes"])
async def test_a_payload_that_differs_from_its_announcement_is_kept_by_no_other_peer(
    network: HiveNetwork, served: str
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
    network: HiveNetwork, tmp_path: Path
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


async def test_a_forbidden_announcement_is_left_out_at_once(network: HiveNetwork) -> None:
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


async def test_a_payload_is_fetched_from_a_third_peer_by_hash(network: HiveNetwork) -> None:
    payload, others = os.urandom(300_000), os.urandom(300_000)
    wanted, other = network.alice.descriptor(payload, 1, 9), network.bob.descriptor(others, 1, 9)
    await asyncio.gather(
        network.alice.exchange(payload, wanted, [wanted, other]),
        network.bob.exchange(others, other, [wanted, other]),
    )
    assert await network.carol.fetch(wanted, network.bob) == payload
    # Carol holds what she fetched, and serves it to others.
    assert await network.carol.fetch(wanted, network.carol) == payload


async def test_a_payload_of_a_stage_that_is_not_hosted_can_be_fetched(network: HiveNetwork) -> None:
    payload = os.urandom(300_000)
    wanted = network.alice.descriptor(payload, 0, 9)
    await network.alice.exchange(payload, wanted, [wanted])
    assert await network.carol.fetch(wanted, network.bob, network.alice) == payload


async def test_a_payload_that_no_holder_has_is_unavailable(network: HiveNetwork) -> None:
    missing = network.alice.descriptor(b"never offered", 1, 9)
    with pytest.raises(HetnodeError, match="does not hold") as failure:
        await network.carol.fetch(missing, network.alice, network.bob, deadline=BRIEF)
    assert failure.value.code is ErrorCode.PAYLOAD_UNAVAILABLE


async def test_a_node_without_any_stage_cannot_fetch(network: HiveNetwork) -> None:
    with pytest.raises(HetnodeError) as failure:
        await network.bootstrap.fetch(network.alice.descriptor(b"x", 1, 9), network.alice)
    assert failure.value.code is ErrorCode.PAYLOAD_UNAVAILABLE


async def test_old_rounds_are_dropped(network: HiveNetwork) -> None:
    old, new = (network.alice.descriptor(b"payload", 1, number) for number in (10, 10 + KEEP_ROUNDS))
    await network.alice.exchange(b"payload", old, [old])
    await network.alice.exchange(b"payload", new, [new])
    assert await network.bob.fetch(new, network.alice) == b"payload"
    with pytest.raises(HetnodeError):
        await network.carol.fetch(old, network.alice, deadline=BRIEF)


async def test_without_a_coordinator_one_group_of_the_known_size_forms_through_the_dht(
    network: HiveNetwork,
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


@pytest.mark.parametrize("fault", ["run", "signature"])
async def test_a_misfit_payload_is_left_out_of_a_group_found_through_the_dht(
    network: HiveNetwork, fault: str
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


async def test_a_peer_without_a_group_holds_only_its_own_payload(network: HiveNetwork) -> None:
    own = network.alice.descriptor(b"payload", 1, 14)
    assert await network.alice.exchange(b"payload", own, None, BRIEF, expected=2) == (own,)
    alone = network.alice.descriptor(b"payload", 1, 15)
    assert await network.alice.exchange(b"payload", alone, None, expected=1) == (alone,)


async def test_a_peer_that_only_dials_takes_part(network: HiveNetwork, tmp_path: Path) -> None:
    dialer = await start_node(
        tmp_path, "dialer", (1,), network.bootstrap.hivemind.addresses, client_mode=True
    )
    others = (network.alice, network.bob, network.carol)
    try:
        assert dialer.hivemind.addresses == ()
        await network.admit(dialer)
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
        await network.admit()
        await dialer.hivemind.close()


async def test_a_peer_that_only_dials_is_asked_over_its_own_connections(
    network: HiveNetwork, tmp_path: Path
) -> None:
    dialer = await start_node(
        tmp_path, "dialer", (1,), network.bootstrap.hivemind.addresses, client_mode=True
    )
    try:
        await network.admit(dialer)
        await dialer.hivemind.admit([network.carol.identity.peer])
        payload = os.urandom(CAPACITY)
        own = dialer.descriptor(payload, 1, 23)
        assert await dialer.exchange(payload, own, [own]) == (own,)
        assert await network.carol.fetch(own, dialer) == payload
        with pytest.raises(HetnodeError) as refused:  # not in the dialer's allow list
            await network.bob.fetch(own, dialer, deadline=BRIEF)
        assert refused.value.code is ErrorCode.PAYLOAD_UNAVAILABLE
    finally:
        await network.admit()
        await dialer.hivemind.close()


async def test_a_certified_peer_outside_the_plan_cannot_fetch_or_push(
    network: HiveNetwork, tmp_path: Path
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
        await network.admit(stranger)
        assert await stranger.fetch(wanted, network.alice) == payload
        await network.admit(stranger, banned=[stranger])
        other = network.bob.descriptor(b"another payload", 1, 20)
        await network.bob.exchange(b"another payload", other, [other])
        with pytest.raises(HetnodeError, match="banned"):
            await stranger.fetch(other, network.bob, deadline=BRIEF)
    finally:
        await network.admit()
        await stranger.hivemind.close()
