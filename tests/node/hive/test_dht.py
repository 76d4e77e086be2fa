"""Which callers and records the DHT accepts, with real processes of hivemind on loopback."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from node.hive.transport import HivemindTransport
from node.security.identity import Identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.records import seal_record
from tests.support.certificates import authority, credentials
from tests.support.hive_network import HiveNetwork
from tests.support.hive_nodes import (
    RUN,
    certified,
    record_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("caller", ["of another authority", "whose time is over", "banned"])
async def test_the_dht_refuses_a_caller(network: HiveNetwork, tmp_path: Path, caller: str) -> None:
    identity = open_identity(tmp_path / "caller.key")
    shown = certified(identity, authority("another") if caller == "of another authority" else None)
    # The caller accepts our authority, so only the DHT can refuse the connection.
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


async def test_a_renewed_certificate_is_shown_without_a_restart(network: HiveNetwork) -> None:
    identity = network.alice.identity
    before = certified(identity)["certificate"].read_bytes()
    await network.alice.hivemind.publish(record_of(identity, endpoint="127.0.0.1:7001"), ttl=600)
    found = await network.carol.hivemind.lookup()
    assert before != certified(identity)["certificate"].read_bytes()
    assert found[identity.peer].endpoint == "127.0.0.1:7001"


async def test_published_records_are_found_and_replaced(network: HiveNetwork) -> None:
    alice, bob = record_of(network.alice.identity), record_of(network.bob.identity)
    await network.alice.hivemind.publish(alice, ttl=900)
    await network.bob.hivemind.publish(bob, ttl=900)
    found = await network.carol.hivemind.lookup()
    assert found == {alice.peer: alice, bob.peer: bob}
    moved = record_of(network.bob.identity, endpoint="127.0.0.1:5000")
    await network.bob.hivemind.publish(moved, ttl=1200)
    assert (await network.carol.hivemind.lookup())[moved.peer] == moved


async def test_a_forged_or_replayed_record_is_refused_by_every_peer(
    network: HiveNetwork, tmp_path: Path
) -> None:
    """The forger is a member of the run: the DHT refuses all other callers."""
    victim, forger = network.carol.identity, open_identity(tmp_path / "forger.key")
    shown = certified(forger)
    own_certificate, victims_certificate = map(der_of, (forger, victim))
    honest = record_of(victim)
    # Nothing may expire before the last look: a busy machine needs a minute for the forger alone.
    now = time.time()
    soon, later, last = now + 1200, now + 1800, 2400
    await network.carol.hivemind.publish(honest, ttl=last)
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
        found = await node.hivemind.lookup()
        assert found[victim.peer] == honest
        assert found[forger.peer] == record_of(forger)


def der_of(identity: Identity) -> bytes:
    pem = certified(identity)["certificate"].read_bytes()
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


async def store_without_validator(
    network: HiveNetwork,
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
        network.bootstrap.hivemind.addresses[0],
        *(str(path) for path in (forger.path, shown["certificate"], shown["authority"])),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    lines = "".join(f"{peer} {value.hex()} {expires!r}\n" for peer, value, expires in entries)
    output, _ = await process.communicate(lines.encode())
    return output.decode().split()
