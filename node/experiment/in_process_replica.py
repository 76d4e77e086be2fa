"""One replica, all members of which live in this process, and the plan that such replicas train under.

A member is the production Trainer. What goes from one to the next is packed and unpacked as on the wire, only
the wire is left out; so a replica computes the same bits as one whose members are far apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypedDict

import torch

from node.checkpoint.files import Parameters
from node.checkpoint.node_checkpoint import Restored
from node.checkpoint.private_state import StageState
from node.data.stream import SampleStream
from node.ipc.worker_calls import InnerResult, Message
from node.optimizer.outer_stage import CommittedState, WeightedPayload
from node.optimizer.outer_state import embedding_of
from node.worker.compute import Compute
from node.worker.factories import TrainerFactories
from node.worker.trainer import Trainer, TrainerState, private_states
from protocol.spec.run import RunSpec
from protocol.types import Dialer, Link, Member, PeerId, Plan, Replica, StageRange


def plan_of(spec: RunSpec) -> Plan:
    """The replicas that `spec.swarm` asks for: full ones first, then pipelines, all of equal weight."""
    swarm = spec.swarm
    chains = [1] * swarm.replicas + [swarm.chain_length] * swarm.pipelines
    replicas = tuple(_replica(spec, index, members) for index, members in enumerate(chains))
    return Plan(epoch=1, from_round=1, first_sample=0, replicas=replicas, reason="all in one process")


class LocalReplicaState(TypedDict):
    """State dict of :class:`LocalReplica`."""

    bytes_sent: int
    members: list[TrainerState]


class LocalReplica:
    """The members of `replica`, in the order of their stages.

    Args:
        spec: the run.
        replica: its members and links; endpoints and who dials do not matter here.
        compute: how every member computes.
        stream: the samples, opened for `spec`; replicas may share one.
        factories: of every member, where they are not those of a real swarm.

    Attributes:
        members: their trainers. Between two steps they may be read, and given what a round decides.
        bytes_sent: payload bytes of all frames over all links in training so far, both directions; without
            headers, which are below 1 % of frames of 64 KiB.
    """

    def __init__(
        self,
        spec: RunSpec,
        replica: Replica,
        compute: Compute,
        stream: SampleStream,
        factories: TrainerFactories = TrainerFactories(),  # noqa: B008  frozen
    ) -> None:
        self.bytes_sent = 0
        self._spec, self._replica = spec, replica
        self.members = tuple(
            Trainer(spec, member.stages, compute, stream if 0 in member.stages else None, factories)
            for member in replica.members
        )
        self.connect([link.k for link in replica.links])

    def connect(self, widths: Sequence[int]) -> None:
        """Between rounds: make the links anew, with these k."""
        ends = [None, *widths, None]
        for member, (upstream, downstream) in zip(self.members, pairwise(ends), strict=True):
            member.connect(upstream, downstream)

    def host_of(self, stage: int) -> Trainer:
        return self.members[self._replica.members.index(self._replica.host_of(stage))]

    def begin_round(self, round_number: int, samples: range) -> None:
        for member in self.members:
            member.begin_round(round_number, samples)

    def train(self, steps: range) -> None:
        """These inner steps (0-based in their round), each with all its microbatches."""
        for step in steps:
            self.accumulate(step)
            self.apply(step)

    def accumulate(self, step: int) -> None:
        """Forward and backward passes of all microbatches of an inner step."""
        for microbatch in range(self._spec.microbatches_of(self._replica)):
            self._forward(step, microbatch)
            self._backward(microbatch)

    def apply(self, step: int) -> None:
        """End the inner step that was accumulated: one AdamW step on every member."""
        norm = self._gradient_norm()
        for member in self.members:
            member.apply(step, norm)

    def end_inner_phase(self) -> InnerResult:
        """What the inner phase did so far, as the last member knows it."""
        return [member.end_inner_phase() for member in self.members][-1]

    def keep_training(self) -> None:
        """Inner steps follow before what was proposed is decided."""
        for member in self.members:
            member.keep_training()

    def propose(self) -> dict[int, bytes]:
        """The payloads of those stages that have something to give to the round."""
        offered = {stage: member.propose(stage) for member in self.members for stage in member.stages}
        return {stage: payload for stage, payload in offered.items() if payload is not None}

    def settle(
        self, round_number: int, outcomes: Sequence[tuple[Sequence[WeightedPayload], bool]]
    ) -> list[str]:
        """Bring all stages to the outcome of `round_`: what counts, in order, and whether ours is among it.

        A stage for which nothing counts stays as it was. Returns the digests of those that moved.
        """
        digests = []
        for stage, (payloads, mine_included) in enumerate(outcomes):
            if payloads:
                digests.append(self.host_of(stage).commit(stage, round_number, payloads, mine_included))
            else:
                self.host_of(stage).abort(stage, round_number)
        tables = {member.commit_embedding(round_number, outcomes[0][0]) for member in self.members[1:]}
        assert tables <= {self.members[0].embedding_digest()}, f"embeddings differ after round {round_number}"
        return digests

    def validate(self) -> float:
        """Mean validation loss (nats per token) of the present parameters, in this replica's forward mode."""
        for microbatch in range(self._spec.data.validation_batches):
            message: Message | None = None
            for member in self.members:
                message = member.evaluate(microbatch, message)
        return self.members[-1].end_validation()

    def state_dict(self) -> LocalReplicaState:
        """Between rounds: that of every member. Tensors are the live ones, not copied."""
        return {
            "bytes_sent": self.bytes_sent,
            "members": [member.state_dict() for member in self.members],
        }

    def private_states(self) -> dict[int, StageState]:
        """Between rounds: what it has for itself beside what is committed, of all stages."""
        own = (private_states(member.state_dict()) for member in self.members)
        return {stage: state for states in own for stage, state in states.items()}

    def load_checkpoint(
        self, round_number: int, anchors: Mapping[int, Parameters], private: Mapping[int, StageState]
    ) -> None:
        """Take over what was committed after `round_number`, and this replica's own state, copied."""
        for member in self.members:
            stages = member.stages
            embedding = None if 0 in stages else embedding_of(anchors[0])
            committed = {stage: anchors[stage] for stage in stages}
            own = {stage: private[stage] for stage in stages}
            member.load_checkpoint(Restored(round_number, committed, embedding, own))

    def share_committed(self, shared: dict[int, CommittedState]) -> None:
        """Hold one copy of what is committed, together with replicas that have settled the same rounds.

        They are equal in every bit, and commits replace them instead of changing them in place.

        Args:
            shared: by stage, what others hold already; what is only here is added. Stage 0 is in one of both.
        """
        for member in self.members:
            for stage, outer in member.outer.items():
                committed = shared.setdefault(
                    stage, {"anchor": outer.anchor, "optimizer": outer.optimizer_state}
                )
                outer.anchor, outer.optimizer_state = committed["anchor"], committed["optimizer"]
            if member.outer.follower is not None:
                first = shared[0]
                member.outer.follower.committed = embedding_of(first["anchor"] | first["optimizer"])

    def _forward(self, step: int, microbatch: int) -> None:
        message: Message | None = None
        for member in self.members:
            message = self._sent(member.forward(step, microbatch, message))

    def _backward(self, microbatch: int) -> None:
        message: Message | None = None
        for member in reversed(self.members):
            message = self._sent(member.backward(microbatch, message))

    def _gradient_norm(self) -> float:
        """Of all stages; squares are summed from the last member up, as along a chain of links."""
        squares = 0.0
        for member in reversed(self.members):
            squares += member.squared_gradient_norm()
        return math.sqrt(squares) if squares >= 0 else math.nan

    def _sent(self, message: Message | None) -> Message | None:
        self.bytes_sent += len(message.payload) if message is not None else 0
        return message


@torch.no_grad()
def average_gradients(replicas: Sequence[LocalReplica]) -> None:
    """Give every parameter the mean of its gradients on all `replicas`, summed in their order."""
    for stage in (stage for member in replicas[0].members for stage in member.stages):
        held = [replica.host_of(stage).parameters(stage) for replica in replicas]
        for name in held[0]:
            found = [parameters[name].grad for parameters in held]
            gradients = [gradient for gradient in found if gradient is not None]
            assert len(gradients) == len(found), "every replica has accumulated a step"
            mean = torch.stack(gradients).mean(dim=0)
            for gradient in gradients:
                gradient.copy_(mean)


def _replica(spec: RunSpec, index: int, members: int) -> Replica:
    """One with so many members, whose stages are as even in number as can be, the first ones taking more."""
    size, extra = divmod(spec.swarm.stages, members)
    bounds = [position * size + min(position, extra) for position in range(members + 1)]
    return Replica(
        index,
        tuple(
            Member(PeerId(f"replica-{index:05d}-{position}"), StageRange(first, stop), endpoint="")
            for position, (first, stop) in enumerate(pairwise(bounds))
        ),
        tuple(Link(spec.link.k, Dialer.UPSTREAM) for _ in range(members - 1)),
    )
