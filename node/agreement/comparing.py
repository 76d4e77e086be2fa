"""Which payloads of a round this member measures."""

from __future__ import annotations

from collections.abc import Sequence

from node.ipc.worker_calls import Comparison
from node.net.membership import Membership
from protocol.group.measured import measured_owners, measured_position
from protocol.types import Committed, PayloadDescriptor, PeerId


def comparison_of(
    membership: Membership, peer: PeerId, decision: Committed, uncounted: Sequence[PayloadDescriptor]
) -> Comparison | None:
    """What `peer` measures of a decision; None if no payload of its own counts.

    `uncounted` are payloads that follow those of the decision.
    """
    owners = [entry.descriptor.owner for entry in decision.entries]
    if (position := measured_position(owners, peer)) is None:
        return None
    plan = membership.run_view.plan_for(decision.round_number)
    replicas = [plan.replica_of(owner) if plan else None for owner in owners]
    is_full = [None if replica is None else replica.is_full for replica in replicas]
    alike, unlike = (next_of_kind(is_full, position, is_alike) for is_alike in (True, False))
    every = [*owners, *(each.owner for each in uncounted)]
    measured = measured_owners(every, peer, decision.stage, decision.round_number)
    others = (at for at in map(every.index, measured) if at != position)
    return Comparison((position, *others), alike, unlike)


def next_of_kind(is_full: Sequence[bool | None], position: int, alike: bool) -> int | None:
    """The position of the next payload of the same kind of replica, or of the other kind; None without one.

    Args:
        is_full: of the payloads of a manifest: whether its replica is full; None if that is not known.
    """
    kind = is_full[position]
    later = [*range(position + 1, len(is_full)), *range(position)]
    known = [each for each in later if kind is not None and is_full[each] is not None]
    return next((each for each in known if (is_full[each] == kind) == alike), None)
