"""What each role of a peer offers to a run: one policy per role, and the table of them.

The coordinator and the nodes ask the policy of a role and never compare roles, so a new role is a member of
:class:`protocol.types.Role`, one policy here and one line in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from protocol.spec.run import RunSpec
from protocol.types import Role


class RoleWish(StrEnum):
    """What the owner of a node wants it to be. AUTO leaves the role to the coordinator, the others bind."""

    AUTO = "auto"
    STAGE = "stage"
    REPLICA = "replica"

    @property
    def role(self) -> Role | None:
        """The role that is wanted; None if the coordinator chooses."""
        return None if self is RoleWish.AUTO else Role(self.value)


@dataclass(frozen=True)
class RolePolicy:
    """What peers of one role can do, and how many of them a run needs before it starts.

    Attributes:
        noun: one peer of this role, in messages.
        summary: what such a peer hosts, for the help of the command line.
        joins_pipelines: the peer is a member of a pipeline: it has neighbours, may move to other stages and
            may replace a lost member. Otherwise it is a replica by itself.
        trains: it has a part in plans. Otherwise it serves the others, and needs an invite for its role.
    """

    noun: str
    summary: str
    peers_needed: Callable[[RunSpec], int]
    joins_pipelines: bool
    trains: bool = True

    def is_alone(self, spec: RunSpec) -> bool:
        """Whether the peer has no neighbours in this run: also where the model is one stage."""
        return not self.joins_pipelines or spec.swarm.stages == 1


POLICIES: Mapping[Role, RolePolicy] = {
    Role.STAGE: RolePolicy(
        noun="stage peer",
        summary="one member of a pipeline replica",
        peers_needed=lambda spec: spec.swarm.pipelines * spec.swarm.chain_length,
        joins_pipelines=True,
    ),
    Role.REPLICA: RolePolicy(
        noun="full replica",
        summary="all stages on this machine",
        peers_needed=lambda spec: spec.swarm.replicas,
        joins_pipelines=False,
    ),
    Role.RELAY: RolePolicy(
        noun="relay",
        summary="no stage: it carries connections to peers that no other peer can dial",
        peers_needed=lambda spec: 0,
        joins_pipelines=False,
        trains=False,
    ),
}
"""Messages name the roles in this order."""
assert POLICIES.keys() == set(Role), "each role has a policy"
