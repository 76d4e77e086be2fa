"""The outer state of a member: the stages that it hosts, and its copy of the embedding."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from node.core.model.shapes import EMBEDDING
from node.core.optimizer.embedding_follower import EmbeddingFollower
from node.core.optimizer.outcome import Outcome
from node.core.optimizer.outer_stage import CommitProbe, OuterStage
from node.core.optimizer.overlap import Overlap
from node.ranks.group import RankGroup
from node.ranks.ownership import Ownership, owners
from node.ranks.parameters import OwnedParameters
from node.ranks.remote_tensors import SharedTensor, with_all
from protocol.math.outer_step import anchor_digest
from protocol.spec.run import RunSpec

log = logging.getLogger(__name__)


class OuterState(Mapping[int, OuterStage]):
    """Anchors, error feedback and pending proposals: a mapping from each hosted stage to its OuterStage.

    A member that does not host stage 0 also keeps the committed embedding if the receiving end of its link
    derives T_perp from it, and not from snapshots. All outer state is on the CPU, so that all machines
    compute the same bits.

    Args:
        parameters: the live parameters by stage, on any device, with their values before round 1. Commits
            change them in place.
        embedding: TE [V, d] before round 1 if it is to be kept without stage 0, else None.

    Where a peer has several ranks (`group`), each rank keeps the outer state of some tensors. Then all ranks
    call the methods together, in the same order, and only rank 0 gets digests; stage 0 is hosted.

    Attributes:
        rounds: the last round, committed or aborted, that each hosted stage has finished.
        follower: keeps the embedding if it was given, else None.
    """

    def __init__(
        self,
        spec: RunSpec,
        parameters: Mapping[int, Mapping[str, Tensor]],
        embedding: Tensor | None,
        group: RankGroup = RankGroup(),  # noqa: B008  frozen
    ) -> None:
        self.group = group
        shapes = {
            (stage, name): tuple(each.shape)
            for stage, local in parameters.items()
            for name, each in local.items()
        }
        owned = owners(shapes, group.size)
        self._local: dict[int, OwnedParameters] = {}
        self._stages: dict[int, OuterStage] = {}
        for stage, local in parameters.items():
            ownership = Ownership(group, {name: owned[stage, name] for name in local})
            self._local[stage] = OwnedParameters(local, ownership)
            self._stages[stage] = OuterStage(spec, stage, self._local[stage].read(), ownership)
        self.rounds = dict.fromkeys(parameters, 0)
        self.follower = None if embedding is None else EmbeddingFollower(spec, embedding)
        self._followed_round = 0
        self._overlaps: dict[int, Overlap] = {}
        self._training_continues = False

    def __getitem__(self, stage: int) -> OuterStage:
        return self._stages[stage]

    def __iter__(self) -> Iterator[int]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def has_embedding(self) -> bool:
        """Whether the committed embedding is here: not without stage 0 where links use snapshots of it."""
        return self.follower is not None or 0 in self._stages

    @property
    def embedding(self) -> Tensor:
        """TE of the last committed round, [V, d] float32 on the CPU."""
        return self._stages[0].anchor[EMBEDDING] if self.follower is None else self.follower.table_vd

    @property
    def embedding_round(self) -> int:
        """The last round that :attr:`embedding` has finished."""
        return self.rounds[0] if self.follower is None else self._followed_round

    def embedding_digest(self) -> str:
        """Digest of the committed embedding and its optimizer state. Equal on all members of all replicas."""
        if self.follower is not None:
            return anchor_digest(self.follower.committed)
        return with_all(self.group, embedding_of(self.shared_committed(0)), anchor_digest) or ""

    def begin_round(self) -> None:
        """Start a round in which no training has continued beyond a proposal yet."""
        self._training_continues = False

    def propose(self, stage: int, share: float = 1.0) -> bytes | None:
        """This replica's payload for `stage` after a `share` of the phase, pending until commit or abort.

        None if training has produced a value that is not finite. The stage then restarts from the anchor and
        contributes nothing to this round.
        """
        outer = self._stages[stage]
        if outer.pending is not None:  # the caller failed before it sent that payload
            with self._at_proposal(stage):
                outer.abort()
        payload = outer.propose(self._local[stage].read(), share)
        if payload is None:
            self.forget_error(stage)
        elif self._training_continues:
            # Inner steps of the next round already run, so local changes before this round is decided.
            self._begin_overlap(stage)
        return payload

    def keep_training(self) -> None:
        """Announce inner steps before the proposals of this round are decided: commits keep their progress.

        This holds for proposals that are pending now and for proposals made later in this round. The
        parameters become the estimate from which these steps start.
        """
        self._training_continues = True
        for stage, outer in self._stages.items():
            if outer.pending is not None and stage not in self._overlaps:
                self._begin_overlap(stage)

    def _begin_overlap(self, stage: int) -> None:
        local = self._local[stage].read()
        self._overlaps[stage] = Overlap.begin(local, self._stages[stage].estimate())
        self._local[stage].write(local)

    @contextmanager
    def _at_proposal(self, stage: int) -> Iterator[Mapping[str, Tensor]]:
        """The parameters of the proposal, for the outer step to change; the training since is added after.

        After an error the overlap goes on.
        """
        local, overlap = self._local[stage].read(), self._overlaps.get(stage)
        if overlap is None:
            yield local
        else:
            estimate = self._stages[stage].estimate()
            yield overlap.covered
            overlap.end(local, estimate)
            del self._overlaps[stage]
        self._local[stage].write(local)

    def commit(
        self,
        stage: int,
        round_number: int,
        outcome: Outcome,
        mine_included: bool,
        probe: CommitProbe | None = None,
    ) -> str:
        """Apply what is committed in `round_number`. Returns the new digest of the stage.

        Raises HetnodeError PAYLOAD_CORRUPT; then nothing has changed.
        """
        self._require_next(stage, round_number)
        with self._at_proposal(stage) as local:
            self._stages[stage].commit(outcome, mine_included, local, probe)
        self.rounds[stage] = round_number
        return self._stages[stage].digest()

    def commit_embedding(self, round_number: int, outcome: Outcome) -> str:
        """Apply the outcome of stage 0 to the embedding kept here; no payloads for an aborted round.

        Returns the digest of the embedding. Raises as :meth:`commit`.
        """
        assert self.follower is not None, "the host of stage 0 must commit the whole stage"
        followed = self._followed_round
        assert round_number == followed + 1, f"the embedding is after round {followed}"
        if outcome:
            self.follower.commit(outcome)
        self._followed_round = round_number
        return self.embedding_digest()

    def abort(self, stage: int, round_number: int) -> None:
        """The round is aborted. Anchor, error feedback and the progress since the anchor stay unchanged."""
        self._require_next(stage, round_number)
        with self._at_proposal(stage):
            self._stages[stage].abort()
        self.rounds[stage] = round_number

    def drop_proposals(self) -> None:
        """The rounds of pending proposals will be decided without this state: as in :meth:`abort`.

        The parameters become those of the proposals plus the training since, so that they hold the progress
        which no payload carries.
        """
        for stage, outer in self._stages.items():
            if outer.pending is not None:
                with self._at_proposal(stage):
                    outer.abort()

    def forget_error(self, stage: int) -> None:
        """Error feedback := 0 and local := anchor. See OuterStage.reset."""
        local = self._local[stage].read()
        self._overlaps.pop(stage, None)
        self._stages[stage].reset(local)
        self._local[stage].write(local)

    def reset_nonfinite_stages(self) -> list[int]:
        """Restart each stage that has non-finite parameters from its anchor. Returns these stages."""
        reset = []
        for stage, local in self._local.items():
            if not local.all_finite():
                log.warning("stage %d has non-finite parameters; it restarts from the anchor", stage)
                self.forget_error(stage)
                reset.append(stage)
        return reset

    def load_stage(self, stage: int, round_number: int, committed: Mapping[str, Tensor]) -> None:
        """Copy the committed state after `round_number`; error feedback := 0 and local := anchor."""
        local = self._local[stage].read()
        self._overlaps.pop(stage, None)
        self._stages[stage].load(committed, local)
        self._local[stage].write(local)
        self.rounds[stage] = round_number

    def load_local(self, stage: int, values: Mapping[str, Tensor]) -> None:
        """Copy values of live parameters. Those that are not in it, or that others own, keep theirs."""
        local = self._local[stage].read()
        for name in local.keys() & values.keys():
            local[name].detach().copy_(values[name].detach())
        self._local[stage].write(local)

    def shared_committed(self, stage: int) -> dict[str, SharedTensor]:
        """The committed state of all ranks, for rank 0 to read."""
        outer = self._stages[stage]
        return outer.ownership.shared(outer.committed_shapes, outer.committed)

    def shared_moved(self, stage: int) -> dict[str, SharedTensor]:
        """The live parameters that differ from the anchor, for rank 0 to read."""
        local, outer = self._local[stage].read(), self._stages[stage]
        # Right after a commit local equals the anchor, which a checkpoint already has.
        mine = [
            name for name, each in local.items() if not torch.equal(each.detach().cpu(), outer.anchor[name])
        ]
        told = b" ".join(self.group.exchange(" ".join(mine).encode())).decode().split()
        shapes = {name: shape for name, shape in outer.layout.shapes.items() if name in told}
        return outer.ownership.shared(shapes, local)

    def load_embedding(self, round_number: int, committed: Mapping[str, Tensor]) -> None:
        """Copy the embedding after `round_number`, with its optimizer state."""
        assert self.follower is not None, "the host of stage 0 must load the whole stage"
        self.follower.load(committed)
        self._followed_round = round_number

    def own_tensors(self) -> dict[int, list[Mapping[str, Tensor]]]:
        """What no other replica has, live, by stage."""
        found: dict[int, list[Mapping[str, Tensor]]] = {s: [each.error] for s, each in self._stages.items()}
        for stage, outer in self._stages.items():
            found[stage] += [] if outer.pending is None else [outer.pending["error"]]
            found[stage] += [self._overlaps[stage].covered] if stage in self._overlaps else []
        return found

    def _require_next(self, stage: int, round_number: int) -> None:
        # A skipped or repeated round would make this anchor differ from that of all other replicas.
        assert round_number == self.rounds[stage] + 1, f"stage {stage} is after round {self.rounds[stage]}"


Held = TypeVar("Held")


def embedding_of(committed: Mapping[str, Held]) -> dict[str, Held]:
    """The token embedding and its optimizer state, from the committed state of stage 0."""
    return {name: tensor for name, tensor in committed.items() if name.partition("/")[0] == EMBEDDING}
