"""Variations of the algorithm, which measure the effect of its parts and test alternatives.

A :class:`Variation` describes the differences; its defaults are the algorithm of a real swarm.
:class:`VariationRunner` applies it to the replicas of one process. No variation is available in a real run: a
better one should become part of the run specification.

Shapes: d width, k subspace width, b micro-batch, L tokens. U [d, k] is the basis of a link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor

from node.experiment.bottleneck import project_boundaries
from node.experiment.boundary_statistics import Covariances, observe_boundaries, observe_gradients
from node.experiment.in_process_replica import LocalReplica
from node.experiment.row_wise import RowWiseAdamW
from node.worker.factories import TrainerFactories, run_basis
from protocol.algorithm.batch import with_equal_shares
from protocol.algorithm.embedding_snapshot import active_snapshot
from protocol.algorithm.sampling import next_first_sample
from protocol.algorithm.subspace import ReceivingEnd
from protocol.spec.link import UNCOMPRESSED
from protocol.spec.run import RunSpec
from protocol.types import Plan, Replica
from protocol.wire.snapshot_codec import snapshot

_BASIS, _SEEN, _SNAPSHOT = "basis/", "seen/", "snapshot/"
_CONSTRAINED = (".wo", ".w_down")
"""The matrices that write into the residual stream, [d, in]."""


class Variation(BaseModel):
    """Differences from the algorithm. With all defaults there is no difference."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    average_gradients: bool = Field(
        False, description="replicas average their gradients before every AdamW step: data parallel training"
    )
    adaptation: bool = Field(True, description="T_perp follows the embedding; else it stays as at the start")
    embedding_every: int = Field(
        0,
        ge=0,
        description="rounds between two snapshots of the embedding, from which T_perp follows a round later; "
        "0: T_perp follows the embedding of the last round",
    )
    weight_projection: bool = Field(
        False,
        description="after every step of a pipeline, W_o and W_down are projected onto what links carry",
    )
    row_wise_moments: bool = Field(
        False, description="AdamW with one second moment for all d entries that one input of W_o, W_down adds"
    )
    grassmann_every: int = Field(
        0, ge=0, description="rounds between two Grassmann steps of U along the gradients that links lose"
    )
    grassmann_rate: float = Field(0.1, gt=0)
    basis_every: int = Field(
        0,
        ge=0,
        description="rounds between two changes of every link's U to the principal directions of activations "
        "and gradients that full replicas see there",
    )
    projected_share: float = Field(
        0.0, ge=0, le=1, description="of the microbatches of full replicas: these are projected as by links"
    )
    full_weight: float = Field(1.0, gt=0, description="weight of a full replica in a round; a pipeline has 1")
    k_by_round: tuple[tuple[int, int], ...] = Field(
        (), description="(round, k): the links' k from that round on; before the first, that of the spec"
    )
    uncompressed_pipelines: int = Field(
        0, ge=0, description="pipelines, the first ones, whose links send activations uncompressed"
    )
    replicas_by_round: tuple[tuple[int, int], ...] = Field(
        (), description="(round, n): only the first n replicas train from that round on; from round 1 on"
    )
    turns: int = Field(1, ge=1, description="a round exchanges every turns-th stage, the last round all")
    reducer_leaves_every: int = Field(
        0,
        ge=0,
        description="rounds after which a reducer leaves, in turn, and is replaced without its residual; for "
        "outer.exchange 'reduced'",
    )

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @field_validator("k_by_round", "replicas_by_round")
    @classmethod
    def _rounds_ascend(cls, steps: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        rounds = [first for first, _ in steps]
        if rounds != sorted(set(rounds)) or any(first < 1 or k < 1 for first, k in steps):
            raise ValueError("rounds count from 1 and ascend, and no value is below 1")
        return steps

    @model_validator(mode="after")
    def _full_replicas_weigh_more_in_rounds_alone(self) -> Variation:
        if self.average_gradients and (self.full_weight != 1 or self.turns != 1):
            raise ValueError("full_weight and turns have no effect where gradients are averaged")
        return self

    @model_validator(mode="after")
    def _replicas_are_known_from_the_start(self) -> Variation:
        if self.replicas_by_round and self.replicas_by_round[0][0] != 1:
            raise ValueError("replicas_by_round must say how many replicas train in round 1")
        if self.replicas_by_round and (self.average_gradients or self.full_weight != 1):
            raise ValueError("replicas_by_round does not go together with average_gradients or full_weight")
        return self

    @model_validator(mode="after")
    def _links_change_for_one_reason(self) -> Variation:
        reasons = (not self.adaptation, self.grassmann_every > 0, self.basis_every > 0, bool(self.k_by_round))
        if sum(reasons) > 1:
            raise ValueError(
                "of adaptation = false, grassmann_every, basis_every and k_by_round only one may be given"
            )
        if self.embedding_every and any(reasons):
            raise ValueError(
                "embedding_every does not go together with adaptation = false, grassmann_every, basis_every "
                "or k_by_round"
            )
        if self.weight_projection and any(reasons[1:]):
            raise ValueError(
                "weight_projection knows only the basis that links begin with: it does not go together with "
                "grassmann_every, basis_every or k_by_round"
            )
        if self.projected_share and any(reasons):
            raise ValueError(
                "projected_share knows only the basis that links begin with: it does not go together with "
                "adaptation = false, grassmann_every, basis_every or k_by_round"
            )
        if self.uncompressed_pipelines and (self.weight_projection or any(reasons[1:])):
            raise ValueError(
                "uncompressed_pipelines does not go together with weight_projection, grassmann_every, "
                "basis_every or k_by_round, which treat all links alike"
            )
        return self


UNVARIED = Variation()
"""The algorithm of a real swarm."""


def check(spec: RunSpec, variation: Variation) -> None:
    """Raise ValueError with the reason if `variation` cannot be applied to replicas of `spec`."""
    if spec.initial is not None:
        raise ValueError(
            "an experiment starts from the seed, and this specification from parameters that were imported"
        )
    if spec.link.embedding_every:
        raise ValueError(
            "an experiment takes embedding_every from its variation, and link.embedding_every is not 0"
        )
    if variation.basis_every and not spec.swarm.replicas:
        raise ValueError("basis_every follows what full replicas see, and there are none")
    if variation.projected_share and not (spec.swarm.replicas and spec.link.k):
        raise ValueError("projected_share needs full replicas, and links that compress")
    has_links = spec.swarm.pipelines > 0 and spec.swarm.chain_length > 1
    if variation.grassmann_every and not has_links:
        raise ValueError("grassmann_every follows what links lose, and there are none")
    if not spec.link.k and (variation.grassmann_every or variation.weight_projection):
        raise ValueError("grassmann_every and weight_projection need links that compress, and link.k is 0")
    if variation.uncompressed_pipelines > (spec.swarm.pipelines if has_links else 0):
        raise ValueError(
            f"{variation.uncompressed_pipelines} uncompressed_pipelines of {spec.swarm.pipelines} pipelines"
        )
    replicas = spec.swarm.replicas + spec.swarm.pipelines
    if any(count > replicas for _, count in variation.replicas_by_round):
        raise ValueError(f"replicas_by_round has more than the {replicas} replicas of the specification")
    if variation.replicas_by_round and spec.outer.overlap:
        raise ValueError("replicas_by_round needs rounds without overlap")
    if variation.reducer_leaves_every and spec.outer.exchange != "reduced":
        raise ValueError("reducer_leaves_every needs reducers, and outer.exchange is 'gathered'")
    for _, k in variation.k_by_round:
        if k > spec.model.width:
            raise ValueError(f"k_by_round has k {k}, which exceeds model.width {spec.model.width}")


def varied(plan: Plan, variation: Variation) -> Plan:
    """`plan` with the weights and the uncompressed links of `variation`."""
    pipelines = [replica.index for replica in plan.replicas if replica.links]
    uncompressed = pipelines[: variation.uncompressed_pipelines]

    def changed(replica: Replica) -> Replica:
        if not replica.links:
            return replace(replica, weight=replica.weight * variation.full_weight)
        if replica.index in uncompressed:
            return replace(replica, links=tuple(replace(link, k=UNCOMPRESSED) for link in replica.links))
        return replica

    return replace(plan, replicas=tuple(map(changed, plan.replicas)))


def plans_of(spec: RunSpec, plan: Plan, variation: Variation) -> list[Plan]:
    """`plan`, or with `replicas_by_round` the plans of these rounds, whose replicas divide the batch."""
    plans = list[Plan]()
    for first, count in variation.replicas_by_round:
        sample = next_first_sample(plans[-1], spec, first) if plans else plan.first_sample
        replicas = tuple(with_equal_shares(spec, plan.replicas[:count]))
        reason = f"{count} replicas train"
        plans.append(Plan(len(plans) + 1, first, sample, replicas, reason))
    return plans or [plan]


class VariationRunner:
    """Applies `variation` to the replicas of one swarm, which must be created with :attr:`factories`.

    Raises ValueError as :func:`check`.

    Attributes:
        factories: for all trainers of the swarm.
        seen: statistics from full replicas or links since the bases last changed.
    """

    def __init__(self, spec: RunSpec, variation: Variation) -> None:
        check(spec, variation)
        self._spec, self._variation = spec, variation
        self._bases: dict[int, Tensor] = {}
        self._snapshots: dict[int, Tensor] = {}
        self.seen = Covariances()
        usual = TrainerFactories()
        self.factories = TrainerFactories(
            receiving_end=_receiving_end(variation),
            basis=lambda _, boundary: self._basis(boundary),
            adamw=_row_wise if variation.row_wise_moments else usual.adamw,
        )

    def watch(self, replica: LocalReplica) -> None:
        """Change what is computed in `replica`, and collect the statistics that the variation needs.

        Call it before training.
        """
        if self._variation.basis_every and len(replica.members) == 1:
            observe_boundaries(replica.members[0], self.seen)
        if self._variation.projected_share and len(replica.members) == 1:
            project_boundaries(replica.members[0], self._variation.projected_share)
        if self._variation.grassmann_every:
            for member in replica.members[1:]:
                observe_gradients(member, self.seen)

    def after_step(self, replica: LocalReplica) -> None:
        """Call it after each AdamW step of `replica`."""
        if self._variation.weight_projection:
            _project_weights(replica, self._basis(0)[:, : self._spec.link.k])

    def after_round(self, round_number: int, replicas: Sequence[LocalReplica]) -> None:
        """Change the links if due. Call it after `round_number` is committed on all `replicas`."""
        self._take_snapshot(round_number, replicas)
        every = self._variation.grassmann_every or self._variation.basis_every
        if every and round_number % every == 0:
            self._turn_bases()
            self.connect(round_number, replicas)
        elif any(first == round_number + 1 for first, _ in self._variation.k_by_round):
            self.connect(round_number, replicas)

    def connect(self, round_number: int, replicas: Sequence[LocalReplica]) -> None:
        """Give the links the bases, the k and the snapshot that are valid after `round_number`."""
        self._use_snapshot(round_number, replicas)
        if not (self._bases or self._variation.k_by_round):
            return
        k = self._k_after(round_number)
        for replica in replicas:
            replica.connect([k] * (len(replica.members) - 1))

    def state_dict(self) -> dict[str, Tensor]:
        """The current bases (float32), the statistics since they last changed (float64), and the snapshots of
        the embedding that are active or will be (float32)."""
        bases = {f"{_BASIS}{boundary}": basis for boundary, basis in self._bases.items()}
        bases |= {f"{_SNAPSHOT}{taken}": table_vd for taken, table_vd in self._snapshots.items()}
        return bases | {f"{_SEEN}{name}": value for name, value in self.seen.sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state of another runner. Call :meth:`connect` afterwards."""
        self._bases = {
            int(name.removeprefix(_BASIS)): value for name, value in state.items() if name.startswith(_BASIS)
        }
        self._snapshots = {
            int(name.removeprefix(_SNAPSHOT)): value
            for name, value in state.items()
            if name.startswith(_SNAPSHOT)
        }
        self.seen.sums = {
            name.removeprefix(_SEEN): value for name, value in state.items() if name.startswith(_SEEN)
        }

    def _take_snapshot(self, round_number: int, replicas: Sequence[LocalReplica]) -> None:
        every = self._variation.embedding_every
        if not every:
            return
        if round_number % every == 0:
            table_vd = replicas[0].host_of(0).outer.embedding
            self._snapshots[round_number] = snapshot(table_vd).float()
        if active_snapshot(round_number + 1, every) != active_snapshot(round_number, every):
            self._use_snapshot(round_number, replicas)

    def _use_snapshot(self, round_number: int, replicas: Sequence[LocalReplica]) -> None:
        """Derive T_perp from the snapshot for the inner phase after `round_number`."""
        every = self._variation.embedding_every
        # Links begin with the snapshot of round 0.
        if not every or not (active := active_snapshot(round_number + 1, every)):
            return
        for replica in replicas:
            for member in replica.members:
                if isinstance(end := member.hosted.upstream, _SnapshotEnd):
                    end.use(self._snapshots[active])
        self._snapshots = {taken: table for taken, table in self._snapshots.items() if taken >= active}

    def _basis(self, boundary: int) -> Tensor:
        """The basis [d, d] of links into stage `boundary`."""
        found = self._bases.get(boundary)
        return run_basis(self._spec, boundary) if found is None else found

    def _k_after(self, round_number: int) -> int:
        reached = [k for first, k in self._variation.k_by_round if first <= round_number + 1]
        return reached[-1] if reached else self._spec.link.k

    def _turn_bases(self) -> None:
        boundaries = range(1, self._spec.swarm.stages)
        if self._variation.basis_every:
            self._bases = {boundary: principal(self.seen.of(boundary)) for boundary in boundaries}
        else:
            gradients_dd = self.seen.total("gradient")
            k, rate = self._spec.link.k, self._variation.grassmann_rate
            turned = grassmann_step(self._basis(1), k, gradients_dd, rate)
            self._bases = dict.fromkeys(boundaries, turned)
        self.seen.sums.clear()


def principal(covariance_dd: Tensor) -> Tensor:
    """Eigenvectors [d, d], float32, of the largest eigenvalue first."""
    vectors_dd: Tensor = torch.linalg.eigh(covariance_dd.double()).eigenvectors
    return vectors_dd.flip(-1).float().contiguous()


def grassmann_step(basis_dd: Tensor, k: int, gradients_dd: Tensor, rate: float) -> Tensor:
    """The basis [d, d] after one step that reduces the gradient loss of the links, |G - G U U^T|^2.

    The step follows the gradient on the Grassmann manifold, (I - U U^T) A U with A = sum G^T G, divided by
    the largest eigenvalue of A. QR makes the columns orthonormal again.
    """
    basis_dd, a_dd = basis_dd.double(), gradients_dd.double()
    u_dk = basis_dd[:, :k]
    largest = torch.linalg.eigvalsh(a_dd)[-1].clamp_min(torch.finfo(torch.float64).tiny)
    pulled_dk = a_dd @ u_dk / largest
    moved_dk = u_dk + rate * (pulled_dk - u_dk @ (u_dk.T @ pulled_dk))
    q_dd: Tensor
    q_dd, r_dd = torch.linalg.qr(torch.cat((moved_dk, basis_dd[:, k:]), dim=1))
    # QR is unique only up to signs; a positive diagonal of R fixes them.
    signs_d: Tensor = r_dd.diagonal().sign()
    return (q_dd * signs_d).float()


class _FrozenEnd(ReceivingEnd):
    """A receiving end whose T_perp never changes after its creation (no adaptation of the embedding)."""

    def refresh(self, table_vd: Tensor) -> None:
        if not hasattr(self, "perpendicular_vd"):
            super().refresh(table_vd)


class _SnapshotEnd(ReceivingEnd):
    """A receiving end whose T_perp is that of a snapshot of the embedding; the first is of round 0."""

    def refresh(self, table_vd: Tensor) -> None:
        if not hasattr(self, "perpendicular_vd"):
            self.use(snapshot(table_vd))

    def use(self, snapshot_vd: Tensor) -> None:
        super().refresh(snapshot_vd)


def _receiving_end(variation: Variation) -> type[ReceivingEnd]:
    if variation.embedding_every:
        return _SnapshotEnd
    return ReceivingEnd if variation.adaptation else _FrozenEnd


def _row_wise(groups: list[dict[str, Any]], **options: Any) -> RowWiseAdamW:
    return RowWiseAdamW(groups, shared=lambda name: name.endswith(_CONSTRAINED), **options)


@torch.no_grad()
def _project_weights(replica: LocalReplica, basis_dk: Tensor) -> None:
    """W := U U^T W for the matrices that write into the residual stream, on all members before a link."""
    # The last member sends nothing downstream, so its weights need no projection.
    for member in replica.members[:-1]:
        basis = basis_dk.to(member.device)
        for stage in member.stages:
            for name, weight in member.parameters(stage).items():
                if name.endswith(_CONSTRAINED):
                    weight.copy_(basis @ (basis.T @ weight))
