"""Access control: the certificate of each call, excluded peers, and limits on the calls of one caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.command_loop import CommandLoop
from coordinator.membership.validation import check_not_excluded
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.rate_limit import RateLimit
from protocol.trust.tls import OPERATOR_URI, Authenticated, identity_of, peer_of, peer_uri
from protocol.types import PeerId

# Joins of one peer: a node that restarts in a loop must not fill the log.
_JOINS_AT_ONCE = 20
_JOINS_PER_SECOND = 0.2
# A host waits with one call for each of its stages, and may repeat a call whose answer was lost.
_SPARE_CALLS = 32
_CALLS_PER_STAGE = 4


class Access:
    """Access control of the coordinator's API. Every call first enters one of these contexts."""

    def __init__(self, command_loop: CommandLoop) -> None:
        self._command_loop = command_loop
        self._most_calls = _SPARE_CALLS + _CALLS_PER_STAGE * command_loop.spec.swarm.stages
        self._calls: Counter[str] = Counter()
        self._joins = RateLimit(_JOINS_AT_ONCE, _JOINS_PER_SECOND)

    @contextmanager
    def of_peer(self, context: Authenticated, claimed: str) -> Iterator[PeerId]:
        """For a call in the name of `claimed`. Yields this name, which the certificate has proved.

        Raises:
            HetnodeError: CERTIFICATE_REFUSED if the certificate names another peer; BANNED; QUARANTINED;
                RATE_LIMITED if the peer has too many open calls.
        """
        holder = identity_of(context)
        if not claimed or holder != peer_uri(claimed):
            # The lengths bound what a caller can write into the log.
            raise certificate_refused(
                f"A call in the name of {claimed[:64]!r} came with the certificate of {holder[:96]!r}"
            )
        peer = PeerId(claimed)
        check_not_excluded(self._command_loop.state, peer)
        with self._count_call(holder):
            yield peer

    @contextmanager
    def of_member(self, context: Authenticated) -> Iterator[None]:
        """For a call that every certificate of the run permits. Raises the errors of :meth:`of_peer`."""
        holder = identity_of(context)
        peer = peer_of(holder)
        if peer is not None:
            check_not_excluded(self._command_loop.state, peer)
        elif holder != OPERATOR_URI:
            raise certificate_refused(f"A call came with the certificate of {holder[:96]!r}")
        with self._count_call(holder):
            yield

    @contextmanager
    def of_operator(self, context: Authenticated) -> Iterator[None]:
        """For a call that only the operator's certificate permits. Raises the errors of :meth:`of_peer`."""
        holder = identity_of(context)
        if holder != OPERATOR_URI:
            raise certificate_refused(
                f"Only the operator may make this call, but it came with the certificate of {holder[:96]!r}"
            )
        with self._count_call(holder):
            yield

    def check_join_rate(self, peer: PeerId) -> None:
        """Raises RATE_LIMITED if `peer` asks to join too often."""
        if not self._joins.allows(peer, self._command_loop.now()):
            raise rate_limited(f"Peer {peer} asks to join too often")

    @contextmanager
    def _count_call(self, holder: str) -> Iterator[None]:
        if self._calls[holder] >= self._most_calls:
            raise rate_limited(f"{holder} has {self._most_calls} calls open already")
        self._calls[holder] += 1
        try:
            yield
        finally:
            self._calls[holder] -= 1
            if not self._calls[holder]:  # entries of gone peers would pile up
                del self._calls[holder]


def certificate_refused(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.CERTIFICATE_REFUSED,
        f"{cause}.",
        "Use the certificate that this run has issued to the caller.",
    )


def rate_limited(cause: str) -> HetnodeError:
    return HetnodeError(ErrorCode.RATE_LIMITED, f"{cause}.", "Wait a little and try again.")
