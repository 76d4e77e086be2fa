"""Public names of peers: each peer chooses its own at its join, and the operator can take it."""

from __future__ import annotations

from coordinator.membership.validation import bad_request, check_peer_id
from coordinator.run.state.commands import Unname
from coordinator.run.state.events import PeerNamed
from coordinator.run.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.public_name import public_name
from protocol.types import PeerId


def check_name(name: str) -> None:
    """Raises BAD_REQUEST unless `name` is "" or a public name in normal form."""
    try:
        normal = public_name(name)
    except ValueError as error:
        raise bad_request(f"the public name cannot be used: {error}") from None
    if normal != name:
        raise bad_request("the public name is not in normal form C")


def take_name(transaction: Transaction, peer: PeerId, name: str) -> None:
    """`peer`, which has joined, is called `name` from now on, unless the operator refuses it any name."""
    if transaction.state.names.get(peer, "") not in (name, None):
        transaction.add(PeerNamed(transaction.now, peer, name))


def unname(transaction: Transaction, command: Unname) -> None:
    """Take the name of a peer, or allow it to have one again. Raises BAD_REQUEST, UNKNOWN_PEER."""
    check_peer_id(command.peer)
    state = transaction.state
    if command.peer not in state.peers and command.peer not in state.enrolled:
        raise HetnodeError(
            ErrorCode.UNKNOWN_PEER,
            f"Peer {command.peer} was never in this run.",
            "'hetnode peers list' shows all that were.",
        )
    is_refused = command.peer in state.names and state.names[command.peer] is None
    if is_refused is command.allow:
        transaction.add(PeerNamed(transaction.now, command.peer, "", refused=not command.allow))
