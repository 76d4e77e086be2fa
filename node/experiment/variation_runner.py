"""Applies a variation to the replicas of one process.

Shapes: d width, k subspace width. U [d, k] is the basis of a link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from node.experiment.bottleneck import project_boundaries
from node.experiment.boundary_statistics import Covariances, observe_boundaries, observe_gradients
from node.experiment.in_process_replica import LocalReplica
from node.experiment.link_bases import grassmann_step, principal, rotated
from node.experiment.link_parameters import LinkParameters
from node.experiment.row_wise import RowWiseAdamW
from node.experiment.variation import Variation
from node.experiment.variation_check import check
from node.experiment.varied_links import VariedLinks
from node.worker.factories import TrainerFactories, run_basis
from protocol.algorithm.embedding_snapshot import active_snapshot
from protocol.algorithm.subspace import ReceivingEnd
from protocol.spec.run import RunSpec
from protocol.wire.snapshot_codec import snapshot

_BASIS, _LINK, _SEEN, _SNAPSHOT = "basis/", "link/", "seen/", "snapshot/"
_CONSTRAINED = (".wo", ".w_down")
"""The matrices that write into the residual stream, [d, in]."""


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
        self._links: dict[int, VariedLinks] = {}
        self.seen = Covariances()
        usual = TrainerFactories()
        self.factories = TrainerFactories(
            receiving_end=_receiving_end(variation),
            basis=lambda _, boundary: self._rotated(self._basis(boundary)),
            adamw=_row_wise if variation.row_wise_moments else usual.adamw,
        )

    def watch(self, position: int, replica: LocalReplica) -> None:
        """Change what is computed in `replica`, and collect the statistics that the variation needs.

        Call it before training. `position`: of the replica in the plan.
        """
        if len(replica.members) > 1:
            self._links[position] = VariedLinks(self._spec, self._variation, position, replica)
            if self._variation.embedding_every:
                _give_snapshot(replica, snapshot(replica.members[0].outer.embedding))
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
        if self._variation.share_tables:
            _share_tables(replicas)
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
        for position, replica in enumerate(replicas):
            replica.connect([k] * (len(replica.members) - 1))
            if position in self._links:
                self._links[position].attach()

    def state_dict(self) -> dict[str, Tensor]:
        """The current bases (float32), the statistics since they last changed (float64), the snapshots of the
        embedding that are active or will be (float32), and the parameters of links with their moments."""
        bases = {f"{_BASIS}{boundary}": basis for boundary, basis in self._bases.items()}
        bases |= {f"{_SNAPSHOT}{taken}": table_vd for taken, table_vd in self._snapshots.items()}
        bases |= {f"{_SEEN}{name}": value for name, value in self.seen.sums.items()}
        for prefix, parameters in self._parameters():
            bases |= {f"{prefix}{name}": value.cpu() for name, value in parameters.state_dict().items()}
        return bases

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
        for prefix, parameters in self._parameters():
            parameters.load_state_dict(
                {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            )

    def _parameters(self) -> Iterator[tuple[str, LinkParameters]]:
        """The parameters of all links, and the prefix of each in the state dict."""
        for position, links in self._links.items():
            for name, parameters in links.parameters.items():
                yield f"{_LINK}{position}/{name}/", parameters

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
            _give_snapshot(replica, self._snapshots[active])
        self._snapshots = {taken: table for taken, table in self._snapshots.items() if taken >= active}

    def _basis(self, boundary: int) -> Tensor:
        """The basis [d, d] of links into stage `boundary`."""
        found = self._bases.get(boundary)
        return run_basis(self._spec, boundary) if found is None else found

    def _rotated(self, basis_dd: Tensor) -> Tensor:
        link = self._spec.link
        return rotated(basis_dd, link.k, self._spec.seed) if self._variation.rotation else basis_dd

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


class _FrozenEnd(ReceivingEnd):
    """A receiving end whose T_perp never changes after its creation (no adaptation of the embedding)."""

    def refresh(self, table_vd: Tensor) -> None:
        if not hasattr(self, "perpendicular_vd"):
            super().refresh(table_vd)


@torch.no_grad()
def _share_tables(replicas: Sequence[LocalReplica]) -> None:
    """Give every table of a link its mean over all pipelines, in float32 and in their order.

    All begin a round with equal tables, so this is an exchange of dense pseudo-gradients with an outer
    learning rate of 1. The moments stay those of each pipeline.
    """
    sums: dict[int, Tensor] = {}
    pipelines = [position for position, replica in enumerate(replicas) if len(replica.members) > 1]
    for position in pipelines:  # one after the other: not all are in memory at a time
        for boundary, rows in _tables_of(replicas[position]).items():
            sums[boundary] = sums[boundary] + rows if boundary in sums else rows.clone()
    for position in pipelines:
        for boundary, rows in _tables_of(replicas[position]).items():
            rows.copy_(sums[boundary] / len(pipelines))


def _tables_of(replica: LocalReplica) -> dict[int, Tensor]:
    """The live tables, by the stage behind the link."""
    tables = {member.stages.first: member.hosted.table_values for member in replica.members}
    return {boundary: values["rows"] for boundary, values in tables.items() if values is not None}


def _give_snapshot(replica: LocalReplica, snapshot_vd: Tensor) -> None:
    for member in replica.members[1:]:
        member.hosted.use_snapshot(snapshot_vd)


def _receiving_end(variation: Variation) -> type[ReceivingEnd]:
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
