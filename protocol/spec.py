"""The run specification: everything that all parties must agree on, and its hash.

A spec is built in one place (:func:`resolve`) from a preset, an optional TOML file and overrides, is frozen
afterwards, and is compared by :attr:`RunSpec.hash`. What a single node may choose for itself (device,
folder, address) is not part of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PROTOCOL_VERSION, Replica


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSpec(_Section):
    """Decoder-only LLaMA: RMSNorm, RoPE (half-split), SwiGLU, no biases, untied head."""

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


class DataSpec(_Section):
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
            raise ValueError(
                f"unknown data source '{self.source}': use builtin, text:PATH, jsonl:PATH or hf:NAME[/CONFIG]"
            )
        return self


class InnerSpec(_Section):
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


_MOST_TABLE_BYTES = 64 << 20
"""For the binomials of the enumerative code, on every member."""


class OuterSpec(_Section):
    """SparseLoCo (algorithm.md, eqs 1 and 2) and its codec."""

    learning_rate: float = Field(1.0, gt=0, description="eta; acts exactly once")
    error_decay: float = Field(0.95, ge=0, le=1, description="beta of the error feedback")
    chunk: int = Field(4096, ge=1, le=65536)
    top_k: int = Field(32, ge=0, description="values sent per full chunk; 0 sends all of them (dense)")
    layout: Literal["flat", "tiles"] = "flat"
    short_chunk: Literal["proportional", "clip"] = "proportional"
    indices: Literal["elias-fano", "enumerative"] = Field(
        "elias-fano", description="code of the chosen positions; enumerative is shorter, and slower"
    )
    quantizer: Literal["2bit", "1bit", "none"] = Field(
        "2bit",
        description="sign and one of two magnitudes; the sign alone; float32, as where the exchange is dense",
    )
    codebook: Literal["tensor", "chunk"] = Field(
        "tensor", description="magnitudes per tensor, or scaled to every chunk, which takes a byte each"
    )
    overlap: int = Field(
        0,
        ge=0,
        description="inner steps of the next round that are trained while a round is exchanged; its update "
        "is applied after just so many",
    )

    @property
    def dense(self) -> bool:
        return self.top_k == 0

    @model_validator(mode="after")
    def _top_k_fits(self) -> OuterSpec:
        if self.top_k > self.chunk:
            raise ValueError(f"top_k {self.top_k} exceeds the chunk of {self.chunk}")
        if self.layout == "tiles" and int(self.chunk**0.5) ** 2 != self.chunk:
            raise ValueError(f"layout 'tiles' needs a square chunk, not {self.chunk}")
        return self

    @model_validator(mode="after")
    def _enumeration_table_is_small(self) -> OuterSpec:
        if self.indices == "enumerative" and not self.dense:
            nbytes = 4 * self.chunk * self.top_k
            # The product alone bounds the numbers before they are made.
            if nbytes <= _MOST_TABLE_BYTES:
                nbytes *= math.comb(self.chunk, min(self.top_k, self.chunk // 2)).bit_length() // 32 + 1
            if nbytes > _MOST_TABLE_BYTES:
                raise ValueError(
                    f"indices 'enumerative' would need a table of more than {_MOST_TABLE_BYTES >> 20} MB for "
                    f"{self.top_k} of {self.chunk}: use a smaller top_k or chunk, or 'elias-fano'"
                )
        return self


class LinkSpec(_Section):
    """The link between two members of a pipeline replica."""

    k: int = Field(16, ge=0, description="subspace width at first; 0 sends activations uncompressed")
    least_k: int = Field(0, ge=0, description="narrowest that a slow link may become; 0: k stays as it is")
    most_k: int = Field(0, ge=0, description="widest that a fast link may become; 0: k stays as it is")
    dtype: Literal["bf16", "fp32", "int8", "int4"] = "bf16"

    @property
    def adapts(self) -> bool:
        """Whether k follows the measured bandwidth, between `least_k` and `most_k`."""
        return self.least_k > 0

    def token_bytes(self, width: int) -> int:
        """Bytes of `width` values of one token, one way; with their scale, without the id of the token."""
        return {
            "fp32": 4 * width,
            "bf16": 2 * width,
            "int8": width + 4,
            "int4": -(-width // 2) + 1,
        }[self.dtype]

    @model_validator(mode="after")
    def _bounds_hold_k(self) -> LinkSpec:
        if (self.least_k == 0) != (self.most_k == 0):
            raise ValueError("give both link.least_k and link.most_k, or neither")
        if self.adapts and not self.least_k <= self.k <= self.most_k:
            raise ValueError(f"link.k {self.k} is not within least_k {self.least_k} .. most_k {self.most_k}")
        return self


class SwarmSpec(_Section):
    """The shape for which the run waits before it starts."""

    stages: int = Field(2, ge=1, le=512, description="S: the layers are cut once into this many stages")
    replicas: int = Field(1, ge=0, le=10_000, description="full replicas")
    pipelines: int = Field(1, ge=0, le=10_000, description="pipeline replicas")
    members: int = Field(
        0, ge=0, le=512, description="stage peers per pipeline for which the run waits; 0: one per stage"
    )

    @model_validator(mode="after")
    def _someone_trains(self) -> SwarmSpec:
        if self.replicas + self.pipelines == 0:
            raise ValueError("a run needs at least one replica or pipeline")
        if self.pipelines and self.stages < 2:
            raise ValueError("a pipeline replica needs at least 2 stages")
        if self.members == 1 or self.members > self.stages:
            raise ValueError(f"{self.members} members cannot share {self.stages} stages: give 2 to that many")
        return self

    @property
    def chain_length(self) -> int:
        """Members of one pipeline for which the run waits before it starts."""
        return self.members or self.stages


class GroupingSpec(_Section):
    """How pipelines are formed from what peers can carry, and when that is worth a change."""

    margin: float = Field(
        0.1, ge=0, le=1, description="a regrouping must make the inner step so much shorter, as a share"
    )
    settle_rounds: int = Field(3, ge=1, description="rounds between two changes that only make it faster")
    spares: int = Field(
        0, ge=0, le=10_000, description="stage peers kept warm before another pipeline trains"
    )
    balance: bool = Field(True, description="faster replicas take more of the microbatches of a step")
    reserve: float = Field(0.1, ge=0, lt=1, description="share of a peer's memory that is not planned with")


class TimingSpec(_Section):
    """Deadlines in seconds. A deadline that passes is a normal event, never a hang."""

    heartbeat: float = Field(2.0, gt=0)
    lost_after: float = Field(15.0, gt=0, description="a peer silent for so long is gone")
    straggler: float = Field(
        1.0, gt=0, description="a round waits for the slow for this multiple of what its first replica took"
    )
    least_window: float = Field(5.0, gt=0, description="shortest such wait")
    match_window: float = Field(120.0, gt=0, description="longest such wait")
    fetch: float = Field(20.0, gt=0, description="longest time to gather the payloads of a matched group")
    decide: float = Field(40.0, gt=0, description="longest time from the matched group to the decision")
    link: float = Field(60.0, gt=0, description="to wait for one frame of a neighbour")
    outage: float = Field(86_400.0, gt=0, description="how long nodes wait for a coordinator that is away")

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


class RecoverySpec(_Section):
    """What is kept for those who come late or come back, and what a replica may do on its own."""

    checkpoint_every: int = Field(10, ge=1, description="rounds between two checkpoints of a node")
    keep_rounds: int = Field(30, ge=2, description="rounds whose committed payloads every host keeps")
    extra_steps: int = Field(
        20, ge=0, description="inner steps beyond H that a replica trains while the coordinator is away"
    )
    cold_steps: int = Field(5, ge=0, description="steps over which the rate rises where moments start anew")
    least_share: float = Field(
        0.1, gt=0, le=1, description="a replica that did less of its H steps waits for the next round"
    )

    @model_validator(mode="after")
    def _log_reaches_back(self) -> RecoverySpec:
        if self.keep_rounds < 2 * self.checkpoint_every + 2:
            raise ValueError(
                f"keep_rounds {self.keep_rounds} must be at least 2 x checkpoint_every + 2, or the payloads "
                "since the last checkpoint but one would be gone"
            )
        return self


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RunSpec(_Section):
    """The whole specification of a run. Frozen; equal hash means equal in every field."""

    protocol_version: int = PROTOCOL_VERSION
    preset: str = "tiny"
    seed: int = Field(0, ge=0, lt=2**63)
    rounds: int = Field(30, ge=1, le=10_000_000)
    initial: tuple[Digest, ...] | None = Field(
        None, max_length=512, description="of each stage before round 1, where it is not drawn from the seed"
    )
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
        if self.link.k > self.model.width:
            raise ValueError(f"link.k {self.link.k} exceeds model.width {self.model.width} (k must be <= d)")
        if self.link.most_k > self.model.width:
            raise ValueError(f"link.most_k {self.link.most_k} exceeds model.width {self.model.width}")
        if self.outer.overlap >= self.inner.steps:
            raise ValueError(
                f"outer.overlap {self.outer.overlap} must be below inner.steps {self.inner.steps}: a round's "
                "update is applied before the next payloads are made"
            )
        if self.swarm.stages > self.model.layers:
            raise ValueError(
                f"swarm.stages {self.swarm.stages} exceeds model.layers {self.model.layers}: "
                "every stage needs at least one layer"
            )
        if self.initial is not None and len(self.initial) != self.swarm.stages:
            raise ValueError(
                f"initial has the digests of {len(self.initial)} stages, and swarm.stages is "
                f"{self.swarm.stages}: import the model for that many"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_initial_where_none_is_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = handler(self)
        if tree.get("initial") is None:
            tree.pop("initial", None)
        return tree

    @property
    def canonical_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def toml(self) -> str:
        """The spec as a run file; ``resolve(file=...)`` gives an equal spec again."""
        tree = self.model_dump(mode="json")
        # JSON's scalars and arrays are TOML's as well, and a spec holds nothing else in its sections.
        lines = [f"{key} = {json.dumps(value)}" for key, value in tree.items() if not isinstance(value, dict)]
        for section, fields in tree.items():
            if isinstance(fields, dict):
                lines += ["", f"[{section}]"]
                lines += [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
        return "\n".join(lines) + "\n"

    @property
    def hash(self) -> str:
        """sha-256 (hex) of the canonical JSON."""
        return hashlib.sha256(self.canonical_json.encode()).hexdigest()

    @property
    def run_id(self) -> str:
        """Short name of the run, used in DHT keys, folders and frames."""
        return f"{self.preset}-{self.hash[:12]}"

    @property
    def total_steps(self) -> int:
        """Inner steps of the whole run; the learning-rate schedule ends here."""
        return self.rounds * self.inner.steps

    def microbatches_of(self, replica: Replica) -> int:
        """Microbatches of `replica` in one inner step."""
        return replica.microbatches or self.inner.microbatches

    def samples_per_round(self, microbatches: int = 0) -> int:
        """Samples in one round of a replica with so many microbatches in an inner step; 0: as usual."""
        return self.inner.steps * (microbatches or self.inner.microbatches) * self.inner.microbatch_size

    def layers_of(self, stage: int) -> range:
        """Layers of `stage`. The first ``layers % stages`` stages hold one layer more."""
        if not 0 <= stage < self.swarm.stages:
            raise ValueError(f"stage {stage} is outside 0..{self.swarm.stages - 1}")
        size, extra = divmod(self.model.layers, self.swarm.stages)
        first = stage * size + min(stage, extra)
        return range(first, first + size + (stage < extra))

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Parse a spec received from the coordinator or read from a run folder. Raises BAD_SPEC."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise _bad_spec(error) from None


# At the paper's sizes replicas of unlike speed are minutes apart at the end of a round.
_PAPER_TIMING = {"match_window": 1800.0, "fetch": 120.0, "decide": 300.0, "link": 300.0}
# Its table is small at 32 values of 4096, and to decode it takes less than to apply what was decoded.
_PAPER_OUTER = {"indices": "enumerative"}
_PAPER_INNER = {"steps": 50, "microbatches": 8, "microbatch_size": 4, "warmup_steps": 500}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "model": {},
        "outer": {"top_k": 128},
    },
    "nano": {
        "rounds": 3,
        "model": {"width": 32, "heads": 2, "feed_forward": 64, "context": 32},
        "inner": {"steps": 2, "microbatches": 2, "warmup_steps": 2},
        "outer": {"top_k": 128},
        "link": {"k": 8},
        "data": {"validation_batches": 1},
    },
    # The paper's models (tables 1 and 9). Its text gives 178M a learning rate of 3e-4, table 9 gives 1e-3:
    # the text is taken. Its 1B width is 2048 in table 9 and 1536 elsewhere: table 9 is taken.
    "178m": {
        "rounds": 200,
        "model": {"vocabulary": 32000, "width": 1024, "layers": 9, "heads": 8, "feed_forward": 2688,
                  "context": 2048},
        "inner": {**_PAPER_INNER, "learning_rate": 3e-4},
        "timing": _PAPER_TIMING,
        "outer": _PAPER_OUTER,
        "link": {"k": 128},
        "swarm": {"stages": 3, "replicas": 4, "pipelines": 4},
    },
    "512m": {
        "rounds": 200,
        "model": {"vocabulary": 32000, "width": 1536, "layers": 12, "heads": 12, "feed_forward": 3904,
                  "context": 2048},
        "inner": {**_PAPER_INNER, "learning_rate": 1e-3},
        "timing": _PAPER_TIMING,
        "outer": _PAPER_OUTER,
        "link": {"k": 192},
        "swarm": {"stages": 4, "replicas": 4, "pipelines": 4},
    },
    "1b": {
        "rounds": 200,
        "model": {"vocabulary": 32000, "width": 2048, "layers": 16, "heads": 8, "feed_forward": 8192,
                  "context": 1024},
        "inner": {**_PAPER_INNER, "learning_rate": 1e-3},
        "timing": _PAPER_TIMING,
        "outer": _PAPER_OUTER,
        "link": {"k": 256},
        "swarm": {"stages": 4, "replicas": 4, "pipelines": 4},
    },
    # Of the paper's 70B only the size and the 4 stages are known. With as many key as query heads, which is
    # all that the model has, these dimensions make 78B parameters.
    "70b": {
        "rounds": 200,
        "model": {"vocabulary": 32000, "width": 8192, "layers": 80, "heads": 64, "feed_forward": 28672,
                  "context": 2048},
        "inner": {**_PAPER_INNER, "microbatches": 128, "microbatch_size": 1, "learning_rate": 1.5e-4},
        "timing": {**_PAPER_TIMING, "fetch": 1800.0, "decide": 3600.0},
        "outer": _PAPER_OUTER,
        "link": {"k": 1024},
        "swarm": {"stages": 4, "replicas": 2, "pipelines": 2},
    },
}  # fmt: skip


def resolve(
    preset: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RunSpec:
    """Build the spec of a run: preset, then the TOML run file, then overrides; later ones win field by field.

    Args:
        preset: a name in PRESETS; None takes the file's ``preset``, or "tiny".
        file: TOML with the same sections as RunSpec.
        overrides: dotted keys, such as ``{"link.k": 8, "rounds": 5}``; None values are skipped.

    Raises:
        HetnodeError: UNKNOWN_PRESET, or BAD_SPEC with every offending field named.
    """
    from_file = _read_toml(file) if file is not None else {}
    named_in_file = from_file.pop("preset", None)
    name = preset or named_in_file or "tiny"
    if not isinstance(name, str) or name not in PRESETS:
        raise HetnodeError(
            ErrorCode.UNKNOWN_PRESET,
            f"There is no preset '{name}'.",
            f"Use one of: {', '.join(sorted(PRESETS))}.",
        )
    tree = _merge(_merge({"preset": name}, PRESETS[name]), from_file)
    for key, value in (overrides or {}).items():
        if value is not None:
            *path, leaf = key.split(".")
            branch: dict[str, Any] = {leaf: value}
            for part in reversed(path):
                branch = {part: branch}
            tree = _merge(tree, branch)
    try:
        return RunSpec.model_validate(tree)
    except ValidationError as error:
        raise _bad_spec(error) from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
        for name, field in RunSpec.model_fields.items():
            if isinstance(field.default, _Section) and not isinstance(tree.get(name, {}), dict):
                raise ValueError(f"'{name}' must be a section, [{name}]")
        return tree
    except (OSError, ValueError) as error:
        raise HetnodeError(
            ErrorCode.BAD_SPEC,
            f"The run file {file} cannot be read: {error}.",
            "Give a TOML file with the sections that 'hetnode spec show' prints.",
        ) from None


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _bad_spec(error: ValidationError) -> HetnodeError:
    problems = []
    for item in error.errors(include_url=False, include_input=True):
        where = ".".join(map(str, item["loc"])) or "spec"
        message = str(item["msg"]).removeprefix("Value error, ")
        shown = "" if item["type"] == "value_error" else f" (got {item['input']!r:.80})"
        problems.append(f"{where}: {message}{shown}")
    return HetnodeError(
        ErrorCode.BAD_SPEC,
        f"The run specification is not valid: {'; '.join(problems)}.",
        "Change the option or the run file; 'hetnode spec show PRESET' prints a valid one.",
    )
