"""The TCP ports of a relay for DHT peers: one for each peer, whose first bytes name no peer."""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Iterator

from protocol.server.gateway import listen_on
from protocol.types import PeerId

_NUMBER = 100
_LEAST, _INSTEAD = 1024, 7801


def ports_after(port: int) -> range:
    """The usual ports of a relay that listens on `port`: the hundred after it, or 7801 to 7900 for port 443.

    The coordinator dials no lower ports.
    """
    first = port + 1 if port >= _LEAST else _INSTEAD
    return range(first, min(first + _NUMBER, 65536))


class PeerPorts:
    """Listens on a port of `ports` for each peer, if possible on the same one again.

    Args:
        ports: range(0) takes any free port.
    """

    def __init__(self, host: str, ports: range) -> None:
        self._host, self._ports = host, ports
        self._last: OrderedDict[PeerId, int] = OrderedDict()  # the peer that listened longest ago first

    def listen(self, peer: PeerId, wanted: int) -> socket.socket:
        """A socket that listens for `peer`; on `wanted`, its port before a restart of the relay, if possible.

        Raises OSError if no port is free.
        """
        for port in self._candidates(peer, wanted):
            try:
                listener = listen_on(self._host, port)
            except OSError:
                continue
            bound = int(listener.getsockname()[1])
            for former, its in list(self._last.items()):
                if its == bound or former == peer:
                    del self._last[former]
            self._last[peer] = bound
            return listener
        raise OSError(f"none of the ports {self._ports.start}-{self._ports.stop - 1} is free")

    def _candidates(self, peer: PeerId, wanted: int) -> Iterator[int]:
        own = self._last.get(peer)
        if own is not None:
            yield own
        kept = set(self._last.values())
        # The port that another peer had, and may want again, comes last.
        if (wanted in self._ports or (wanted and not self._ports)) and wanted not in kept:
            yield wanted
        if not self._ports:
            yield 0
        yield from (port for port in self._ports if port not in kept)
        yield from list(self._last.values())
