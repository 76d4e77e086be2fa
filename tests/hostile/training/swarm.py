"""The swarm under attack: a full replica and a pipeline of two members, which train while it is attacked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.types import Role
from tests.builders import spec_of
from tests.hostile.measure import Watch, unharmed
from tests.hostile.peer import Peer, Refused, cancel
from tests.support.processes import ProcessSwarm

HONEST = {"one": Role.REPLICA, "two": Role.STAGE, "three": Role.STAGE}
ROUND_SECONDS = 120.0
CERTIFICATE_LIFE = "180s"
"""So short that the coordinator's servers, and the nodes, renew their certificates in a long attack."""


@contextmanager
def training_swarm(folder: Path) -> Iterator[ProcessSwarm]:
    """It trains until the end of the block."""
    spec = spec_of(replicas=1, pipelines=1, rounds=100_000, timing__heartbeat=1.0)
    with ProcessSwarm(spec, folder, HONEST) as swarm:
        swarm.start_coordinator("--certificate-life", CERTIFICATE_LIFE)
        for name in HONEST:
            swarm.start_node(name)
        swarm.wait_round(5, 240)  # the processes have their final size
        yield swarm


@contextmanager
def attacked(swarm: ProcessSwarm) -> Iterator[Watch]:
    """Attack the swarm in the block. No round may be aborted in it, nor in the two rounds after it."""
    with unharmed(swarm) as watch:
        yield watch
        swarm.wait_round(swarm.round_number + 2, ROUND_SECONDS)
    print(f"\n{watch.report()}")


async def joined(swarm: ProcessSwarm) -> AsyncIterator[Peer]:
    """A peer that has joined as a full replica, and sends heartbeats."""
    peer = Peer()
    await peer.enroll(swarm.invite())
    await peer.join()
    alive = asyncio.create_task(peer.keep_alive(0.5))
    yield peer
    await cancel(alive)
    try:
        await peer.call("Leave", reason="enough")
    except Refused as refused:
        if refused.code not in ("quarantined", "unknown-peer"):
            raise
    await peer.close()
