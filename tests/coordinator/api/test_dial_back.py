"""The coordinator dials the addresses that a peer claims: real sockets, honest and hostile peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from coordinator.api import dial_back
from coordinator.api.dial_back import TlsDialBack
from node.net.address_trial import try_addresses
from node.net.addresses import ClaimedPorts
from node.net.link_server import LinkServer
from node.security.identity import open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.run_files.resolve import resolve
from protocol.trust.reachability import Addresses, Reached
from protocol.types import Reachability, Role
from tests.builders import keyed
from tests.support.certificates import authority, credentials, enrolled
from tests.support.coordinator_process import running

A, B = keyed(0), keyed(1)
LOCAL, PUBLIC, PRIVATE = "127.0.0.1", "44.10.0.7", "10.0.0.9"
"""Sources of calls."""


def dials(source: str = LOCAL) -> TlsDialBack:
    return TlsDialBack(authority().pem, lambda _: source)


async def tried(addresses: Addresses, source: str = LOCAL) -> Reached:
    return await dials(source)(A.peer, "ipv4:127.0.0.1:1", addresses)


@asynccontextmanager
async def links_of(peer: str) -> AsyncIterator[str]:
    """The endpoint of a link server with the certificate of `peer`."""
    shown = credentials(peer)
    server = LinkServer(lambda: shown)
    port = await server.start(LOCAL, 0)
    try:
        yield f"{LOCAL}:{port}"
    finally:
        await server.close()


class Silent:
    """Accepts connections and says nothing."""

    def __init__(self) -> None:
        self.connections: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(lambda _, writer: self.connections.append(writer), LOCAL, 0)
        yield f"{LOCAL}:{server.sockets[0].getsockname()[1]}"
        server.close()
        for connection in self.connections:
            connection.close()


async def test_a_peer_that_answers_is_open() -> None:
    async with links_of(A.peer) as endpoint:
        assert await tried(Addresses(endpoint)) == Reached(Reachability.OPEN, endpoint=True)
        relayed = Addresses(endpoint, relayed=True)
        assert (await tried(relayed)).reachability is Reachability.RELAYED


async def test_who_claims_nothing_only_dials() -> None:
    assert await tried(Addresses()) == Reached(Reachability.DIAL_ONLY)


async def test_the_address_of_another_machine_does_not_count() -> None:
    async with links_of(B.peer) as endpoint:
        found = await tried(Addresses(endpoint))
    assert not found.endpoint
    assert found.reachability is Reachability.DIAL_ONLY
    assert f"{endpoint} for links (another peer answers)" in found.reason
    assert "--advertise" in found.reason


async def test_a_certificate_of_another_authority_does_not_count() -> None:
    async with links_of(A.peer) as endpoint:
        stranger = TlsDialBack(authority("another-run").pem, lambda _: LOCAL)
        assert not (await stranger(A.peer, "", Addresses(endpoint))).endpoint


async def test_a_closed_port_is_named_with_its_address() -> None:
    async with Silent().listening() as endpoint:
        pass
    assert f"{endpoint} for links (the connection is refused)" in (await tried(Addresses(endpoint))).reason


async def test_a_slow_peer_that_never_answers_tls_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_back, "DIAL_BACK_SECONDS", 0.2)
    async with Silent().listening() as endpoint:
        found = await tried(Addresses(endpoint))
    assert "it accepts connections, but not as this node" in found.reason


async def test_few_are_dialled_back_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    dialling, silent = dials(), Silent()
    async with silent.listening() as endpoint:
        calls = [asyncio.create_task(dialling(A.peer, "", Addresses(endpoint))) for _ in range(16)]
        while len(silent.connections) < len(calls):  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(HetnodeError) as refusal:
            await dialling(A.peer, "", Addresses(endpoint))
        assert refusal.value.code is ErrorCode.RATE_LIMITED
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert (await dialling(A.peer, "", Addresses())).reachability is Reachability.DIAL_ONLY


@pytest.mark.parametrize("address", ["169.254.169.254:7710", "100.100.100.200:80", "0.0.0.0:7710"])
async def test_the_address_of_a_metadata_service_is_refused(address: str) -> None:
    for claim in (Addresses(address), Addresses(dht=address)):
        with pytest.raises(HetnodeError) as refusal:
            await tried(claim)
        assert refusal.value.code is ErrorCode.BAD_ADDRESS


@pytest.mark.parametrize("port", [22, 25, 1023])
async def test_ports_of_other_services_are_not_dialled(port: int) -> None:
    found = await tried(Addresses(f"{LOCAL}:{port}", f"{LOCAL}:{port}"))
    assert found.reason.count("ports below 1024 are not dialled") == 2


async def test_a_public_caller_makes_nobody_dial_a_private_network() -> None:
    silent = Silent()
    async with silent.listening() as endpoint:
        found = await tried(Addresses(endpoint, endpoint), source=PUBLIC)
        assert "127.0.0.1 is an address of a private network" in found.reason
        assert not silent.connections


async def test_a_port_of_p2pd_counts_on_a_host_that_is_the_peers() -> None:
    silent = Silent()
    async with silent.listening() as dht, links_of(A.peer) as endpoint, links_of(B.peer) as strange:
        silent_ends = asyncio.create_task(_close_all(silent))
        by_source = await tried(Addresses(dht=dht))
        by_certificate = await tried(Addresses(endpoint, dht), source=PRIVATE)
        unproven = await tried(Addresses(dht=dht), source=PRIVATE)
        with_stranger = await tried(Addresses(strange, dht), source=PRIVATE)
        silent_ends.cancel()
    assert by_source.dht
    assert by_certificate.dht
    assert not unproven.dht
    assert not with_stranger.dht
    assert "for payloads (it accepts connections, but not as this node)" in unproven.reason


async def _close_all(silent: Silent) -> None:
    """Close each connection, as p2pd does when it reads a TLS greeting."""
    while True:
        for connection in silent.connections:
            connection.close()
        await asyncio.sleep(0.01)


async def test_a_node_answers_at_its_dht_port_before_its_dht_peer_runs(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "identity.key")
    async with AsyncExitStack() as stack:
        ports = ClaimedPorts(LOCAL, LOCAL, 0)
        links = LinkServer(lambda: credentials(identity.peer))
        await ports.open(links, Role.REPLICA, 0, enrolled(identity, "run"), stack)
        found = await dials(PRIVATE)(identity.peer, "", ports.addresses)
        assert found == Reached(Reachability.OPEN, dht=True)
        ports.release()
        assert not (await dials(PRIVATE)(identity.peer, "", ports.addresses)).dht


async def test_addresses_can_be_tried_before_joining(tmp_path: Path) -> None:
    async with running(resolve("nano"), tmp_path, dial_back=None) as run:
        shown = credentials(A.peer, run.authority)
        server = LinkServer(lambda: shown)
        here = f"{LOCAL}:{await server.start(LOCAL, 0)}"
        found = [
            await try_addresses(run.address, shown, A.peer, Addresses(here, f"{LOCAL}:9")) for _ in range(2)
        ]
        await server.close()
        for each in found:
            assert (each.reached.endpoint, each.reached.dht) == (True, False)
            assert (each.reached.endpoint_problem, each.reached.dht_problem) == (
                "",
                "ports below 1024 are not dialled, except 443",
            )
            assert each.seen == each.local
        assert found[0].seen != found[1].seen
        assert not (await run.status()).peers


async def test_joins_and_changes_of_address_are_dialled_back(tmp_path: Path) -> None:
    spec = resolve("nano", overrides={"swarm.replicas": 2, "swarm.pipelines": 0})
    async with running(spec, tmp_path, dial_back=None) as run:
        reply = await run.join(A, addresses=pb.Addresses(endpoint="127.0.0.1:9"))
        assert (reply.reached.reachability, reply.reached.endpoint) == ("dial-only", False)
        (status,) = (await run.status()).peers
        assert (status.reachability, status.problem) == ("dial-only", reply.reached.reason)
        shown = credentials(A.peer, run.authority)
        server = LinkServer(lambda: shown)
        endpoint = f"{LOCAL}:{await server.start(LOCAL, 0)}"
        request = pb.UpdateAddressesRequest(peer=A.peer, addresses=pb.Addresses(endpoint=endpoint))
        changed = await run.stub(A).UpdateAddresses(request)
        await server.close()
        assert (changed.reached.reachability, changed.reached.endpoint) == ("open", True)
        (status,) = (await run.status()).peers
        assert (status.reachability, status.problem) == ("open", "")
