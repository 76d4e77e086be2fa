"""Ports for tests that run at the same time."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

_ports = itertools.count()


def free_port() -> int:
    """A port that stays free until a test uses it, though other tests run at the same time.

    It is below the ports that the system gives to clients, and in a range of this worker of pytest-xdist.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20_000 + worker % 100 * 100
    while True:
        port = first + next(_ports) % 100
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def has_ipv6_loopback() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False
