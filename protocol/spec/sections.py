"""The sections of the run specification: their fields, defaults and the bounds of each field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from protocol.spec.quantizers import LINK_QUANTIZERS, PAYLOAD_QUANTIZERS


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSpec(Section):
    """A decoder-only LLaMA: RMSNorm, RoPE (half-split), SwiGLU, no biases, untied head."""

    vocabulary: int = Field(256, ge=2, le=2**20)
    width: int = Field(128, ge=2, le=2**15, description="d")
    layers: int = Field(4, ge=1, le=512)
    heads: int = Field(4, ge=1, le=512)
    feed_forward: int = Field(352, ge=1, le=2**18)
    context: int = Field(128, ge=2, le=2**17, description="L, tokens of one sample")
    rope_base: float = Field(10_000.0, gt=1)
    norm_epsilon: float = Field(1e-5, gt=0, lt=1)

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelSpec:
        if self.width % self.heads or self.head_width % 2:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads of even width")
        return self


class DataSpec(Section):
    """Where samples come from: ``builtin``, ``text:PATH``, ``jsonl:PATH`` or ``hf:NAME[/CONFIG]``."""

    source: str = "builtin"
    text_field: str = Field("text", min_length=1, description="key of the text in jsonl and hf records")
    tokenizer: str = Field("byte", description="'byte' or the path of a tokenizer.json")
    tokenizer_sha256: str = Field("", description="set by the coordinator when it reads the tokenizer file")
    validation_batches: int = Field(4, ge=1, le=10_000, description="micro-batches of one validation pass")

    @model_validator(mode="after")
    def _source_is_known(self) -> DataSpec:
        kind, _, rest = self.source.partition(":")
        if self.source != "builtin" and not (kind in ("text", "jsonl", "hf") and rest):
            known = "builtin, text:PATH, jsonl:PATH or hf:NAME[/CONFIG]"
            raise ValueError(f"unknown data source '{self.source}': use {known}")
        return self


class InnerSpec(Section):
    """The inner phase: H AdamW steps between two rounds. Moments are kept across rounds, never averaged."""

    steps: int = Field(10, ge=1, le=100_000, description="H")
    microbatches: int = Field(4, ge=1, le=4096, description="per inner step and replica")
    microbatch_size: int = Field(2, ge=1, le=4096, description="b, samples")
    learning_rate: float = Field(3e-3, gt=0)
    warmup_steps: int = Field(30, ge=0)
    final_ratio: float = Field(0.1, ge=0, le=1, description="learning rate at the end / at the peak")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="on matrices, never on the embedding or the norms")
    clip_norm: float = Field(1.0, gt=0, description="global gradient norm, over all stages of the replica")


def _one_of(names: Iterable[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"'{name}' is not one of {', '.join(names)}")
        return name

    return AfterValidator(check)


PayloadQuantizerName = Annotated[str, _one_of(PAYLOAD_QUANTIZERS)]
LinkQuantizerName = Annotated[str, _one_of(LINK_QUANTIZERS)]

_MOST_TABLE_BYTES = 64 << 20
"""For the binomials of the enumerative code, in the memory of every member."""


_NESTEROV = {"momentum": 0.9, "learning_rate": 0.7}
"""DiLoCo's values (arXiv 2311.08105), where a run file with ``optimizer = "nesterov"`` does not give them."""


