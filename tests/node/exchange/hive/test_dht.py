"""Which callers and records the DHT accepts, with real processes of hivemind on loopback."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from node.security.identity import Identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.records import seal_record
from tests.support.certificates import authority, credentials
from tests.support.hive_nodes import (
    BRIEF,
    CAPACITY,
    RUN,
    certified,
    entry_of,
    record_of,
    start_transport,
)
from tests.support.peer_network import PeerNetwork

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("caller", ["of another authority", "whose time is over", "banned"])
async def test_the_dht_refuses_a_caller(network: PeerNetwork, tmp_path: Path, caller: str) -> None:
    identity = open_identity(tmp_path / "caller.key")
    shown = certified(identity, authority("another") if caller == "of another authority" else None)
    # The caller accepts our authority, so only the DHT can refuse the connection.
    shown["authority"] = certified(network.bootstrap.identity)["authority"]
    if caller == "whose time is over":
        shown["certificate"].write_bytes(credentials(identity.peer, ended=True).certificate)
    if caller == "banned":
        await network.bootstrap.transport.admit((), [identity.peer])
    entry = entry_of(identity, **shown, initial_peers=network.bootstrap.transport.addresses)
    with pytest.raises(HetnodeError) as refused:
        await start_transport(identity, entry)
    assert refused.value.code is ErrorCode.DHT_UNREACHABLE
    await network.bootstrap.transport.admit((), ())


async def test_a_renewed_certificate_is_shown_without_a_restart(network: PeerNetwork) -> None:
    identity = network.alice.identity
    before = certified(identity)["certificate"].read_bytes()
    await network.alice.transport.publish(record_of(identity, endpoint="127.0.0.1:7001"), ttl=600)
    found = await network.carol.transport.lookup()
    assert before != certified(identity)["certificate"].read_bytes()
    assert found[identity.peer].endpoint == "127.0.0.1:7001"


async def test_a_forged_or_replayed_record_is_refused_by_every_peer(
    network: PeerNetwork, tmp_path: Path
) -> None:
    """The forger is a member of the run: the DHT refuses all other callers."""
    victim, forger = network.carol.identity, open_identity(tmp_path / "forger.key")
    shown = certified(forger)
    own_certificate, victims_certificate = map(der_of, (forger, victim))
    honest = record_of(victim)
    # Nothing may expire before the last look: a busy machine needs a minute for the forger alone.
    now = time.time()
    soon, later, last = now + 1200, now + 1800, 2400
    await network.carol.transport.publish(honest, ttl=last)
    lie = record_of(victim, endpoint="127.0.0.1:6666")
    # Carol signed it, but it expires before the record that is stored.
    old = seal_record(lie, RUN, victim.sign, soon, victims_certificate)
    forgeries = [
        (victim.peer, seal_record(lie, RUN, forger.sign, later, victims_certificate), later),
        (victim.peer, seal_record(record_of(forger), RUN, forger.sign, later, own_certificate), later),
        (forger.peer, seal_record(honest, RUN, forger.sign, later, own_certificate), later),
        (victim.peer, old, later),
        (victim.peer, old, soon),
        (victim.peer, b"garbage", later),
        (victim.peer, bytes(5000), later),
    ]
    allowed = seal_record(record_of(forger), RUN, forger.sign, later, own_certificate)
    stored = await store_without_validator(
        network, forger, shown, [*forgeries, (forger.peer, allowed, later)]
    )
    assert stored == ["False"] * len(forgeries) + ["True"]
    for node in (network.alice, network.bob, network.carol):
        found = await node.transport.lookup()
        assert found[victim.peer] == honest
        assert found[forger.peer] == record_of(forger)


async def test_a_peer_that_only_dials_is_asked_over_its_own_connections(network: PeerNetwork) -> None:
    dialer = await network.start("asked", (1,), client_mode=True)
    try:
        await network.admit(dialer)
        await dialer.transport.admit([network.carol.identity.peer])
        payload = os.urandom(CAPACITY)
        own = dialer.descriptor(payload, 1, 23)
        assert await dialer.exchange(payload, own, [own]) == (own,)
        assert await network.carol.fetch(own, dialer) == payload
        with pytest.raises(HetnodeError) as refused:  # not in the dialer's allow list
            await network.bob.fetch(own, dialer, deadline=BRIEF)
        assert refused.value.code is ErrorCode.PAYLOAD_UNAVAILABLE
    finally:
        await network.admit()
        await dialer.transport.close()


def der_of(identity: Identity) -> bytes:
    pem = certified(identity)["certificate"].read_bytes()
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


async def store_without_validator(
    network: PeerNetwork,
    forger: Identity,
    shown: dict[str, Path],
    entries: Sequence[tuple[str, bytes, float]],
) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.hive_forger",
        forger.peer,
        f"{RUN}.peers",
        network.bootstrap.transport.addresses[0],
        *(str(path) for path in (forger.path, shown["certificate"], shown["authority"])),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    lines = "".join(f"{peer} {value.hex()} {expires!r}\n" for peer, value, expires in entries)
    output, _ = await process.communicate(lines.encode())
    return output.decode().split()
