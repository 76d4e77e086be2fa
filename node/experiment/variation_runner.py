"""Applies a variation to the replicas of one process, and its weights and counts to their plan.

Shapes: d width, k subspace width. U [d, k] is the basis of a link, the first k columns of an orthonormal one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from node.checkpoint.snapshot_codec import snapshot
from node.core.optimizer.muon import project_outputs
from node.core.worker.factories import TrainerFactories, run_basis
from node.experiment.in_process_replica import LocalReplica
from node.experiment.row_wise import RowWiseAdamW
from node.experiment.variation import Variation
from protocol.group.batch import with_equal_shares
from protocol.math.embedding_snapshot import active_snapshot
from protocol.math.output_subspace import OUTPUTS
from protocol.math.sampling import next_first_sample
from protocol.math.subspace import ReceivingEnd
from protocol.spec.run import RunSpec
from protocol.types import Plan

_BASIS, _GRADIENTS, _SNAPSHOT = "basis", "gradients", "snapshot/"


class VariationRunner:
    """Applies `variation` to the replicas of one swarm, which must be created with :attr:`factories`.

    It also gives links the snapshots of the embedding that a run with `link.embedding_every` would fetch.

    Raises ValueError as :meth:`Variation.check`.

    Attributes:
        factories: for all trainers of the swarm.
        gradients: sum [d, d] of g^T g over the gradients that links have compressed since the basis changed,
            float64; None before any.
    """

    def __init__(self, spec: RunSpec, variation: Variation) -> None:
        variation.check(spec)
        self._spec, self._variation = spec, variation
        self._basis: Tensor | None = None
        self._snapshots: dict[int, Tensor] = {}
        self.gradients: Tensor | None = None
        usual = TrainerFactories()
        self.factories = TrainerFactories(
            receiving_end=ReceivingEnd if variation.adaptation else _FrozenEnd,
            basis=lambda _, boundary: self._basis_of(boundary),
            optimizers={**usual.optimizers, **({"adamw": _row_wise} if variation.row_wise_moments else {})},
        )

    def watch(self, replica: LocalReplica) -> None:
        """Collect what the variation needs from `replica`. Call it before training."""
        if self._variation.grassmann_every:
            for member in replica.members[1:]:
                first = member.modules[member.stages.first]
                first.register_forward_pre_hook(self._note_gradient)

    def after_step(self, replica: LocalReplica) -> None:
        """Call it after each AdamW step of `replica`."""
        if self._variation.weight_projection:
            for member in replica.members[:-1]:
                for stage in member.stages:
                    project_outputs(member.parameters(stage), self._basis_of(0)[:, : self._spec.link.k])

    def after_round(self, round_number: int, replicas: Sequence[LocalReplica]) -> None:
        """Change the links if due. Call it after `round_number` is committed on all `replicas`."""
        self._take_snapshot(round_number, replicas)
        every = self._variation.grassmann_every
        if every and round_number % every == 0 and self.gradients is not None:
            k, rate = self._spec.link.k, self._variation.grassmann_rate
            self._basis = grassmann_step(self._basis_of(0), k, self.gradients, rate)
            self.gradients = None
            self.connect(round_number, replicas)

    def connect(self, round_number: int, replicas: Sequence[LocalReplica]) -> None:
        """Give the links the basis and the snapshot that are valid after `round_number`."""
        self._use_snapshot(round_number, replicas)
        if self._basis is not None:
            for replica in replicas:
                replica.connect([self._spec.link.k] * (len(replica.members) - 1))

    def state_dict(self) -> dict[str, Tensor]:
        """The present basis (float32), the gradients since it changed (float64), and the snapshots of the
        embedding that are active or will be (float32)."""
        named = {_BASIS: self._basis, _GRADIENTS: self.gradients}
        snapshots = {f"{_SNAPSHOT}{taken}": table_vd for taken, table_vd in self._snapshots.items()}
        return {name: tensor for name, tensor in named.items() if tensor is not None} | snapshots

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state of another runner. Call :meth:`connect` afterwards."""
        self._basis, self.gradients = state.get(_BASIS), state.get(_GRADIENTS)
        self._snapshots = {
            int(name.removeprefix(_SNAPSHOT)): value
            for name, value in state.items()
            if name.startswith(_SNAPSHOT)
        }

    def _take_snapshot(self, round_number: int, replicas: Sequence[LocalReplica]) -> None:
        every = self._spec.link.embedding_every
        if not every:
            return
        if round_number % every == 0:
            table_vd = replicas[0].host_of(0).outer.embedding
            self._snapshots[round_number] = snapshot(table_vd).float()
        if active_snapshot(round_number + 1, every) != active_snapshot(round_number, every):
            self._use_snapshot(round_number, replicas)

    def _use_snapshot(self, round_number: int, replicas: Sequence[LocalReplica]) -> None:
        """Derive T_perp from the snapshot for the inner phase after `round_number`."""
        every = self._spec.link.embedding_every
        # Links begin with the snapshot of round 0.
        if not every or not (active := active_snapshot(round_number + 1, every)):
            return
        for replica in replicas:
            for member in replica.members[1:]:
                member.hosted.use_snapshot(self._snapshots[active])
        self._snapshots = {taken: table for taken, table in self._snapshots.items() if taken >= active}

    def _basis_of(self, boundary: int) -> Tensor:
        """The basis [d, d] of links into stage `boundary`; a variation has the same for all."""
        return run_basis(self._spec, boundary) if self._basis is None else self._basis

    def _note_gradient(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Add the gradient of the activations that a member receives, before the link compresses it."""
        if arguments[0].requires_grad:
            arguments[0].register_hook(self._add_gradient)  # type: ignore[no-untyped-call]

    def _add_gradient(self, gradient_bld: Tensor) -> None:
        flat = gradient_bld.detach().flatten(0, -2).float()
        product = (flat.T @ flat).double().cpu()
        self.gradients = product if self.gradients is None else self.gradients + product


def varied(plan: Plan, variation: Variation) -> Plan:
    """`plan` with the weights of `variation`."""
    factor = variation.full_weight
    replicas = (each if each.links else replace(each, weight=each.weight * factor) for each in plan.replicas)
    return replace(plan, replicas=tuple(replicas))


def plans_of(spec: RunSpec, plan: Plan, variation: Variation) -> list[Plan]:
    """`plan`, or with `replicas_by_round` the plans of these rounds, whose replicas divide the batch."""
    plans = list[Plan]()
    for first, count in variation.replicas_by_round:
        sample = next_first_sample(plans[-1], spec, first) if plans else plan.first_sample
        replicas = tuple(with_equal_shares(spec, plan.replicas[:count]))
        reason = f"{count} replicas train"
        plans.append(Plan(len(plans) + 1, first, sample, replicas, reason))
    return plans or [plan]


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


def _row_wise(groups: list[dict[str, Any]], **options: Any) -> RowWiseAdamW:
    return RowWiseAdamW(groups, shared=lambda name: name.endswith(OUTPUTS), **options)
