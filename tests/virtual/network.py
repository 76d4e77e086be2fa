"""The network between the machines of a virtual swarm: delays, bandwidth and broken connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Protocol

from tests.virtual.loop import VirtualProcess, current_process

OPERATOR = "operator"
"""The name of the test's own machine."""
SILENCE_SECONDS = 40.0
"""gRPC's keepalive: a connection without an answer fails after this time."""


class Connection(Protocol):
    """A call that is open between two machines."""

    caller: str
    host: str
    caller_process: VirtualProcess | None
    host_process: VirtualProcess | None
    server: object

    def fail(self, why: str) -> None:
        """Both ends see that the connection has failed."""


class Network:
    """At first, all machines reach each other.

    Separated machines exchange no packets: their messages arrive after :meth:`heal`, and their connections
    fail after SILENCE_SECONDS. Blocked calls cannot be opened, as behind a router; calls in the other
    direction can.

    Attributes:
        bandwidth: bytes per second of a machine, by its name; without an entry it is unlimited.
    """

    def __init__(self, rng: Random, latency: float = 0.02) -> None:
        self.bandwidth: dict[str, float] = {}
        self._chance, self._latency = rng, latency
        self._separated: set[frozenset[str]] = set()
        self._closed: set[tuple[str, str]] = set()
        self._isolated: set[str] = set()
        self._changes = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._connections: dict[Connection, None] = {}

    def separate(self, one: str, other: str) -> None:
        """Let no packet pass between two machines."""
        self._separated.add(frozenset((one, other)))
        self._has_changed()

    def isolate(self, *names: str) -> None:
        """Let no packet pass between these machines and any other."""
        self._isolated |= set(names)
        self._has_changed()

    def block_calls(self, caller: str, host: str) -> None:
        """Let `caller` open no connection to `host`."""
        self._closed.add((caller, host))
        self._has_changed()

    def heal(self) -> None:
        """Let all machines reach each other again."""
        self._separated.clear()
        self._closed.clear()
        self._isolated.clear()
        self._has_changed()

    def reaches(self, one: str, other: str) -> bool:
        """Whether packets pass between two machines."""
        if one == other:
            return True
        return not {one, other} & self._isolated and frozenset((one, other)) not in self._separated

    def can_call(self, caller: str, host: str) -> bool:
        return self.reaches(caller, host) and (caller, host) not in self._closed

    async def transfer(self, source: str, target: str, nbytes: int) -> None:
        """Wait as long as `nbytes` take from `source` to `target`; as long as they are separated, too."""
        while not self.reaches(source, target):
            await self.wait_for_change()
        slowest = min(
            (self.bandwidth[name] for name in (source, target) if name in self.bandwidth), default=0
        )
        seconds = self._latency * self._chance.uniform(0.5, 1.5) + (nbytes / slowest if slowest else 0.0)
        await asyncio.sleep(seconds)

    async def wait_for_change(self) -> None:
        """Return when a machine becomes reachable or unreachable, or a server starts."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def announce_change(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def add(self, connection: Connection) -> None:
        self._connections[connection] = None

    def remove(self, connection: Connection) -> None:
        self._connections.pop(connection, None)

    def end_process(self, process: VirtualProcess) -> None:
        """Fail all connections of a killed process."""
        self._fail("the connection was reset", lambda each: process in _processes_of(each))

    def close_connections_to(self, server: object) -> None:
        """Fail all connections to a server that stops."""
        self._fail("the server is stopping", lambda each: each.server is server)

    def reset(self, one: str, other: str) -> None:
        """Fail all connections between two machines. They can open new ones."""
        self._fail("the connection was reset", lambda each: {each.caller, each.host} == {one, other})

    def start_keepalive(self, process: VirtualProcess) -> None:
        """Fail the connections of a suspended process if it is suspended after SILENCE_SECONDS."""
        loop = asyncio.get_running_loop()
        loop.call_later(SILENCE_SECONDS, self._fail_if_suspended, process, context=Context())

    def _fail_if_suspended(self, process: VirtualProcess) -> None:
        if process.is_suspended:
            self._fail("the keepalive was not answered", lambda each: process in _processes_of(each))

    def _has_changed(self) -> None:
        self._changes += 1
        self.announce_change()
        loop = asyncio.get_running_loop()
        loop.call_later(SILENCE_SECONDS, self._fail_separated, self._changes, context=Context())

    def _fail_separated(self, change: int) -> None:
        # A later change has its own timer. Only machines that were separated all the time lose connections.
        if change == self._changes:
            self._fail(
                "the keepalive was not answered", lambda each: not self.reaches(each.caller, each.host)
            )

    def _fail(self, why: str, condition: Callable[[Connection], bool]) -> None:
        for connection in [each for each in self._connections if condition(each)]:
            connection.fail(why)


def _processes_of(connection: Connection) -> tuple[VirtualProcess | None, VirtualProcess | None]:
    return connection.caller_process, connection.host_process


def current_machine() -> str:
    """The name of the machine whose code runs now."""
    process = current_process.get()
    return OPERATOR if process is None else process.name
