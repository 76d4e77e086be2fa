"""Only sources of members reach p2pd: real processes, on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo

from node.exchange.hive import public_port
from node.exchange.hive.public_port import announced_addresses, listen
from node.security.identity import open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.interfaces import interface_addresses
from tests.support import commands
from tests.support.hive_nodes import Node, entry_of, gone, hosted_in, record_of, start_node, start_transport
from tests.support.waiting import until

MEMBER, STRANGER = "127.0.0.4", "127.0.0.5"
GREETING = b"\x13/multistream/1.0.0\n"
PATIENT = 120.0


@asynccontextmanager
async def guarded(folder: Path, name: str, initial_peers: tuple[str, ...] = ()) -> AsyncIterator[Node]:
    """A peer that at its start accepts connections of this machine alone."""
    identity = open_identity(folder / f"{name}.key")
    transport = await start_transport(identity, entry_of(identity, initial_peers=initial_peers, sources=()))
    try:
        yield Node(identity, transport)
    finally:
        await transport.close()


async def test_where_256_files_may_be_open_connections_are_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        writer.close()  # the server below waits for it, from Python 3.12 on

    async def no_peers() -> list[PeerInfo]:
        return []

    monkeypatch.setattr(public_port, "raise_descriptor_limit", lambda: 256)
    listener = listen("127.0.0.1", 0)
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as p2pd:
        port = public_port.PublicPort(listener, p2pd.sockets[0].getsockname()[1], ("127.0.0.1",))
        port.open(no_peers)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await greeting(reader, writer) == GREETING
        writer.close()


def connections_of(node: Node) -> list[object]:
    """Connections at the public port."""
    port = int(node.transport.addresses[0].split("/")[4])
    dht = node.processes[1]
    return [
        each
        for each in dht.net_connections("tcp")
        if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
    ]


async def connect(node: Node, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(node.transport.addresses[0].split("/")[4])
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))


async def greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What the other end says when it is greeted; nothing if it has closed the connection."""
    try:
        async with asyncio.timeout(PATIENT):
            writer.write(GREETING)
            return await reader.read(100)
    except ConnectionError:
        return b""


async def answers(node: Node, source: str) -> bool:
    return await greeting(*await connect(node, source)) == GREETING


async def ask(node: Node, source: str, member: Node, folder: Path) -> list[str]:
    """What a libp2p peer without a certificate learns from `node` about `member`."""
    identity = open_identity(folder / f"{source}.key")
    where = (node.transport.addresses[0], member.identity.peer)
    script = "tests.support.hive_stranger"
    done = await asyncio.to_thread(commands.run, script, source, str(identity.path), *where)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


async def test_a_stranger_learns_nothing_and_a_member_goes_on(tmp_path: Path) -> None:
    async with guarded(tmp_path, "first") as first:
        await first.transport.admit((), (), (MEMBER,))
        member = await start_node(tmp_path, "member", (), first.transport.addresses)
        try:
            assert await answers(first, MEMBER)
            assert await greeting(*await connect(first, STRANGER)) == b""
            assert await ask(first, STRANGER, member, tmp_path) == ["refused", "unknown"]
            # Behind the address of a member it gets as far as the handshake.
            await first.transport.admit((), (), (MEMBER,), (member.identity.peer,))
            assert await answers(first, MEMBER)
            assert (await ask(first, MEMBER, member, tmp_path))[1] == "unknown"
            await member.transport.publish(record_of(member.identity), ttl=600)
            assert member.identity.peer in await first.transport.lookup()
        finally:
            await member.transport.close()


