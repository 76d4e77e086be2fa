"""The sections of the run specification: their fields, defaults and the bounds of each field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)


class Section(BaseModel):
    """One section of a run specification.

    The JSON leaves out the fields of `optional` that have their default, so that equal runs have one hash.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    optional: ClassVar[frozenset[str]] = frozenset()

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, field: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(field.field_name)].annotation is not bool:
            raise ValueError(f"{str(value).lower()} is neither a number nor a text")
        return value

    @model_serializer(mode="wrap")
    def _omit_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = handler(self)
        defaults = self.omitted(tree)
        return {key: value for key, value in tree.items() if key not in defaults or value != defaults[key]}

    def omitted(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The values with which fields of `tree` are left out of it."""
        return {name: type(self).model_fields[name].default for name in self.optional}


class ModelSpec(Section):
    """A decoder of the LLaMA family: RMSNorm, RoPE (half-split), SwiGLU, by default an untied head.

    With the fields after `norm_epsilon` it is also Llama 3, Mistral, Qwen2, Qwen3, SmolLM3 or OLMo2.
    """

    optional = frozenset(
        {
            *("key_value_heads", "head_width", "qkv_bias", "qk_norm", "rope_scaling", "rope_factor"),
            *("rope_context", "tied_head", "norms"),
        }
    )

    vocabulary: int = Field(256, ge=2, le=2**20)
    width: int = Field(128, ge=2, le=2**15, description="d")
    layers: int = Field(4, ge=1, le=512)
    heads: int = Field(4, ge=1, le=512, description="of queries")
    feed_forward: int = Field(352, ge=1, le=2**18)
    context: int = Field(128, ge=2, le=2**17, description="L, tokens of one sample")
    rope_base: float = Field(10_000.0, gt=1)
    norm_epsilon: float = Field(1e-5, gt=0, lt=1)
    key_value_heads: int = Field(
        4, ge=1, le=512, description="heads of keys and values, a divisor of `heads`; default: as many"
    )
    head_width: int = Field(32, ge=1, le=2**10, description="even; default: width / heads")
    qkv_bias: bool = Field(False, description="queries, keys and values have biases, as in Qwen2")
    qk_norm: bool = Field(False, description="RMSNorm of each head's queries and keys, as in Qwen3")
    rope_scaling: Literal["none", "linear", "llama3", "smollm3"] = Field(
        "none", description="RoPE for long contexts; smollm3: none in each fourth layer"
    )
    rope_factor: float = Field(1.0, ge=1, le=1e6, description="by which RoPE is stretched")
    rope_context: int = Field(8192, ge=1, le=2**24, description="llama3: context before stretching")
    tied_head: bool = Field(False, description="the head is the embedding, in a run of one stage")
    norms: Literal["inputs", "outputs"] = Field(
        "inputs", description="of layers; outputs: and of all queries, of all keys, as in OLMo2"
    )

    def has_rope(self, layer: int) -> bool:
        return self.rope_scaling != "smollm3" or layer % 4 != 3

    @property
    def query_width(self) -> int:
        """Width of all queries together: the output of W_q and the input of W_o."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.key_value_heads * self.head_width

    @property
    def query_key_norms(self) -> tuple[int, ...]:
        """Widths of the RMSNorms of queries and of keys: of one head, of all heads; or there are none."""
        if self.norms == "outputs":
            return self.query_width, self.key_width
        return (self.head_width, self.head_width) if self.qk_norm else ()

    @property
    def head_parameters(self) -> int:
        """Parameters of the head: none of its own where it is the embedding."""
        return 0 if self.tied_head else self.vocabulary * self.width

    @property
    def layer_matrices(self) -> int:
        """Parameters in the matrices of one layer."""
        return 2 * self.width * (self.query_width + self.key_width) + 3 * self.width * self.feed_forward

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer: matrices, norms and biases."""
        biases = self.query_width + 2 * self.key_width if self.qkv_bias else 0
        return self.layer_matrices + 2 * self.width + sum(self.query_key_norms) + biases

    @model_validator(mode="before")
    @classmethod
    def _fill_in_heads(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        return {**_default_heads(tree), **{key: value for key, value in tree.items() if value is not None}}

    def omitted(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        return super().omitted(tree) | _default_heads(tree)

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> ModelSpec:
        if self.head_width % 2:
            raise ValueError(
                f"width {self.width} does not split into {self.heads} heads of even width: give an even "
                "head_width"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.key_value_heads} key_value_heads evenly")
        if self.qkv_bias and self.qk_norm:
            raise ValueError("qkv_bias and qk_norm exclude each other: no published architecture has both")
        if self.norms == "outputs" and (self.qkv_bias or self.qk_norm or self.rope_scaling == "smollm3"):
            other = "qkv_bias, qk_norm and rope_scaling 'smollm3'"
            raise ValueError(f"norms 'outputs' excludes {other}: no published architecture has both")
        return self

    @model_validator(mode="after")
    def _rope_is_stretched(self) -> ModelSpec:
        if self.rope_scaling in ("none", "smollm3") and self.rope_factor != 1:
            raise ValueError("rope_factor is for rope_scaling 'linear' or 'llama3'")
        if self.rope_scaling == "smollm3" and self.qk_norm:
            raise ValueError("rope_scaling 'smollm3' and qk_norm: no published architecture has both")
        return self


def _default_heads(tree: Mapping[str, Any]) -> dict[str, int]:
    """The defaults that follow from other fields; nothing where those fields are no numbers."""
    width, heads = (tree.get(name, ModelSpec.model_fields[name].default) for name in ("width", "heads"))
    if type(width) is not int or type(heads) is not int or not 0 < heads <= width:
        return {}
    # 1 is no valid width: a width that does not split has no default.
    return {"key_value_heads": heads, "head_width": 1 if width % heads else width // heads}


class InnerSpec(Section):
    """The inner phase: H optimizer steps between two rounds. Moments are kept, and never averaged."""

    optional = frozenset({"optimizer", "decay_rounds"})

    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: orthogonal updates of the matrices of layers, AdamW for all else"
    )
    steps: int = Field(10, ge=1, le=100_000, description="H")
    microbatches: int = Field(4, ge=1, le=4096, description="per inner step and replica")
    microbatch_size: int = Field(2, ge=1, le=4096, description="b, samples")
    learning_rate: float = Field(3e-3, gt=0)
    warmup_steps: int = Field(30, ge=0)
    final_ratio: float = Field(0.1, ge=0, le=1, description="learning rate at the end / at the peak")
    decay_rounds: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="the last rounds, in which the rate falls; 0: it falls in the whole run, along a cosine",
    )
    weight_decay: float = Field(0.1, ge=0, description="on matrices, never on the embedding or the norms")
    clip_norm: float = Field(1.0, gt=0, description="global gradient norm, over all stages of the replica")


@dataclass(frozen=True)
class OneOf(AfterValidator):
    """Accepts a text that is one of `names`."""

    names: tuple[str, ...] = ()


def one_of(names: Iterable[str], or_empty: bool = False) -> OneOf:
    def check(name: str) -> str:
        if name not in names and not (or_empty and name == ""):
            raise ValueError(f"'{name}' is not one of {', '.join(names)}")
        return name

    return OneOf(check, tuple(names))


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
    """How peers are placed in pipelines."""

    optional = frozenset({"batch", "global_batch"})

    spares: int = Field(
        0, ge=0, le=10_000, description="stage peers kept warm before another pipeline trains"
    )
    balance: bool = Field(True, description="faster replicas take more of the microbatches of a step")
    batch: Literal["variable", "constant"] = Field(
        "variable",
        description="of the whole swarm: `inner.microbatches` for each replica; or `global_batch`, which the "
        "replicas divide, however many there are",
    )
    global_batch: int = Field(
        0,
        ge=0,
        le=2**30,
        description="samples of one inner step of all replicas together, where the batch is constant; 0: as "
        "many as the replicas take with which the run starts",
    )

    @model_validator(mode="after")
    def _batch_is_constant(self) -> GroupingSpec:
        if self.batch == "variable" and self.global_batch:
            raise ValueError("global_batch is for batch 'constant'")
        return self

    def omitted(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        return super().omitted(tree) if self.batch == "variable" else {}


HEARTBEATS_PER_SECOND = 100.0
"""Of all peers together, as far as `lost_after` allows. Each costs a coordinator about half a millisecond."""


class TimingSpec(Section):
    """Deadlines in seconds. A deadline that passes is a normal event, never a hang."""

    heartbeat: float = Field(2.0, gt=0)
    lost_after: float = Field(15.0, gt=0, description="a peer is lost after this long without a heartbeat")
    straggler: float = Field(
        1.0, gt=0, description="a round waits for slow replicas this multiple of the time that half need"
    )
    match_window: float = Field(120.0, gt=0, description="longest such wait")
    fetch: float = Field(20.0, gt=0, description="longest time to gather the payloads of a matched group")
    decide: float = Field(40.0, gt=0, description="longest time from the matched group to the decision")
    link: float = Field(60.0, gt=0, description="longest wait for one frame of a neighbour")

    def heartbeat_of(self, peers: int) -> float:
        """Seconds between two heartbeats of each of `peers`: longer in a large swarm, at least three in
        `lost_after`."""
        return min(max(self.heartbeat, peers / HEARTBEATS_PER_SECOND), self.lost_after / 3)

    @model_validator(mode="after")
    def _deadlines_can_hold(self) -> TimingSpec:
        if self.lost_after < 3 * self.heartbeat:
            raise ValueError(
                f"lost_after {self.lost_after:g} must be at least 3 heartbeats of {self.heartbeat:g}"
            )
        if self.decide <= self.fetch:
            raise ValueError(f"decide {self.decide:g} must exceed fetch {self.fetch:g}")
        return self


class RecoverySpec(Section):
    """What is kept for peers that join late or return."""

    checkpoint_every: int = Field(10, ge=1, description="rounds between two checkpoints of a node")
    keep_rounds: int = Field(30, ge=2, description="rounds whose committed payloads every host keeps")

    @model_validator(mode="after")
    def _log_reaches_back(self) -> RecoverySpec:
        if self.keep_rounds < 2 * self.checkpoint_every + 2:
            raise ValueError(
                f"keep_rounds {self.keep_rounds} must be at least 2 x checkpoint_every + 2, or the payloads "
                "since the last checkpoint but one would be gone"
            )
        return self
