"""Addresses of the DHT: which ones a node refuses, and which one it announces."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.security.identity import open_identity
from protocol.errors import ErrorCode, HetnodeError
from tests.support.hive_nodes import entry_of, start_node, start_transport


async def test_the_peer_id_is_the_one_that_libp2p_derives(tmp_path: Path) -> None:
    node = await start_node(tmp_path, "node", ())
    try:
        (address,) = node.transport.addresses
        assert address.endswith(f"/p2p/{node.identity.peer}")
    finally:
        await node.transport.close()


async def test_a_dht_that_does_not_answer_is_unreachable(tmp_path: Path) -> None:
    absent = open_identity(tmp_path / "absent.key").peer
    with pytest.raises(HetnodeError) as failure:
        await start_node(tmp_path, "node", (), [f"/ip4/127.0.0.1/tcp/9/p2p/{absent}"])
    assert failure.value.code is ErrorCode.DHT_UNREACHABLE


async def test_an_invalid_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HetnodeError, match="nonsense") as failure:
        await start_node(tmp_path, "node", (), ["nonsense"])
    assert failure.value.code is ErrorCode.BAD_ADDRESS


@pytest.mark.parametrize("address", ["/ip4/169.254.169.254/tcp/80", "/ip6/fe80::1/tcp/1", "/dns4/h/tcp/0"])
async def test_a_dht_at_an_address_that_no_peer_may_have_is_not_dialled(tmp_path: Path, address: str) -> None:
    peer = open_identity(tmp_path / "peer.key").peer
    with pytest.raises(HetnodeError, match="cannot be the multiaddress") as failure:
        await start_node(tmp_path, "node", (), [f"{address}/p2p/{peer}"])
    assert failure.value.code is ErrorCode.BAD_ADDRESS


async def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    node = await start_node(tmp_path, "node", ())
    try:
        port = int(node.transport.addresses[0].split("/")[4])
        identity = open_identity(tmp_path / "other.key")
        with pytest.raises(HetnodeError) as failure:
            await start_transport(identity, entry_of(identity, listen_port=port))
        assert failure.value.code is ErrorCode.PORT_IN_USE
    finally:
        await node.transport.close()


async def test_the_advertised_address_is_announced_to_other_peers(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "peer.key")
    entry = entry_of(identity, listen_host="0.0.0.0", advertise="node.example.org")
    hivemind = await start_transport(identity, entry)
    try:
        (address,) = hivemind.addresses
        assert address.startswith("/dns/node.example.org/tcp/")
        assert address.endswith(f"/p2p/{identity.peer}")
    finally:
        await hivemind.close()
