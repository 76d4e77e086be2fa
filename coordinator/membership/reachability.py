"""Whether others reach a peer: what the coordinator may dial, what follows from it, and links that fail.

A peer could make the coordinator dial any machine for it. So only addresses that a peer may have are dialled,
at ports that nodes use, and private ones only for a caller from a private network.
"""

from __future__ import annotations

from coordinator.membership.validation import bad_request, live_peer
from coordinator.run.state.commands import ReportLink, UpdateAddresses
from coordinator.run.state.events import AddressesChanged, LinkFailed
from coordinator.run.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.endpoints import check_endpoint
from protocol.trust.reachability import Addresses, Reached
from protocol.types import Reachability

_REMEDY = (
    "To be reached, let the router and the firewall forward two fixed ports to this machine, and give "
    "--listen 0.0.0.0:PORT, --dht-port PORT and --advertise with the public name or address. --listen none "
    "says that this node shall only dial"
)


def check_claims(*addresses: str) -> None:
    """Raises BAD_ADDRESS for an address that no peer may have."""
    for address in filter(None, addresses):
        try:
            check_endpoint(address)
        except ValueError as error:
            raise HetnodeError(
                ErrorCode.BAD_ADDRESS,
                f"The coordinator refuses the endpoint {address}: {error}.",
                "Give --advertise HOST, a name or address under which the other nodes reach this machine.",
            ) from None


def reached(addresses: Addresses, endpoint_problem: str, dht_problem: str) -> Reached:
    """The class of a peer. Each problem says why an address did not answer as that peer; "" if it did."""
    endpoint_problem = endpoint_problem if addresses.endpoint else ""
    dht_problem = dht_problem if addresses.dht else ""
    claims = (
        (addresses.endpoint, endpoint_problem, "for links"),
        (addresses.dht, dht_problem, "for payloads"),
    )
    problems = [f"{address} {use} ({problem})" for address, problem, use in claims if problem]
    if problems:
        reason = (
            f"the coordinator does not reach this node at {' and '.join(problems)}, so the node only dials. "
            f"{_REMEDY}"
        )
        kind = Reachability.DIAL_ONLY
    else:
        reason = ""
        open_kind = Reachability.RELAYED if addresses.relayed else Reachability.OPEN
        kind = open_kind if addresses.endpoint or addresses.dht else Reachability.DIAL_ONLY
    has_endpoint = bool(addresses.endpoint) and not endpoint_problem
    has_dht = bool(addresses.dht) and not dht_problem
    return Reached(kind, has_endpoint, has_dht, reason, endpoint_problem, dht_problem)


def update_addresses(transaction: Transaction, command: UpdateAddresses) -> None:
    """Record that others reach the peer at another address, or not any more. Raises UNKNOWN_PEER."""
    peer = live_peer(transaction.state, command.peer)
    known = (peer.endpoint, peer.reachability, peer.claimed, peer.problem)
    if known != (command.endpoint, command.reachability, command.claimed, command.problem):
        transaction.add(
            AddressesChanged(
                transaction.now,
                command.peer,
                command.endpoint,
                command.reachability,
                command.claimed,
                command.problem,
            )
        )


def report_link(transaction: Transaction, command: ReportLink) -> None:
    """Record a link that its dialling end cannot open, once under each plan, and not under older ones then.

    The replica does not count until it offers a payload, so the round of the others goes on. Members may open
    links of the newest plan before its first round. A report under another plan has no effect. Raises
    UNKNOWN_PEER, BAD_REQUEST if the two are no neighbours.
    """
    state, peer = transaction.state, command.peer
    live_peer(state, peer)
    if not state.plans:
        return
    epoch = state.standing_epoch(peer, command.epoch)
    if epoch not in (state.plan_for(state.current_round).epoch, state.plans[-1].epoch):
        return
    assignment = state.assignments[epoch].get(peer)
    members = assignment.replica.members if assignment else ()
    position = assignment.position if assignment else 0
    around = [each.peer for each in members[max(0, position - 1) : position + 2] if each.peer != peer]
    if command.neighbour not in around:
        raise bad_request(f"{peer} reports a link to {command.neighbour}, which is not its neighbour")
    # Who was lost under this plan comes back with another address, to which no link has failed.
    is_over = bool(command.address) and command.neighbour in state.absent.get(epoch, ())
    known = state.failed_links.get((peer, command.neighbour))
    if not is_over and (known is None or known.epoch < epoch):
        told = command.neighbour, command.address, command.reason
        transaction.add(LinkFailed(transaction.now, peer, epoch, *told))