class OuterSpec(Section):
    """SparseLoCo (algorithm.md, eqs 1 and 2) and its codec."""

    optimizer: Literal["sgd", "nesterov"] = Field(
        "sgd", description="moves the anchor along the aggregated pseudo-gradient"
    )
    momentum: float | None = Field(None, ge=0.01, lt=1, description="of nesterov; None: sgd has none")
    learning_rate: float = Field(1.0, gt=0, description="eta; acts exactly once")
    error_decay: float = Field(0.95, ge=0, le=1, description="beta of the error feedback")
    chunk: int = Field(4096, ge=1, le=65536)
    top_k: int = Field(32, ge=0, description="values sent per full chunk; 0 sends all of them (dense)")
    layout: Literal["flat", "tiles"] = "flat"
    short_chunk: Literal["proportional", "clip"] = "proportional"
    indices: Literal["elias-fano", "enumerative"] = Field(
        "elias-fano", description="code of the chosen positions; enumerative is shorter, and slower"
    )
    quantizer: PayloadQuantizerName = Field(
        "2bit", description="sign and one of two magnitudes; the sign alone; float32, as in a dense exchange"
    )
    codebook: Literal["tensor", "chunk"] = Field(
        "tensor", description="magnitudes per tensor, or scaled to every chunk for one byte per chunk"
    )
    overlap: int = Field(
        0,
        ge=0,
        description="inner steps of the next round that are trained while a round is exchanged; its update "
        "is applied after exactly this many",
    )

    @property
    def dense(self) -> bool:
        return self.top_k == 0

    @property
    def state_tensors(self) -> int:
        """How many tensors of state the optimizer keeps for each parameter."""
        return 1 if self.optimizer == "nesterov" else 0

    @model_validator(mode="before")
    @classmethod
    def _fill_in_nesterov(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and tree.get("optimizer") == "nesterov":
            return {**_NESTEROV, **{key: value for key, value in tree.items() if value is not None}}
        return tree

    @model_serializer(mode="wrap")
    def _omit_default_optimizer(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Specifications from before these fields existed keep their JSON and their hash."""
        tree: dict[str, Any] = handler(self)
        if self.optimizer == "sgd":
            tree.pop("optimizer", None)
            tree.pop("momentum", None)
        return tree

    @model_validator(mode="after")
    def _fields_agree(self) -> OuterSpec:
        if self.optimizer == "sgd" and self.momentum is not None:
            raise ValueError("momentum is for optimizer 'nesterov'; optimizer 'sgd' has none")
        if self.top_k > self.chunk:
            raise ValueError(f"top_k {self.top_k} exceeds the chunk of {self.chunk}")
        if self.layout == "tiles" and int(self.chunk**0.5) ** 2 != self.chunk:
            raise ValueError(f"layout 'tiles' needs a square chunk, not {self.chunk}")
        return self

    @model_validator(mode="after")
    def _enumeration_table_is_small(self) -> OuterSpec:
        if self.indices == "enumerative" and not self.dense:
            nbytes = 4 * self.chunk * self.top_k
            # The product alone bounds the binomials before they are computed.
            if nbytes <= _MOST_TABLE_BYTES:
                nbytes *= math.comb(self.chunk, min(self.top_k, self.chunk // 2)).bit_length() // 32 + 1
            if nbytes > _MOST_TABLE_BYTES:
                raise ValueError(
                    f"indices 'enumerative' would need a table of more than {_MOST_TABLE_BYTES >> 20} MB for "
                    f"{self.top_k} of {self.chunk}: use a smaller top_k or chunk, or 'elias-fano'"
                )
        return self


class LinkSpec(Section):
    """The link between two members of a pipeline replica."""

    k: int = Field(16, ge=0, description="subspace width at first; 0 sends activations uncompressed")
    least_k: int = Field(0, ge=0, description="smallest k of a slow link; 0: k is fixed")
    most_k: int = Field(0, ge=0, description="largest k of a fast link; 0: k is fixed")
    dtype: LinkQuantizerName = "bf16"

    @property
    def adapts(self) -> bool:
        """Whether k follows the measured bandwidth, between `least_k` and `most_k`."""
        return self.least_k > 0

    def token_bytes(self, width: int) -> int:
        """Bytes of `width` values of one token, in one direction; with their scale, without the token id."""
        return LINK_QUANTIZERS[self.dtype].token_bytes(width)

    @model_validator(mode="after")
    def _bounds_hold_k(self) -> LinkSpec:
        if (self.least_k == 0) != (self.most_k == 0):
            raise ValueError("give both link.least_k and link.most_k, or neither")
        if self.adapts and not self.least_k <= self.k <= self.most_k:
            raise ValueError(f"link.k {self.k} is not within least_k {self.least_k} .. most_k {self.most_k}")
        return self


class SwarmSpec(Section):
    """The peers that the run needs before it starts."""

    stages: int = Field(2, ge=1, le=512, description="S: the layers are cut once into this many stages")
    replicas: int = Field(1, ge=0, le=10_000, description="full replicas")
    pipelines: int = Field(1, ge=0, le=10_000, description="pipeline replicas")
    members: int = Field(
        0, ge=0, le=512, description="stage peers per pipeline that the run needs; 0: one per stage"
    )

    @model_validator(mode="after")
    def _has_replicas(self) -> SwarmSpec:
        if self.replicas + self.pipelines == 0:
            raise ValueError("a run needs at least one replica or pipeline")
        if self.pipelines and self.stages < 2:
            raise ValueError("a pipeline replica needs at least 2 stages")
        if self.members == 1 or self.members > self.stages:
            raise ValueError(
                f"{self.members} members cannot share {self.stages} stages: use 2 to {self.stages}"
            )
        return self

    @property
    def chain_length(self) -> int:
        """Members that one pipeline needs before the run starts."""
        return self.members or self.stages


class GroupingSpec(Section):
    """How peers are placed in pipelines, and when a new placement is worth a change."""

    margin: float = Field(
        0.1, ge=0, le=1, description="share by which a new placement must shorten the inner step"
    )
    settle_rounds: int = Field(3, ge=1, description="rounds between two changes that only save time")
    spares: int = Field(
        0, ge=0, le=10_000, description="stage peers kept warm before another pipeline trains"
    )
    balance: bool = Field(True, description="faster replicas take more of the microbatches of a step")
    reserve: float = Field(0.1, ge=0, lt=1, description="share of a peer's memory that plans leave free")


class TimingSpec(Section):
    """Deadlines in seconds. A deadline that passes is a normal event, never a hang."""

    heartbeat: float = Field(2.0, gt=0)
    lost_after: float = Field(15.0, gt=0, description="a peer is lost after this long without a heartbeat")
    straggler: float = Field(
        1.0, gt=0, description="a round waits for slow replicas this multiple of the time that half need"
    )
    least_window: float = Field(5.0, gt=0, description="shortest such wait")
    match_window: float = Field(120.0, gt=0, description="longest such wait")
    fetch: float = Field(20.0, gt=0, description="longest time to gather the payloads of a matched group")
    decide: float = Field(40.0, gt=0, description="longest time from the matched group to the decision")
    link: float = Field(60.0, gt=0, description="longest wait for one frame of a neighbour")
    outage: float = Field(86_400.0, gt=0, description="how long nodes wait for an unreachable coordinator")

    @model_validator(mode="after")
    def _deadlines_can_hold(self) -> TimingSpec:
        if self.lost_after < 3 * self.heartbeat:
            raise ValueError(
                f"lost_after {self.lost_after:g} must be at least 3 heartbeats of {self.heartbeat:g}"
            )
        if self.decide <= self.fetch:
            raise ValueError(f"decide {self.decide:g} must exceed fetch {self.fetch:g}")
        if self.least_window > self.match_window:
            raise ValueError(f"least_window {self.least_window:g} exceeds match_window {self.match_window:g}")
        return self


class RecoverySpec(Section):
    """What is kept for peers that join late or return, and what a replica may do without the coordinator."""

    checkpoint_every: int = Field(10, ge=1, description="rounds between two checkpoints of a node")
    keep_rounds: int = Field(30, ge=2, description="rounds whose committed payloads every host keeps")
    extra_steps: int = Field(
        20, ge=0, description="inner steps beyond H that a replica trains without the coordinator"
    )
    cold_steps: int = Field(5, ge=0, description="steps of warmup after the moments were reset")
    least_share: float = Field(
        0.1, gt=0, le=1, description="with a smaller share of its H steps a replica skips the round"
    )

    @model_validator(mode="after")
    def _log_reaches_back(self) -> RecoverySpec:
        if self.keep_rounds < 2 * self.checkpoint_every + 2:
            raise ValueError(
                f"keep_rounds {self.keep_rounds} must be at least 2 x checkpoint_every + 2, or the payloads "
                "since the last checkpoint but one would be gone"
            )
        return self
