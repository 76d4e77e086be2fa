"""The peers that may call this one."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from node import hooks

log = logging.getLogger(__name__)

_MAX_NAMED = 1024  # refused peers that the log names; a bound, because anyone can invent peer ids


class NotAdmitted(Exception):
    """The caller is not in the allow list. The message is sent to the caller."""


class RefusedPeers:
    """The refused peers that the log has named: each of them once, and a bounded number of them."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def is_new(self, peer: str) -> bool:
        """Whether the log should name `peer` now."""
        if peer in self._named or len(self._named) >= _MAX_NAMED:
            return False
        self._named.add(peer)
        return True


class AllowList:
    """The ids of the peers that may call."""

    def __init__(self, peers: Iterable[str] = ()) -> None:
        self._peers = frozenset(peers)
        self._refused = RefusedPeers()

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
        if self._refused.is_new(peer):
            log.warning("refused %s a call of %s: it is not in the plan", peer, call)
        raise NotAdmitted("this peer is not in the plan, or was banned")
