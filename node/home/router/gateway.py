"""The address of the router: the default gateway of this machine."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

_ROUTES = Path("/proc/net/route")
_MOST_BYTES = 1 << 16
_IS_UP_GATEWAY = 0x3
_MACOS_COMMAND = ("/sbin/route", "-n", "get", "default")


async def default_gateway() -> str | None:
    """Its IPv4 address; None if this machine has none, or the system does not say."""
    with suppress(OSError):
        if sys.platform == "darwin":
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*_MACOS_COMMAND, stdout=pipe, stderr=pipe)
            output, _ = await process.communicate()
            return gateway_in_macos_route(output.decode(errors="replace"))
        return gateway_in_linux_routes(_linux_routes())
    return None


def _linux_routes() -> str:
    with _ROUTES.open() as routes:
        return routes.read(_MOST_BYTES)


def gateway_in_linux_routes(text: str) -> str | None:
    """The default gateway of the lowest metric in the text of /proc/net/route."""
    found: list[tuple[int, str]] = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        with suppress(ValueError, IndexError, struct.error):
            destination, gateway, flags = (int(field, 16) for field in fields[1:4])
            metric, mask = int(fields[6]), int(fields[7], 16)
            if destination == mask == 0 and flags & _IS_UP_GATEWAY == _IS_UP_GATEWAY:
                # The kernel prints the bytes of the address as a number of this machine.
                found.append((metric, socket.inet_ntoa(struct.pack("=I", gateway))))
    return min(found)[1] if found else None


def gateway_in_macos_route(text: str) -> str | None:
    """The gateway in the output of ``route -n get default``."""
    found = re.search(r"^\s*gateway: (\d{1,3}(?:\.\d{1,3}){3})\s*$", text, re.MULTILINE)
    return found[1] if found else None
