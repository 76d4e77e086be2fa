"""A node's main process that only keeps hivemind running: ``python -m tests.support.hive_parent FOLDER``.

Prints "ready" when all its processes run, and then waits to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from node.security.identity import open_identity
from tests.support.hive_nodes import entry_of, hosted_in, start_transport


async def main() -> None:
    identity = open_identity(Path(sys.argv[1]) / "peer.key")
    hivemind = await start_transport(identity, entry_of(identity))
    folder = Path(sys.argv[1])
    await hivemind.host_stages(hosted_in(folder, {0: 1000, 1: 1000}))
    print("ready", flush=True)
    await hivemind.wait_closed()


if __name__ == "__main__":
    asyncio.run(main())
