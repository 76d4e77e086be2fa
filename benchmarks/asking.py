"""How a benchmark tells its processes what to do: a line of JSON each way, over standard input and output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any


async def ask(process: asyncio.subprocess.Process, command: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `process` to `command`. RuntimeError where it has ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(command).encode() + b"\n")
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a process of the benchmark has ended: see its words above")
    answer: dict[str, Any] = json.loads(line)
    return answer
