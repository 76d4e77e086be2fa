"""The rule by which a peer gets an owner, who has the credit of the peer."""

from __future__ import annotations

from coordinator.base.phrases import short
from coordinator.membership.validation import bad_request
from coordinator.run.state.commands import BindOwner
from coordinator.run.state.events import OwnerBound
from coordinator.run.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.owner import is_bound, is_released

MOST_OWNERS = 4
"""Of one peer in a run, one after the other: a peer must not fill the log by going to and fro."""


def bind(transaction: Transaction, command: BindOwner) -> None:
    """The peer has this owner from now on. The first one stays, unless its key lets the peer go.

    Raises BAD_REQUEST for a binding that is not signed by both for this run, or that comes too late.
    """
    binding, state = command.binding, transaction.state
    if binding.peer not in state.peers or not is_bound(binding, state.run):
        raise bad_request(f"owner and peer {short(binding.peer)} have not both signed for this run")
    former = state.owners.get(binding.peer, ())
    if former[-1:] == (binding.owner,):
        return
    if former and not is_released(binding, state.run, former[-1]):
        raise HetnodeError(
            ErrorCode.BAD_REQUEST,
            f"Peer {binding.peer} belongs to the owner {former[-1]}, who has not let it go.",
            "Recover both owners on the machine of the node, the former first: 'hetnode owner --recover'.",
        )
    if len(former) >= MOST_OWNERS:
        raise bad_request(f"peer {short(binding.peer)} has had {len(former)} owners in this run already")
    transaction.add(OwnerBound(transaction.now, binding))
