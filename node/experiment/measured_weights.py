"""Weights by measured agreement, with plans that are fixed: the rule of the coordinator, between rounds.

A member measures one payload of each stage (protocol.algorithm.comparison); here all payloads of a round are
at hand, so the same cosines follow from them at once. The coordinator's next plan comes one round later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.model.payloads import payload_layout
from protocol.algorithm.agreement import AgreementMeter
from protocol.algorithm.comparison import Comparison, next_of_kind
from protocol.algorithm.compressed_weight import (
    RECENT,
    PairCosine,
    is_compressed,
    next_weight,
    relative_agreement,
)
from protocol.spec.run import RunSpec
from protocol.types import PeerId, Replica
from protocol.wire.payload_codec import decode

_PREFIX = "measured-weights/"


@dataclass(frozen=True)
class _Figure:
    """A cosine that counts in a round: of two full payloads, or of a compressed one and a full one."""

    round_number: int
    stage: int
    replica: int
    is_compressed: bool
    cosine: float


class MeasuredWeights:
    """What compressed replicas weigh in the next round of a run whose grouping.weights is "measured".

    Attributes:
        compressed: the factor of their weight, from protocol.algorithm.compressed_weight.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._figures: list[_Figure] = []
        self._changed_in = 0
        self.compressed = 1.0

    def factor_of(self, replica: Replica) -> float:
        """By which the weight of `replica` is multiplied."""
        return self.compressed if is_compressed(replica) else 1.0

    @torch.no_grad()
    def measure(
        self, round_number: int, stage: int, payloads: Sequence[bytes], replicas: Sequence[Replica]
    ) -> None:
        """Take in the payloads of `stage` that count, in canonical order, and the replica of each.

        Not those of rounds of `outer.dense_every`, which agree more.
        """
        if self._spec.outer.is_dense_in(round_number):
            return
        layout = payload_layout(self._spec, stage, round_number)
        contents = [decode(layout, payload) for payload in payloads]
        is_full = [replica.is_full for replica in replicas]
        for position, replica in enumerate(replicas):
            if not (replica.is_full or is_compressed(replica)):
                continue
            other = next_of_kind(is_full, position, alike=replica.is_full)
            if other is None:
                continue
            meter = AgreementMeter(Comparison(position, alike=other), contents, [1.0] * len(contents))
            for name, tensor in layout.tensors.items():
                meter.add(name, torch.zeros(tensor.numel))  # a pair needs no sum of all payloads
            found = meter.result()
            if found is not None and found.alike is not None:
                kind = not replica.is_full
                self._figures.append(_Figure(round_number, stage, replica.index, kind, found.alike))

    def after_round(self, round_number: int) -> None:
        """Change the weight if it is due."""
        recent = sorted({each.round_number for each in self._figures})[-RECENT:]
        self._figures = [each for each in self._figures if each.round_number in recent]
        if len(recent) < RECENT or recent[0] <= self._changed_in:
            return
        agreement = relative_agreement(self._cosines(False), self._cosines(True))
        if agreement is None:
            return
        weight = next_weight(self.compressed, agreement)
        if weight != self.compressed:
            self.compressed, self._changed_in = weight, round_number

    def state_dict(self) -> dict[str, Tensor]:
        """The weight, when it changed, and the figures of the last rounds, in float64."""
        rows = [
            [each.round_number, each.stage, each.replica, each.is_compressed, each.cosine]
            for each in self._figures
        ]
        return {
            f"{_PREFIX}weight": torch.tensor([self.compressed, self._changed_in], dtype=torch.float64),
            f"{_PREFIX}figures": torch.tensor(rows, dtype=torch.float64).view(-1, 5),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the state of the same run; other names are left alone."""
        self.compressed, changed_in = state[f"{_PREFIX}weight"].tolist()
        self._changed_in = int(changed_in)
        self._figures = [
            _Figure(int(round_number), int(stage), int(replica), bool(kind), cosine)
            for round_number, stage, replica, kind, cosine in state[f"{_PREFIX}figures"].tolist()
        ]

    def _cosines(self, is_compressed: bool) -> list[PairCosine]:
        return [
            PairCosine(each.stage, PeerId(f"replica-{each.replica}"), each.cosine)
            for each in self._figures
            if each.is_compressed == is_compressed
        ]
