"""Access control: the certificate of each call, excluded peers, and limits on the calls of one caller."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.membership.sources import MemberSources
from coordinator.membership.validation import check_not_excluded
from coordinator.run.command_loop import ADMISSION_TOPIC, CommandLoop
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.calls import Context, rate_limited
from protocol.server.limits import is_address
from protocol.trust.names import OPERATOR_URI, identity_of, peer_of, peer_uri
from protocol.trust.rate_limit import RateLimit
from protocol.types import PeerId

_AT_ONCE, _PER_SECOND = 20, 0.2
"""Costly calls of one peer, such as joins: a node that restarts in a loop must not fill the log."""


class AccessControl:
    """Access control of the coordinator's API: :meth:`check` for every call, then what the call asks for.

    Args:
        sources: gets the source of every call of a peer that is not excluded.
        source_of, port_of: the source and port of a connection, by gRPC's name of the client.
        fence: raises where another coordinator has taken the run over.
    """

    def __init__(
        self,
        command_loop: CommandLoop,
        sources: MemberSources,
        source_of: Callable[[str], str],
        port_of: Callable[[str], int] = lambda _: 0,
        fence: Callable[[Context], None] = lambda _: None,
    ) -> None:
        self._fence = fence
        self._command_loop, self._sources = command_loop, sources
        self._source_of, self._port_of = source_of, port_of
        self._rate = RateLimit(_AT_ONCE, _PER_SECOND)

    def check(self, context: Context) -> None:
        """Raises what `fence` raises, and BANNED or QUARANTINED for excluded peers, whatever they ask."""
        self._fence(context)
        holder = identity_of(context)
        self._check_not_excluded(holder)
        if (peer := peer_of(holder)) is not None:
            self._note_source(peer, self._source_of(context.peer()))

    def peer(self, context: Context, claimed: str) -> PeerId:
        """`claimed`, in whose name a call is made, if the certificate proves it: a sign of life.

        Calls in no name, such as for a status, may come from tools with the certificate of a dead node.

        Raises:
            HetnodeError: CERTIFICATE_REFUSED if the certificate names another peer; BANNED; QUARANTINED.
        """
        holder = identity_of(context)
        if not claimed or holder != peer_uri(claimed):
            # The lengths bound what a caller can write into the log.
            raise certificate_refused(
                f"A call in the name of {claimed[:64]!r} came with the certificate of {holder[:96]!r}"
            )
        self._check_not_excluded(holder)  # again: it may have been excluded before its message arrived
        self._command_loop.note_call(PeerId(claimed))
        return PeerId(claimed)

    def check_member(self, context: Context) -> None:
        """For a call that every certificate of the run permits. Raises the errors of :meth:`peer`."""
        holder = identity_of(context)
        if peer_of(holder) is None and holder != OPERATOR_URI:
            raise certificate_refused(f"A call came with the certificate of {holder[:96]!r}")
        self._check_not_excluded(holder)

    def check_operator(self, context: Context) -> None:
        """For a call that only the operator's certificate permits. Raises CERTIFICATE_REFUSED."""
        holder = identity_of(context)
        if holder != OPERATOR_URI:
            raise certificate_refused(
                f"Only the operator may make this call, but it came with the certificate of {holder[:96]!r}"
            )

    def check_rate(self, peer: PeerId, what: str) -> None:
        """Raises RATE_LIMITED if `peer` does too often what `what` says, such as "asks to join"."""
        if not self._rate.allows(f"{peer} {what}", self._command_loop.now()):
            raise rate_limited(f"Peer {peer} {what} too often")

    def caller(self, context: Context) -> tuple[str, int]:
        """The source of a call, and the port from which it comes; 0 if that is not known."""
        return self._source_of(context.peer()), self._port_of(context.peer())

    def _note_source(self, peer: PeerId, source: str) -> None:
        if is_address(source) and self._sources.note(peer, source, self._command_loop.now()):
            self._command_loop.wake(ADMISSION_TOPIC)

    def _check_not_excluded(self, holder: str) -> None:
        peer = peer_of(holder)
        if peer is not None:
            check_not_excluded(self._command_loop.state, peer)


def certificate_refused(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.CERTIFICATE_REFUSED,
        f"{cause}.",
        "Use the certificate that this run has issued to the caller.",
    )
