"""A node's main process that only keeps hivemind running: ``python -m tests.support.hive_parent FOLDER``.

Prints "ready" when all its processes run, and then waits to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from node.hive.transport import HivemindTransport
from node.security.identity import open_identity
from tests.support.certificates import enrolled
from tests.support.hive_nodes import hosted_in


async def main() -> None:
    identity = open_identity(Path(sys.argv[1]) / "peer.key")
    credentials = enrolled(identity, "orphans")
    hivemind = await HivemindTransport.start(
        identity=identity,
        certificate=credentials.certificate_file,
        authority=credentials.authority_file,
        run="orphans",
    )
    folder = Path(sys.argv[1])
    await hivemind.host_stages(hosted_in(folder, {0: 1000, 1: 1000}))
    print("ready", flush=True)
    await hivemind.wait_closed()


if __name__ == "__main__":
    asyncio.run(main())
