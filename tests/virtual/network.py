"""The wires between the machines of a virtual swarm: how long a message takes, and who reaches whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import Context
from random import Random
from typing import Protocol

from tests.virtual.loop import Life, current_life

OPERATOR = "operator"
"""Who calls where no node does: the test itself."""
SILENCE_SECONDS = 40.0
"""Both ends give a connection up that has been silent for so long (gRPC's keepalive)."""


class Talk(Protocol):
    """Something open between two machines."""

    caller: str
    host: str
    caller_life: Life | None
    host_life: Life | None
    server: object

    def break_off(self, why: str) -> None:
        """Both ends see that the connection has gone."""


class Network:
    """Everybody reaches everybody until told otherwise.

    Machines that are `apart` exchange no packets: what they send arrives when they are together again, and
    their connections end after SILENCE_SECONDS. One that is `closed` to another cannot be called by it, as
    behind a router, but may call.

    Attributes:
        bandwidth: bytes per second of a machine, by its name; without an entry it is unlimited.
    """

    def __init__(self, chance: Random, latency: float = 0.02) -> None:
        self.bandwidth: dict[str, float] = {}
        self._chance, self._latency = chance, latency
        self._apart: set[frozenset[str]] = set()
        self._closed: set[tuple[str, str]] = set()
        self._isolated: set[str] = set()
        self._changes = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._talks: dict[Talk, None] = {}

    def part(self, one: str, other: str) -> None:
        """No packet gets from one to the other."""
        self._apart.add(frozenset((one, other)))
        self._has_changed()

    def isolate(self, *names: str) -> None:
        """No packet of these machines gets to any other, nor the other way."""
        self._isolated |= set(names)
        self._has_changed()

    def close(self, caller: str, host: str) -> None:
        """`caller` can open no connection to `host`."""
        self._closed.add((caller, host))
        self._has_changed()

    def heal(self) -> None:
        """Everybody reaches everybody again."""
        self._apart.clear()
        self._closed.clear()
        self._isolated.clear()
        self._has_changed()

    def reaches(self, one: str, other: str) -> bool:
        """Whether packets get from one to the other."""
        if one == other:
            return True
        return not {one, other} & self._isolated and frozenset((one, other)) not in self._apart

    def may_call(self, caller: str, host: str) -> bool:
        return self.reaches(caller, host) and (caller, host) not in self._closed

    async def travel(self, source: str, target: str, nbytes: int) -> None:
        """Take as long as `nbytes` do from `source` to `target`; endless while they are apart."""
        while not self.reaches(source, target):
            await self.change()
        slowest = min(
            (self.bandwidth[name] for name in (source, target) if name in self.bandwidth), default=0
        )
        seconds = self._latency * self._chance.uniform(0.5, 1.5) + (nbytes / slowest if slowest else 0.0)
        await asyncio.sleep(seconds)

    async def change(self) -> None:
        """Return as soon as anything is different: reachability, or who listens."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def announce_change(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def opened(self, talk: Talk) -> None:
        self._talks[talk] = None

    def ended(self, talk: Talk) -> None:
        self._talks.pop(talk, None)

    def has_died(self, life: Life) -> None:
        """The machine of `life` closes all connections of its processes, which have ended."""
        for talk in self._of(life):
            talk.break_off("the connection was reset")

    def has_stopped(self, server: object) -> None:
        """`server` takes leave of all who talk to it."""
        for talk in [talk for talk in self._talks if talk.server is server]:
            talk.break_off("the server is stopping")

    def reset(self, one: str, other: str) -> None:
        """Break every open connection between two machines. New ones may be opened."""
        for talk in [talk for talk in self._talks if {talk.caller, talk.host} == {one, other}]:
            talk.break_off("the connection was reset")

    def is_silent(self, life: Life) -> None:
        """`life` is suspended: unless it answers in time, its connections end."""
        asyncio.get_running_loop().call_later(SILENCE_SECONDS, self._give_up, life, context=Context())

    def _give_up(self, life: Life) -> None:
        if life.is_suspended:
            for talk in self._of(life):
                talk.break_off("the keepalive was not answered")

    def _of(self, life: Life) -> list[Talk]:
        return [talk for talk in self._talks if life in (talk.caller_life, talk.host_life)]

    def _has_changed(self) -> None:
        self._changes += 1
        self.announce_change()
        asyncio.get_running_loop().call_later(
            SILENCE_SECONDS, self._break_those_apart, self._changes, context=Context()
        )

    def _break_those_apart(self, change: int) -> None:
        for talk in list(self._broken(change)):
            talk.break_off("the keepalive was not answered")

    def _broken(self, change: int) -> Iterator[Talk]:
        # Changes meanwhile have timers of their own; only what was apart all the time is broken here.
        if change == self._changes:
            yield from (talk for talk in self._talks if not self.reaches(talk.caller, talk.host))


def here() -> str:
    """The name of the machine whose code runs now."""
    life = current_life.get()
    return OPERATOR if life is None else life.name