async def test_connections_of_a_peer_end_with_its_membership_and_wait_for_it(tmp_path: Path) -> None:
    async with guarded(tmp_path, "first") as first:
        member = await start_node(tmp_path, "member", (), first.transport.addresses, client_mode=True)
        try:
            assert connections_of(first)
            await first.transport.admit((), (), (), ("another",))
            await until(lambda: not connections_of(first), PATIENT, "the end of its connection")
            publishing = asyncio.create_task(member.transport.publish(record_of(member.identity), ttl=600))
            await until(lambda: bool(connections_of(first)), PATIENT, "a connection that waits")
            assert member.identity.peer not in await first.transport.lookup()
            await first.transport.admit((), (), (), (member.identity.peer,))
            await publishing
            async with asyncio.timeout(PATIENT):
                while member.identity.peer not in await first.transport.lookup():
                    await member.transport.publish(record_of(member.identity), ttl=700)
        finally:
            await member.transport.close()


async def test_connections_of_a_source_end_when_it_is_no_longer_admitted(tmp_path: Path) -> None:
    async with guarded(tmp_path, "first") as first:
        assert not await answers(first, MEMBER)
        await first.transport.admit((), (), (MEMBER,))
        reader, writer = await connect(first, MEMBER)
        assert await greeting(reader, writer) == GREETING
        await first.transport.admit((), (), ())
        async with asyncio.timeout(PATIENT):
            assert await reader.read(100) == b""
        assert not await answers(first, MEMBER)
        assert await answers(first, "127.0.0.1")


@pytest.mark.parametrize("victim", ["host", "p2pd"])
async def test_port_and_admitted_sources_outlive_a_killed_process(tmp_path: Path, victim: str) -> None:
    async with guarded(tmp_path, "first") as first:
        addresses = first.transport.addresses
        await first.transport.admit((), (), (MEMBER,))
        family = first.processes
        next(process for process in family if victim in process.name()).kill()
        await gone(family)
        await first.transport.lookup()  # waits for the new processes
        assert first.transport.addresses == addresses
        assert await answers(first, MEMBER)
        assert not await answers(first, STRANGER)


async def test_p2pd_itself_listens_on_loopback_and_only_the_dht_process_has_the_public_port(
    tmp_path: Path,
) -> None:
    identity = open_identity(tmp_path / "node.key")
    hivemind = await start_transport(identity, entry_of(identity, listen_host="0.0.0.0"))
    try:
        await hivemind.host_stages(hosted_in(tmp_path, {0: 1000}))
        listening = {
            (process.name(), each.laddr.ip)
            for process in Node(identity, hivemind).processes
            for each in process.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }
        assert sorted(ip for _, ip in listening) == ["0.0.0.0", "127.0.0.1"]
        assert ("p2pd", "127.0.0.1") in listening
        # It dials others from loopback, too, and an address of this machine that is none of loopback.
        other = await start_node(tmp_path, "other", (), hivemind.addresses)
        await other.transport.publish(record_of(other.identity), ttl=600)
        assert other.identity.peer in await hivemind.lookup()
        await other.transport.close()
    finally:
        await hivemind.close()


def test_the_announced_addresses_are_what_others_can_dial() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert announced_addresses(listener, None) == (f"/ip4/127.0.0.1/tcp/{port}",)
        assert announced_addresses(listener, "node.example") == (f"/dns/node.example/tcp/{port}",)
        assert announced_addresses(listener, "[2001:db8::1]") == (f"/ip6/2001:db8::1/tcp/{port}",)
    for host, versions in (("0.0.0.0", {4}), ("::", {4, 6})):
        with listen(host, 0) as listener:
            port = listener.getsockname()[1]
            own = {each for each in interface_addresses() if each.version in versions}
            outside = {f"/ip{each.version}/{each.ip}/tcp/{port}" for each in own if not each.is_loopback}
            assert set(announced_addresses(listener, None)) == (outside or {f"/ip4/127.0.0.1/tcp/{port}"})


def test_a_port_in_use_and_an_address_of_another_machine_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(HetnodeError) as error:
            listen("127.0.0.1", taken.getsockname()[1])
        assert error.value.code is ErrorCode.PORT_IN_USE
    with pytest.raises(HetnodeError) as error:
        listen("192.0.2.99", 0)
    assert error.value.code is ErrorCode.BAD_ADDRESS
