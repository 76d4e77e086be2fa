"""A replica with all its members in this process, and the plan for such replicas.

Every member is a production Trainer. Messages between members are packed and unpacked as for the network, so
the replica computes the same bits as one whose members are on different machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from node.checkpoint.files import Parameters
from node.checkpoint.node_checkpoint import Restored
from node.checkpoint.private_state import StageState
from node.core.optimizer.outcome import Outcome
from node.core.optimizer.outer_state import embedding_of
from node.core.worker.compute import Compute
from node.core.worker.factories import TrainerFactories
from node.core.worker.trainer import Trainer
from node.data.stream import SampleStream
from node.ipc.worker_calls import InnerResult, Message
from protocol.group.batch import with_equal_shares
from protocol.spec.run import RunSpec
from protocol.types import Dialer, Link, Member, PeerId, Plan, Replica, StageRange


def plan_of(spec: RunSpec) -> Plan:
    """The replicas that `spec.swarm` asks for: full replicas first, then pipelines, with equal shares."""
    swarm = spec.swarm
    chains = [1] * swarm.replicas + [swarm.chain_length] * swarm.pipelines
    replicas = with_equal_shares(spec, [_replica(spec, index, n) for index, n in enumerate(chains)])
    return Plan(epoch=1, from_round=1, first_sample=0, replicas=tuple(replicas), reason="all in one process")


class LocalReplica:
    """The members of `replica`, in the order of their stages.

    Args:
        spec: the run.
        replica: its members and links. Endpoints and dialers are not used here.
        compute: how every member computes.
        stream: the samples, opened for `spec`. Replicas may share one stream.
        factories: for the trainers of all members; an experiment may replace some.

    Attributes:
        members: the trainers. Callers may use them between two steps.
        bytes_sent: payload bytes of all frames over all links in training so far, in both directions, without
            headers (less than 1 % of a frame of 64 KiB).
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
        """Create new links with these k. Call it between rounds."""
        ends = [None, *widths, None]
        for member, (upstream, downstream) in zip(self.members, pairwise(ends), strict=True):
            member.connect(upstream, downstream, self._replica.index)

    def host_of(self, stage: int) -> Trainer:
        return self.members[self._replica.members.index(self._replica.host_of(stage))]

    def begin_round(self, round_number: int, samples: range) -> None:
        for member in self.members:
            member.begin_round(round_number, samples)

    def train(self, steps: range) -> None:
        """Take these inner steps (0-based in their round), each with all its microbatches."""
        for step in steps:
            self.accumulate(step)
            self.apply(step)

    def accumulate(self, step: int) -> None:
        """Forward and backward passes of all microbatches of an inner step."""
        for microbatch in range(self.members[0].samples.microbatches):
            self._forward(step, microbatch)
            self._backward(microbatch)

    def apply(self, step: int) -> None:
        """End the accumulated inner step: one AdamW step on every member."""
        norm = self._gradient_norm()
        for member in self.members:
            member.apply(step, norm)

    def end_inner_phase(self) -> InnerResult:
        """The result of the inner phase, from the last member: only it knows the loss."""
        return [member.end_inner_phase() for member in self.members][-1]

    def keep_training(self) -> None:
        """Announce inner steps before the proposals are decided. See OuterState.keep_training."""
        for member in self.members:
            member.outer.keep_training()

    def propose(self, stages: Iterable[int], share: float = 1.0) -> dict[int, bytes]:
        """The payloads by stage after a `share` of the phase, without stages with values not finite."""
        offered = {stage: self.host_of(stage).outer.propose(stage, share) for stage in stages}
        return {stage: payload for stage, payload in offered.items() if payload is not None}

    def settle(self, round_number: int, outcomes: Sequence[tuple[Outcome, bool]]) -> list[str]:
        """Apply the outcome of `round_number` to all stages.

        `outcomes` has for each stage the accepted payloads in order, or one result, and
        whether our payload counts in it. A stage without payloads is aborted. Returns the digests of the
        committed stages.
        """
        digests = []
        for stage, (outcome, mine_included) in enumerate(outcomes):
            if outcome:
                digests.append(self.host_of(stage).commit(stage, round_number, outcome, mine_included))
            else:
                self.host_of(stage).outer.abort(stage, round_number)
        # Every member that keeps a copy of the embedding without stage 0 must get the same update.
        first, *others = self.members
        following = (member for member in others if member.outer.follower is not None)
        tables = {member.commit_embedding(round_number, outcomes[0][0]) for member in following}
        assert tables <= {first.outer.embedding_digest()}, f"embeddings differ after round {round_number}"
        return digests

    def validate(self) -> float:
        """Mean validation loss (nats per token) of the local parameters, with this replica's compression."""
        for microbatch in range(self._spec.data.validation_batches):
            message: Message | None = None
            for member in self.members:
                message = member.evaluate(microbatch, message)
        return self.members[-1].end_validation()

    def private_states(self) -> dict[int, StageState]:
        """The private state of all stages, between rounds: everything that is not committed.

        Tensors on the CPU are not copied.
        """
        found: dict[int, StageState] = {}
        for member in self.members:
            moments = member.inner.state_dict()
            own = {
                stage: StageState.of(member.parameters(stage), outer.anchor, outer.error, moments[stage])
                for stage, outer in member.outer.items()
            }
            found |= member.with_table(own, moments)
        return found

    def load_checkpoint(
        self, round_number: int, anchors: Mapping[int, Parameters], private: Mapping[int, StageState]
    ) -> None:
        """Copy the committed state after `round_number`, and this replica's private state."""
        for member in self.members:
            stages = member.stages
            embedding = None if 0 in stages else embedding_of(anchors[0])
            committed = {stage: anchors[stage] for stage in stages}
            own = {stage: private[stage] for stage in stages}
            member.load_checkpoint(Restored(round_number, committed, embedding, own))

    def load_anchor(self, round_number: int) -> None:
        """Begin anew from the committed state after `round_number`: no error feedback, no moments."""
        first = self.members[0].outer[0].committed
        for member in self.members:
            embedding = None if 0 in member.stages else embedding_of(first)
            committed = {stage: member.outer[stage].committed for stage in member.stages}
            member.load_checkpoint(Restored(round_number, committed, embedding, None))

    def share_committed(self, shared: dict[int, dict[str, Tensor]]) -> None:
        """Share one copy of the committed state with replicas that have finished the same rounds.

        This is safe: the tensors are equal in every bit, and commits replace them, not change them.

        Args:
            shared: the state of other replicas by stage. Stages that are missing in it are added from here.
        """
        for member in self.members:
            for stage, outer in member.outer.items():
                outer.take(shared.setdefault(stage, outer.committed))
            if member.outer.follower is not None:
                member.outer.follower.committed = embedding_of(shared[0])

    def _forward(self, step: int, microbatch: int) -> None:
        message: Message | None = None
        for member in self.members:
            message = self._sent(member.forward(step, microbatch, message))

    def _backward(self, microbatch: int) -> None:
        message: Message | None = None
        for member in reversed(self.members):
            message = self._sent(member.backward(microbatch, message))

    def _gradient_norm(self) -> float:
        """Gradient norm over all stages. NaN if the sum of squares is NaN."""
        # From the last member to the first, as a real pipeline sums: another order may change the last bit.
        squares = 0.0
        for member in reversed(self.members):
            squares += member.inner.squared_gradient_norm()
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
            assert len(gradients) == len(found), "a replica has not accumulated this step"
            mean = torch.stack(gradients).mean(dim=0)
            for gradient in gradients:
                gradient.copy_(mean)


def _replica(spec: RunSpec, index: int, members: int) -> Replica:
    """A replica of `members` members. Stages are split evenly; the first members get the extra ones."""
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
