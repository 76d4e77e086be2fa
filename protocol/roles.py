"""What each role of a peer offers to a run: one policy per role, and the table of them.

The coordinator and the nodes ask the policy of a role and never compare roles, so a new role is a member of
:class:`protocol.types.Role`, one policy here and one line in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from protocol.spec.run import RunSpec
from protocol.types import Role

DEFAULT_ROLE = Role.STAGE


@dataclass(frozen=True)
class RolePolicy:
    """What peers of one role can do, and how many of them a run needs before it starts.

    Attributes:
        noun: one peer of this role, in messages.
        summary: what such a peer hosts, for the help of the command line.
        peers_needed: how many peers of this role a run needs to start.
        hosts_all_stages: the peer is a replica by itself. Otherwise it is a member of a pipeline, which has
            neighbours, may move to other stages, and may replace a lost member as a spare.
        needs_listen_address: neighbours may have to connect to the peer.
    """

    noun: str
    summary: str
    peers_needed: Callable[[RunSpec], int]
    hosts_all_stages: bool
    needs_listen_address: bool

    @property
    def joins_pipelines(self) -> bool:
        """Whether the peer shares the stages of a replica with neighbours."""
        return not self.hosts_all_stages

    def is_alone(self, spec: RunSpec) -> bool:
        """Whether the peer has no neighbours in this run: also where the model is one stage."""
        return self.hosts_all_stages or spec.swarm.stages == 1


STAGE_POLICY = RolePolicy(
    noun="stage peer",
    summary="one member of a pipeline replica",
    peers_needed=lambda spec: spec.swarm.pipelines * spec.swarm.chain_length,
    hosts_all_stages=False,
    needs_listen_address=True,
)
REPLICA_POLICY = RolePolicy(
    noun="full replica",
    summary="all stages on this machine",
    peers_needed=lambda spec: spec.swarm.replicas,
    hosts_all_stages=True,
    needs_listen_address=False,
)

POLICIES: Mapping[Role, RolePolicy] = {
    Role.STAGE: STAGE_POLICY,
    Role.REPLICA: REPLICA_POLICY,
}
"""Messages name the roles in this order."""
assert POLICIES.keys() == set(Role), "each role has a policy"


def policy_of(role: Role) -> RolePolicy:
    return POLICIES[role]
