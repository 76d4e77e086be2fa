"""Variations of the algorithm, which measure the effect of its parts.

A :class:`Variation` describes the differences; its defaults are the algorithm of a real swarm. No variation
is available in a real run: a better one should become part of the run specification.
node.experiment.variation_runner applies it.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from protocol.math.output_subspace import output_basis
from protocol.spec.run import RunSpec


class Variation(BaseModel):
    """Differences from the algorithm. With all defaults there is no difference."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    average_gradients: bool = Field(
        False, description="replicas average their gradients before every AdamW step: data parallel training"
    )
    adaptation: bool = Field(True, description="T_perp follows the embedding; else it stays as at the start")
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
    full_weight: float = Field(1.0, gt=0, description="weight of a full replica in a round; a pipeline has 1")
    replicas_by_round: tuple[tuple[int, int], ...] = Field(
        (), description="(round, n): only the first n replicas train from that round on; from round 1 on"
    )

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @field_validator("replicas_by_round")
    @classmethod
    def _rounds_ascend(cls, steps: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        rounds = [first for first, _ in steps]
        if rounds != sorted(set(rounds)) or any(first < 1 or count < 1 for first, count in steps):
            raise ValueError("rounds count from 1 and ascend, and no value is below 1")
        if steps and rounds[0] != 1:
            raise ValueError("replicas_by_round must say how many replicas train in round 1")
        return steps

    @model_validator(mode="after")
    def _parts_agree(self) -> Variation:
        if self.average_gradients and self.full_weight != 1:
            raise ValueError("full_weight has no effect where gradients are averaged")
        if self.replicas_by_round and (self.average_gradients or self.full_weight != 1):
            raise ValueError("replicas_by_round does not go together with average_gradients or full_weight")
        if self.grassmann_every and (self.weight_projection or not self.adaptation):
            raise ValueError(
                "grassmann_every changes the basis that weight_projection and adaptation = false keep"
            )
        return self

    def check(self, spec: RunSpec) -> None:
        """Raise ValueError with the reason if it cannot be applied to replicas of `spec`."""
        has_links = spec.swarm.pipelines > 0 and spec.swarm.chain_length > 1
        if spec.initial is not None:
            raise ValueError(
                "an experiment starts from the seed, and this specification from parameters that were "
                "imported"
            )
        if self.row_wise_moments and spec.inner.optimizer != "adamw":
            raise ValueError("row_wise_moments are those of AdamW, and inner.optimizer is another one")
        if self.average_gradients and has_links and spec.link.table:
            raise ValueError(
                "replicas that average their gradients are clipped alike, but a link.table has gradients of "
                "one replica alone"
            )
        if self.average_gradients and spec.outer.turns > 1:
            raise ValueError("outer.turns has no effect where gradients are averaged")
        if any(count > spec.swarm.replicas + spec.swarm.pipelines for _, count in self.replicas_by_round):
            raise ValueError("replicas_by_round has more replicas than the specification")
        if self.replicas_by_round and spec.outer.overlap:
            raise ValueError("replicas_by_round needs rounds without overlap")
        if (self.grassmann_every or self.weight_projection) and not (has_links and spec.link.k):
            raise ValueError("grassmann_every and weight_projection need links that compress")
        if self.grassmann_every and output_basis(spec, 0) is not None:
            raise ValueError("grassmann_every changes the basis onto which Muon's matrices are projected")
        if spec.link.embedding_every and (self.grassmann_every or not self.adaptation):
            raise ValueError(
                "link.embedding_every does not go together with grassmann_every or adaptation = false"
            )


UNVARIED = Variation()
"""The algorithm of a real swarm."""
