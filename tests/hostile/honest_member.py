"""An honest member in a process of its own, so that its latencies are those of the coordinator alone.

    python -m tests.hostile.honest_member ADDRESS SOURCE FOLDER

It asks for the status again and again from the loopback address SOURCE, over a new connection each time, as a
user's command does. FOLDER has authority.pem, key.pem and certificate.pem. Each call is a line of JSON on
standard output: its seconds, or its failure. It ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import grpc

from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.trust.names import COORDINATOR_NAME
from tests.support.hostile import relay

FILES = ("authority.pem", "key.pem", "certificate.pem")
CALL_SECONDS, PAUSE_SECONDS = 30.0, 0.2


async def call(address: str, credentials: grpc.ChannelCredentials) -> dict[str, float | str]:
    began = time.monotonic()
    try:
        options = [("grpc.ssl_target_name_override", COORDINATOR_NAME)]
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            await pb_grpc.CoordinatorStub(channel).Status(pb.StatusRequest(), timeout=CALL_SECONDS)
        return {"seconds": time.monotonic() - began}
    except grpc.aio.AioRpcError as error:
        return {"failure": f"{error.code().name}: {error.details()}"}


async def main(address: str, source: str, folder: Path) -> None:
    credentials = grpc.ssl_channel_credentials(*((folder / name).read_bytes() for name in FILES))
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    async with relay(address, source) as through:
        while not ended.done():
            print(json.dumps(await call(through, credentials)), flush=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), PAUSE_SECONDS)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
