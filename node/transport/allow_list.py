"""The peers that may call this one."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from node import hooks

log = logging.getLogger(__name__)

_MAX_NAMED = 1024  # refused peers that the log names; a bound, because anyone can invent peer ids


class NotAdmitted(Exception):
    """The caller is not in the allow list. The message is sent to the caller."""


class AllowList:
    """The ids of the peers that may call. Without `peers` every call is refused."""

    def __init__(self, peers: Iterable[str] = ()) -> None:
        self._peers = frozenset(peers)
        self._named: set[str] = set()

    def admit(self, peers: Iterable[str]) -> None:
        """Let exactly `peers` call from now on."""
        self._peers = frozenset(peers)

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def check(self, peer: str, call: str) -> None:
        """Raises NotAdmitted unless `peer`, whose id the transport has authenticated, may call.

        The log names each refused peer once.
        """
        hooks.current().before_contact(peer)
        if peer in self._peers:
            return
        if peer not in self._named and len(self._named) < _MAX_NAMED:
            self._named.add(peer)
            log.warning("refused %s a call of %s: it is not in the plan", peer, call)
        raise NotAdmitted("this peer is not in the plan, or was banned")
