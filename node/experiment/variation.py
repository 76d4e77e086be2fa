"""Variations of the algorithm, which measure the effect of its parts and test alternatives.

A :class:`Variation` describes the differences; its defaults are the algorithm of a real swarm. No variation
is available in a real run: a better one should become part of the run specification. Files beside this one
tell whether a specification allows it (variation_check) and apply it (variation_runner, variation_plans).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


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
    share_tables: bool = Field(
        False,
        description="the tables of link.table become their mean over all pipelines after every round, "
        "exchanged as they are",
    )
    rotation: bool = Field(
        False,
        description="links rotate their k numbers before rounding, and back after, as some need that follow "
        "basis_every; the run's own basis is random",
    )
    stochastic_rounding: bool = Field(
        False, description="links round activations and gradients up or down at random, without bias"
    )
    link_feedback: bool = Field(
        False,
        description="what rounding loses of an activation is added to the next microbatch of the inner step",
    )
    trained_ends: bool = Field(
        False, description="each pipeline trains its own encoder and decoder of every link, from U and U^T"
    )
    end_rate: float = Field(0.1, gt=0, le=1, description="their learning rate, relative to that of the model")
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
        if self.average_gradients and self.full_weight != 1:
            raise ValueError("full_weight has no effect where gradients are averaged")
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
        treats_all = self.weight_projection or self.trained_ends
        if self.uncompressed_pipelines and (treats_all or any(reasons[1:])):
            raise ValueError(
                "uncompressed_pipelines does not go together with weight_projection, "
                "trained_ends, grassmann_every, basis_every or k_by_round, which treat all links alike"
            )
        return self

    @model_validator(mode="after")
    def _ends_are_trained_from_a_fixed_basis(self) -> Variation:
        if "end_rate" in self.changes and not self.trained_ends:
            raise ValueError("end_rate is for trained_ends, and they are not trained")
        others = self.grassmann_every, self.basis_every, self.k_by_round, self.replicas_by_round
        if self.trained_ends and (any(others) or self.weight_projection or self.projected_share):
            raise ValueError(
                "trained_ends does not go together with grassmann_every, basis_every, k_by_round, "
                "replicas_by_round, weight_projection or projected_share"
            )
        if self.rotation and self.k_by_round:
            raise ValueError("rotation is one of a fixed k: it does not go together with k_by_round")
        return self


UNVARIED = Variation()
"""The algorithm of a real swarm."""
