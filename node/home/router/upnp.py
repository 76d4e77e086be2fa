"""UPnP: a router found by multicast forwards ports. By the library miniupnpc, if it is installed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from node.home.router.interface import Forwarding, RouterError

_Result = TypeVar("_Result")

_DISCOVER_MILLISECONDS = 1000
_ATTEMPTS = 4
_LEAST_PORT, _LAST_PORT = 20_000, 60_000
_NAME = "hetnode"
# The library has one class of exception, whose text is that of the standard's error.
_TAKEN, _ENDLESS_ONLY = "ConflictInMappingEntry", "OnlyPermanentLeasesSupported"


class UpnpRouter:
    """The router of this network: see :class:`node.home.router.interface.Router`.

    A call of the library blocks, for up to some seconds. It runs in a thread for which neither a cancelled
    task nor the end of the process waits.
    """

    protocol = "UPnP"

    def __init__(self, library: Any) -> None:
        self.external = ""
        self._library = library
        self._one_call = threading.Lock()

    @classmethod
    async def find(cls, local: str) -> Self:
        """Search the network of this machine's address `local`, for about four seconds.

        Raises RouterError if no router answers, or the library is not installed.
        """
        try:
            import miniupnpc  # noqa: PLC0415
        except ImportError:
            raise RouterError("the Python package miniupnpc is not installed") from None
        router = cls(miniupnpc.UPnP(multicastif=local, discoverdelay=_DISCOVER_MILLISECONDS))

        def search(library: Any) -> None:
            library.discover()
            library.selectigd()

        await router._call(search)
        router.external = await router.external_address()
        return router

    async def external_address(self) -> str:
        return str(await self._call(lambda library: library.externalipaddress()))

    async def forward(self, internal: int, external: int, seconds: int) -> Forwarding:
        """As the interface says. Another port where another machine has taken `external`."""
        for _ in range(_ATTEMPTS):
            try:
                return await self._forward(internal, external, seconds)
            except RouterError as error:
                if str(error) == _ENDLESS_ONLY and seconds:
                    seconds = 0
                elif str(error) == _TAKEN:
                    external = random.randint(_LEAST_PORT, _LAST_PORT)
                else:
                    raise
        raise RouterError("other machines have taken the ports")

    async def _forward(self, internal: int, external: int, seconds: int) -> Forwarding:
        await self._call(
            lambda library: library.addportmapping(
                external, "TCP", library.lanaddr, internal, _NAME, "", seconds
            )
        )
        return Forwarding(internal, external, seconds)

    async def stop(self, forwarding: Forwarding) -> None:
        await self._call(lambda library: library.deleteportmapping(forwarding.external, "TCP"))

    async def _call(self, function: Callable[[Any], _Result]) -> _Result:
        def call() -> _Result:
            with self._one_call:  # an abandoned call may still run
                return function(self._library)

        try:
            return await _in_daemon_thread(call)
        except Exception as error:
            raise RouterError(str(error)) from None


async def _in_daemon_thread(function: Callable[[], _Result]) -> _Result:
    """As asyncio.to_thread, whose threads hold up the end of the process."""
    future: Future[_Result] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except Exception as error:  # the caller's to handle
            future.set_exception(error)

    threading.Thread(target=run, name="upnp", daemon=True).start()
    return await asyncio.wrap_future(future)
