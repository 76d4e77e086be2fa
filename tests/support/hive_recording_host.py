"""The hivemind host of production, which also records the calls inside hivemind.

A line in the file STEP_LOG names each step of an averager, and each search for a group through the DHT.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hivemind import DecentralizedAverager
from hivemind.averaging.matchmaking import Matchmaking

from node.exchange.hive import host


def log_call(name: str) -> None:
    with Path(os.environ["STEP_LOG"]).open("a") as file:
        file.write(f"{name}\n")


def recorded(method: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
    async def call(*arguments: Any, **options: Any) -> Any:
        log_call(name)
        return await method(*arguments, **options)

    return call


def main() -> None:
    DecentralizedAverager._step = recorded(DecentralizedAverager._step, "step")
    Matchmaking.look_for_group = recorded(Matchmaking.look_for_group, "search")
    host.main()


if __name__ == "__main__":
    main()
