"""Nodes with the real transport, started once for each test module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.peer_network import PeerNetwork, open_network


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PeerNetwork]:
    async with open_network(tmp_path_factory.mktemp("identities")) as network:
        yield network
