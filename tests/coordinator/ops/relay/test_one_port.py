"""API, enrollment and relay behind one public port of the coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coordinator.api.public_ports import RelayOptions
from node.home.relay.agent import RelayAgent
from node.net.coordinator_channel import fetch_status
from node.net.enrollment import enroll
from node.security.identity import open_identity
from protocol.relay.exposed import RelayedService
from protocol.types import RelayAddress
from tests.builders import spec_of
from tests.support.coordinator_process import COORDINATOR, running


async def test_a_newcomer_enrols_calls_and_is_reachable_at_one_port(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path / "run", relay=RelayOptions(), one_port=True) as run:
        assert run.address == run.enrollment
        invite, identity = await run.invite(), open_identity(tmp_path / "identity.key")
        credentials = await enroll(invite, identity, 20)
        assert credentials.api == run.address
        status = await fetch_status(run.address, credentials.tls, 20)
        assert status.run == run.run
        relay = RelayAddress(COORDINATOR.peer, run.address)
        servers = {service: lambda: None for service in RelayedService}
        agent = RelayAgent(relay, identity.peer, lambda: credentials.tls, servers)
        keeping = asyncio.create_task(agent.keep())
        async with asyncio.timeout(20):
            assert await agent.connected()
        keeping.cancel()
