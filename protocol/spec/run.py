"""The run specification: everything that all peers of a run must agree on, and its hash.

What a single node may choose for itself (device, folder, address) is not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Self

import pydantic_core
from pydantic import Field, ValidationError, model_validator

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.data import DataSpec
from protocol.spec.fixed import with_fixed, without_fixed
from protocol.spec.link import UNCOMPRESSED, LinkSpec
from protocol.spec.outer import OuterSpec
from protocol.spec.sections import (
    GroupingSpec,
    InnerSpec,
    ModelSpec,
    RecoverySpec,
    Section,
    SwarmSpec,
    TimingSpec,
)
from protocol.types import Replica

MOST_MICROBATCHES = 2**20
"""Of one replica in an inner step; a plan with more is refused."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RunSpec(Section):
    """The whole specification of a run. Frozen; equal hash means equal in every field."""

    optional = frozenset({"initial", "began_as"})

    preset: str = "tiny"
    seed: int = Field(0, ge=0, lt=2**63)
    rounds: int = Field(30, ge=1, le=10_000_000)
    initial: tuple[Digest, ...] | None = Field(
        None, max_length=512, description="digest of each stage before round 1; None: drawn from the seed"
    )
    began_as: Digest | None = Field(None, description="set where the run was changed: the hash before that")
    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    inner: InnerSpec = InnerSpec()
    outer: OuterSpec = OuterSpec()
    link: LinkSpec = LinkSpec()
    swarm: SwarmSpec = SwarmSpec()
    grouping: GroupingSpec = GroupingSpec()
    timing: TimingSpec = TimingSpec()
    recovery: RecoverySpec = RecoverySpec()

    @model_validator(mode="after")
    def _sections_agree(self) -> RunSpec:
        width, stages = self.model.width, self.swarm.stages
        if self.link.k > width:
            raise ValueError(f"link.k {self.link.k} exceeds model.width {width} (k must be <= d)")
        if self.link.most_k > width:
            raise ValueError(f"link.most_k {self.link.most_k} exceeds model.width {width}")
        if self.link.table_rows > self.model.vocabulary:
            raise ValueError(
                f"link.table_rows {self.link.table_rows} exceeds model.vocabulary {self.model.vocabulary}"
            )
        if self.link.table and not self.swarm.replicas:
            raise ValueError(
                "link.table needs a full replica: without one, the model that is exported would depend on "
                "tables that it does not have"
            )
        if self.model.tied_head and stages > 1:
            raise ValueError(
                "model.tied_head needs swarm.stages 1, as of more the first has the embedding, the last the "
                "head: take one stage and no pipelines, or model.tied_head false"
            )
        if self.outer.overlap >= self.inner.steps:
            raise ValueError(
                f"outer.overlap {self.outer.overlap} must be below inner.steps {self.inner.steps}: a round's "
                "update is applied before the next payloads are made"
            )
        if self.outer.turns > stages:
            raise ValueError(
                f"outer.turns {self.outer.turns} exceeds swarm.stages {stages}: "
                "some rounds would exchange nothing"
            )
        if stages > self.model.layers:
            raise ValueError(
                f"swarm.stages {stages} exceeds model.layers {self.model.layers}: "
                "every stage needs at least one layer"
            )
        if self.initial is not None and len(self.initial) != stages:
            raise ValueError(
                f"initial has the digests of {len(self.initial)} stages, and swarm.stages is {stages}: "
                f"import the model for {stages} stages"
            )
        return self

    @model_validator(mode="after")
    def _batch_can_be_divided(self) -> RunSpec:
        size, replicas = self.inner.microbatch_size, self._first_replicas
        least, most = replicas * size, MOST_MICROBATCHES * size
        is_possible = self.global_batch % size == 0 and least <= self.global_batch <= most
        if self.grouping.batch == "constant" and not is_possible:
            raise ValueError(
                f"grouping.global_batch {self.global_batch} must be a multiple of inner.microbatch_size "
                f"{size}, {least} to {most}: each of {replicas} replicas takes a microbatch at least"
            )
        return self

    @property
    def tree(self) -> dict[str, Any]:
        """The whole specification as JSON objects: the settings, and what all runs have alike."""
        return with_fixed(self.model_dump(mode="json"))

    @property
    def canonical_json(self) -> str:
        return json.dumps(self.tree, sort_keys=True, separators=(",", ":"))

    @cached_property
    def hash(self) -> str:
        """sha-256 (hex) of the canonical JSON."""
        return hashlib.sha256(self.canonical_json.encode()).hexdigest()

    def __copy__(self) -> Self:
        """Without the hash: pydantic gives the copy other fields afterwards."""
        copied = super().__copy__()
        copied.__dict__.pop("hash", None)
        return copied

    @property
    def identity(self) -> str:
        """The hash of the specification with which the run began: all its specifications have the same."""
        return self.began_as or self.hash

    @property
    def name(self) -> str:
        """Short name of a run of this specification that has no authority; changes of the run keep it.

        With an authority the run has the id of :func:`protocol.trust.run_id.run_id_of`.
        """
        return f"{self.preset}-{self.identity[:12]}"

    @property
    def total_steps(self) -> int:
        """Inner steps of the whole run; the learning-rate schedule ends here."""
        return self.rounds * self.inner.steps

    @property
    def _first_replicas(self) -> int:
        """Replicas that the run needs before it starts."""
        return self.swarm.replicas + self.swarm.pipelines

    @property
    def global_batch(self) -> int:
        """Samples of one inner step of all replicas with which the run starts."""
        usual = self._first_replicas * self.inner.microbatches * self.inner.microbatch_size
        return self.grouping.global_batch or usual

    @property
    def link_table_parameters(self) -> int:
        """Scalars in the token table that a member behind a link trains for itself; 0 without link.table."""
        rows = self.link.table_rows or self.model.vocabulary
        return self.link.table * rows * self.model.width

    def microbatches_of(self, replica: Replica) -> int:
        """Microbatches of `replica` in one inner step."""
        return replica.microbatches or self.inner.microbatches

    def samples_per_round(self, microbatches: int = 0) -> int:
        """Samples in one round of a replica with `microbatches` in a step; 0 means the spec's number."""
        return self.inner.steps * (microbatches or self.inner.microbatches) * self.inner.microbatch_size

    @property
    def parameters(self) -> int:
        """Scalars in the parameters of all stages."""
        return sum(map(self.parameters_of, range(self.swarm.stages)))

    def parameters_of(self, stage: int) -> int:
        """Scalars in the parameters of `stage`. Raises ValueError."""
        model, is_last = self.model, stage == self.swarm.stages - 1
        # The first stage has the embedding, the last one the head and its norm.
        ends = (stage == 0) * model.vocabulary * model.width + is_last * (model.head_parameters + model.width)
        return len(self.layers_of(stage)) * model.layer_parameters + ends

    def layers_of(self, stage: int) -> range:
        """Layers of `stage`. The first ``layers % stages`` stages have one layer more. Raises ValueError.

        So the last stage, which computes the head, never has more layers than another one.
        """
        if not 0 <= stage < self.swarm.stages:
            raise ValueError(f"stage {stage} is outside 0..{self.swarm.stages - 1}")
        size, extra = divmod(self.model.layers, self.swarm.stages)
        first = stage * size + min(stage, extra)
        return range(first, first + size + (stage < extra))

    def outputs_k(self, stage: int) -> int | None:
        """The k of the links in whose subspace the layers of `stage` write; None: they write anywhere.

        No link follows the last stage, and outputs that are normed leave every subspace.
        """
        ks, width = self.link.possible_ks, self.model.width
        is_bound = self.inner.optimizer == "muon" and self.swarm.pipelines and self.model.norms == "inputs"
        if not is_bound or UNCOMPRESSED in ks or max(ks) == width or stage == self.swarm.stages - 1:
            return None
        return max(ks)

    def lacks_second_moment(self, layers: int) -> int:
        """Parameters of `layers` layers of which the optimizer keeps one moment, not two."""
        return layers * self.model.layer_matrices if self.inner.optimizer == "muon" else 0

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Parse a spec received from the coordinator or read from a run folder.

        Raises HetnodeError BAD_SPEC or SETTING_REMOVED.
        """
        try:
            return cls.from_tree(pydantic_core.from_json(text))
        except ValueError as error:
            remedy = "Give the JSON of a specification, as the coordinator sends it."
            raise HetnodeError(
                ErrorCode.BAD_SPEC, f"The run specification is no JSON: {error}.", remedy
            ) from None

    @classmethod
    def from_tree(cls, tree: Any) -> RunSpec:
        """The specification whose :attr:`tree` is given. Raises as :meth:`from_json`."""
        try:
            return cls.model_validate(without_fixed(tree) if isinstance(tree, Mapping) else tree)
        except ValidationError as error:
            raise invalid_spec(error) from None


def invalid_spec(error: ValidationError) -> HetnodeError:
    """BAD_SPEC with every offending field named."""
    problems = []
    for item in error.errors(include_url=False, include_input=True):
        # Parts in brackets say which form a value has: they are no names.
        where = ".".join(each for each in map(str, item["loc"]) if not each.startswith("(")) or "spec"
        message = str(item["msg"]).removeprefix("Value error, ")
        shown = "" if item["type"] == "value_error" else f" (got {item['input']!r:.80})"
        problems.append(f"{where}: {message}{shown}")
    return HetnodeError(
        ErrorCode.BAD_SPEC,
        f"The run specification is not valid: {'; '.join(problems)}.",
        "Change the option or the run file; 'hetnode spec show PRESET' prints a valid one.",
    )
