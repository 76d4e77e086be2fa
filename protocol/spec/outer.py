"""The outer round in the run specification: what replicas exchange, and how the anchor moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from protocol.spec.quantizers import INDEX_CODES, PAYLOAD_QUANTIZERS
from protocol.spec.sections import Section, one_of

_MOST_TABLE_BYTES = 64 << 20
"""For the binomials of the enumerative code, in the memory of every member."""
OUTER_OPTIMIZERS: Mapping[str, tuple[str, ...]] = {"sgd": (), "nesterov": ("momentum",)}
"""By the name in ``outer.optimizer``: the state of a parameter, in tensors of its shape, 0 before round 1."""
_NESTEROV = {"momentum": 0.9, "learning_rate": 0.7}
"""DiLoCo's values (arXiv 2311.08105), where a run file with ``optimizer = "nesterov"`` does not give them."""


class OuterSpec(Section):
    """SparseLoCo (algorithm.md, eqs 1 and 2) and its codec."""

    optional = frozenset({"optimizer", "momentum", "turns", "exchange", "reduced_top_k", "merge"})

    optimizer: Annotated[str, one_of(OUTER_OPTIMIZERS)] = Field(
        "sgd", description="moves the anchor along the aggregated pseudo-gradient"
    )
    momentum: float | None = Field(None, ge=0.01, lt=1, description="of nesterov; None: sgd has none")
    learning_rate: float = Field(1.0, gt=0, description="eta; acts exactly once")
    error_decay: float = Field(0.95, ge=0, le=1, description="beta of the error feedback")
    clip: float = Field(
        1.0,
        ge=1,
        le=8,
        description="a payload counts with at most this many times the median norm of its round, once that "
        "has three",
    )
    chunk: int = Field(4096, ge=1, le=65536)
    top_k: int = Field(32, ge=0, description="values sent per full chunk; 0 sends all of them (dense)")
    indices: Annotated[str, one_of(INDEX_CODES)] = Field(
        "elias-fano", description="code of the chosen positions; enumerative is shorter, and slower"
    )
    quantizer: Annotated[str, one_of(PAYLOAD_QUANTIZERS)] = Field(
        "2bit", description="sign and one of two magnitudes; the sign alone; float32, as in a dense exchange"
    )
    merge: Literal["mean", "radial"] = Field(
        "mean", description="of the payloads; radial: lengthened to the mean of their norms, tensor by tensor"
    )
    overlap: int = Field(
        0,
        ge=0,
        description="inner steps of the next round that are trained while a round is exchanged, from an "
        "estimate of its update, which is applied after exactly this many; 0: none",
    )
    turns: int = Field(
        1,
        ge=1,
        le=2,  # more lose more than they hide (docs/findings.md), and deadlines allow for two
        description="2: a round that overlaps exchanges every second stage, in turn, and the last round all; "
        "the other stages keep their progress until they are due",
    )
    exchange: Literal["gathered", "reduced"] = Field(
        "gathered",
        description="replicas gather all payloads of a stage; or each reduces a part of the stage for all",
    )
    reduced_top_k: int | None = Field(
        None, ge=0, description="values per full chunk of a reduced result; 0: all of them; None: 4 top_k"
    )

    @property
    def dense(self) -> bool:
        return self.top_k == 0

    @property
    def value_quantizer(self) -> str:
        """Name of the quantizer of the values sent."""
        return "none" if self.dense else self.quantizer

    @property
    def of_result(self) -> OuterSpec:
        """The codec of the results that reducers send; of exchange "reduced"."""
        # A sum of many replicas has more large values than one payload (docs/protocol/reduction.md).
        usual = min(4 * self.top_k, self.chunk)
        top_k = usual if self.reduced_top_k is None else self.reduced_top_k
        return self.model_copy(update={"top_k": top_k, "exchange": "gathered", "reduced_top_k": None})

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the tensors of state that the optimizer keeps for each parameter."""
        return OUTER_OPTIMIZERS[self.optimizer]

    @model_validator(mode="before")
    @classmethod
    def _fill_in_nesterov(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and tree.get("optimizer") == "nesterov":
            return {**_NESTEROV, **{key: value for key, value in tree.items() if value is not None}}
        return tree

    @model_validator(mode="after")
    def _reduction_is_possible(self) -> OuterSpec:
        if self.exchange == "gathered":
            if self.reduced_top_k is not None:
                raise ValueError("reduced_top_k is for exchange 'reduced', and exchange is 'gathered'")
            return self
        if self.merge == "radial":
            raise ValueError("merge 'radial' needs norms of whole tensors; reducers see parts: use 'mean'")
        if self.turns > 1:
            raise ValueError(
                "exchange 'reduced' needs turns 1, since reducers keep sums of every round, and turns is "
                f"{self.turns}"
            )
        # The limits of top_k hold for results, too. model_copy has not checked them.
        OuterSpec.model_validate(dict(self.of_result))
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> OuterSpec:
        if self.optimizer != "nesterov" and self.momentum is not None:
            raise ValueError(f"momentum is for optimizer 'nesterov'; optimizer '{self.optimizer}' has none")
        if self.turns > 1 and not self.overlap:
            raise ValueError("turns halve what an overlap must hide, and overlap is 0")
        if self.top_k > self.chunk:
            raise ValueError(f"top_k {self.top_k} exceeds the chunk of {self.chunk}")
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
