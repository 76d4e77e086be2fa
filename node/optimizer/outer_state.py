"""The outer state of a member: every stage that it hosts, and the embedding that it follows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

from torch import Tensor

from node.model.init import EMBEDDING
from node.optimizer.outer_stage import (
    CommittedState,
    EmbeddingFollower,
    OuterStage,
    OuterStageState,
    WeightedPayload,
)
from protocol.algorithm.outer_optimizer import parameters_of
from protocol.algorithm.outer_step import anchor_digest
from protocol.spec.run import RunSpec

log = logging.getLogger(__name__)


class OuterStateDict(TypedDict):
    """State dict of :class:`OuterState`. `rounds` and `stages` are by stage; see OuterStageState.

    `embedding` and its round are those of a follower, else None.
    """

    rounds: dict[int, int]
    stages: dict[int, OuterStageState]
    embedding: CommittedState | None
    embedding_round: int | None


class OuterState(Mapping[int, OuterStage]):
    """Anchors, error feedback and pending proposals by hosted stage: a mapping of each to its OuterStage.

    A member that does not host stage 0 keeps the committed embedding too, because the receiving end of its
    link derives T_perp from it. All outer state is on the CPU, so that all machines get the same bits.

    Args:
        spec: the run.
        parameters: the live parameters by stage, on any device, with their values before round 1. Commits
            change them in place.
        embedding: TE before round 1 [V, d], where stage 0 is not hosted.

    Attributes:
        rounds: which round each hosted stage's anchor is after.
        follower: of the embedding, where stage 0 is not hosted.
    """

    def __init__(
        self, spec: RunSpec, parameters: Mapping[int, Mapping[str, Tensor]], embedding: Tensor | None
    ) -> None:
        self._local = parameters
        self._stages = {stage: OuterStage(spec, stage, local) for stage, local in parameters.items()}
        self.rounds = dict.fromkeys(parameters, 0)
        self.follower = None if embedding is None else EmbeddingFollower(spec, embedding)
        self._followed_round = 0
        self._training_continues = False

    def __getitem__(self, stage: int) -> OuterStage:
        return self._stages[stage]

    def __iter__(self) -> Iterator[int]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def embedding(self) -> Tensor:
        """TE of the last committed round, [V, d] float32 on the CPU."""
        return self._stages[0].anchor[EMBEDDING] if self.follower is None else self.follower.table_vd

    @property
    def embedding_round(self) -> int:
        """Which round :attr:`embedding` is after."""
        return self.rounds[0] if self.follower is None else self._followed_round

    def embedding_digest(self) -> str:
        """Digest of the committed embedding and its optimizer state: equal on all members of all replicas."""
        if self.follower is not None:
            return anchor_digest(self.follower.committed)
        return anchor_digest(embedding_of(self._stages[0].committed))

    def begin_round(self) -> None:
        """Training starts from what is committed: proposals cover all of it."""
        self._training_continues = False

    def propose(self, stage: int) -> bytes | None:
        """This replica's payload for `stage`, pending until commit or abort.

        None where training has produced a value that is not finite: this replica then starts again from the
        anchor and contributes nothing to this round.
        """
        outer, local = self._stages[stage], self._local[stage]
        payload = outer.propose(local)
        if payload is None:
            outer.reset(local)
        elif self._training_continues:
            outer.remember(local)
        return payload

    def keep_training(self) -> None:
        """Inner steps follow before proposals of this round are decided: commits keep what they learn.

        A proposal covers what was learned before it, whether it is pending now or made later.
        """
        self._training_continues = True
        for stage, outer in self._stages.items():
            outer.remember(self._local[stage])

    def commit(
        self, stage: int, round_number: int, payloads: Sequence[WeightedPayload], mine_included: bool
    ) -> str:
        """Apply the payloads committed in `round_number`, in order. Returns the new digest.

        Raises HetnodeError PAYLOAD_CORRUPT; nothing has changed.
        """
        self._require_next(stage, round_number)
        self._stages[stage].commit(payloads, mine_included, self._local[stage])
        self.rounds[stage] = round_number
        return self._stages[stage].digest()

    def commit_embedding(self, round_number: int, payloads: Sequence[WeightedPayload]) -> str:
        """Apply stage 0's committed update to the embedding followed here; none where the round was aborted.

        Returns the digest of the embedding. Raises as :meth:`commit`.
        """
        assert self.follower is not None, "the host of stage 0 commits the whole stage"
        assert round_number == self._followed_round + 1, (
            f"the embedding is after round {self._followed_round}"
        )
        if payloads:
            self.follower.commit(payloads)
        self._followed_round = round_number
        return self.embedding_digest()

    def abort(self, stage: int, round_number: int) -> None:
        """The round is aborted: what is committed, error feedback and local parameters stay."""
        self._require_next(stage, round_number)
        self._stages[stage].abort()
        self.rounds[stage] = round_number

    def forget_error(self, stage: int) -> None:
        """Error feedback := 0 and local := anchor: give up what was learned and not sent."""
        self._stages[stage].reset(self._local[stage])

    def reset_nonfinite_stages(self) -> None:
        """Restart each stage from its anchor whose parameters are no longer finite."""
        for stage, local in self._local.items():
            if not all(parameter.isfinite().all() for parameter in local.values()):
                log.warning("stage %d diverged to non-finite values: restarted from the anchor", stage)
                self.forget_error(stage)

    def load_stage(self, stage: int, round_number: int, committed: Mapping[str, Tensor]) -> None:
        """Take what is committed after `round_number`, copied; error feedback := 0 and local := anchor."""
        self._stages[stage].load(committed, self._local[stage])
        self.rounds[stage] = round_number

    def load_embedding(self, round_number: int, committed: Mapping[str, Tensor]) -> None:
        """Take the embedding after `round_number`, with its optimizer state, copied."""
        assert self.follower is not None, "the host of stage 0 loads the whole stage"
        self.follower.load(committed)
        self._followed_round = round_number

    def state_dict(self) -> OuterStateDict:
        """The live tensors, not copied."""
        embedding: CommittedState | None = None
        if self.follower is not None:
            table = parameters_of(self.follower.committed)
            state = {name: each for name, each in self.follower.committed.items() if name not in table}
            embedding = {"anchor": table, "optimizer": state}
        return {
            "rounds": dict(self.rounds),
            "stages": {stage: outer.state_dict() for stage, outer in self._stages.items()},
            "embedding": embedding,
            "embedding_round": None if self.follower is None else self._followed_round,
        }

    def load_state_dict(self, state: OuterStateDict) -> None:
        """Take over `state`, copied; what it does not hold stays. Local parameters are not touched."""
        for stage, held in state["stages"].items():
            self._stages[stage].load_state_dict(held)
            self.rounds[stage] = state["rounds"][stage]
        embedding, round_number = state["embedding"], state["embedding_round"]
        if self.follower is not None and embedding is not None and round_number is not None:
            self.load_embedding(round_number, embedding["anchor"] | embedding["optimizer"])

    def _require_next(self, stage: int, round_number: int) -> None:
        assert round_number == self.rounds[stage] + 1, f"stage {stage} is after round {self.rounds[stage]}"


def embedding_of(committed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The token embedding in what is committed of stage 0, with its optimizer state."""
    return {name: tensor for name, tensor in committed.items() if name.partition("/")[0] == EMBEDDING}
