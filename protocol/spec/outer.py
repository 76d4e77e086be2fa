"""The outer round in the run specification: what replicas exchange, and how the anchor moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from protocol.spec.quantizers import PAYLOAD_QUANTIZERS
from protocol.spec.sections import Section, one_of

PayloadQuantizerName = Annotated[str, one_of(PAYLOAD_QUANTIZERS)]

_MOST_TABLE_BYTES = 64 << 20
"""For the binomials of the enumerative code, in the memory of every member."""


_BITS = {"2bit": 2, "1bit": 1, "none": 32}
"""Of a value, by quantizer."""


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
    selection: Literal["largest", "random"] = Field(
        "largest",
        description="which values of a chunk are sent: the largest, with their positions; or those at random "
        "positions that all replicas derive from the seed of the run, the same for all in a round",
    )
    dense_every: int = Field(
        0, ge=0, description="in every so-many-th round replicas send all values of each chunk; 0: never"
    )
    dense_quantizer: PayloadQuantizerName | None = Field(
        None,
        description="of dense rounds; None: as in the other rounds, and float32 where top_k is 0",
    )
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
    weighting: Literal["assigned", "robust"] = Field(
        "assigned",
        description="a payload has its weight of the plan; or less, the further it is from the others",
    )
    overlap: int = Field(
        0,
        ge=0,
        description="inner steps of the next round that are trained while a round is exchanged; its update "
        "is applied after exactly this many",
    )
    eager: bool = Field(
        False,
        description="steps that overlap start from an estimate of the update, that of the replica's own "
        "payload, which the update replaces",
    )
    turns: int = Field(
        1,
        ge=1,
        le=2,  # more lose more than they hide (docs/findings.md), and deadlines allow for two
        description="2: a round exchanges every second stage, in turn, and the last round all; the other "
        "stages keep their progress until they are due",
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
    def is_masked(self) -> bool:
        """Whether a payload has the values at random positions (protocol.algorithm.random_mask)."""
        return self.selection == "random" and not self.dense

    def is_dense_in(self, round_number: int) -> bool:
        """Whether :attr:`dense_every` makes this round a dense one."""
        return self.dense_every > 0 and round_number % self.dense_every == 0

    def of_round(self, round_number: int) -> OuterSpec:
        """The codec of the payloads of one round: a dense round sends all values."""
        if not self.is_dense_in(round_number):
            return self
        return self.model_copy(update={"top_k": 0, "dense_quantizer": self.dense_quantizer or self.quantizer})

    @property
    def value_quantizer(self) -> str:
        """Name of the quantizer of the values sent, for the codec of one round."""
        return (self.dense_quantizer or "none") if self.dense else self.quantizer

    @property
    def bits_per_parameter(self) -> float:
        """About the bits of a payload for each parameter, positions included; mean over all rounds."""
        if not self.dense_every:
            return _bits(self)
        dense_share = 1 / self.dense_every
        return (1 - dense_share) * _bits(self) + dense_share * self.most_bits_per_parameter

    @property
    def most_bits_per_parameter(self) -> float:
        """The same in the rounds with the longest payloads."""
        return _bits(self.of_round(self.dense_every))

    @property
    def can_be_reduced(self) -> bool:
        """Whether exchange "reduced" is possible with all other fields as they are."""
        varies = self.dense_every or self.dense_quantizer
        sends_sums = self.selection == "largest" and self.weighting == "assigned"
        return self.layout == "flat" and sends_sums and not varies and self.turns == 1

    @property
    def of_result(self) -> OuterSpec:
        """The codec of the results that reducers send; of exchange "reduced"."""
        # A sum of many replicas has more large values than one payload (docs/protocol/reduction.md).
        usual = min(4 * self.top_k, self.chunk)
        top_k = usual if self.reduced_top_k is None else self.reduced_top_k
        return self.model_copy(update={"top_k": top_k, "exchange": "gathered", "reduced_top_k": None})

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
    def _omit_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Specifications from before these fields existed keep their JSON and their hash."""
        tree: dict[str, Any] = handler(self)
        if self.optimizer == "sgd":
            tree.pop("optimizer", None)
            tree.pop("momentum", None)
        if not self.eager:
            tree.pop("eager", None)
        if self.exchange == "gathered":
            tree.pop("exchange", None)
        if self.reduced_top_k is None:
            tree.pop("reduced_top_k", None)
        if self.weighting == "assigned":
            tree.pop("weighting", None)
        if self.selection == "largest":
            tree.pop("selection", None)
        if not self.dense_every:
            tree.pop("dense_every", None)
        if self.dense_quantizer is None:
            tree.pop("dense_quantizer", None)
        if self.turns == 1:
            tree.pop("turns", None)
        return tree

    @model_validator(mode="after")
    def _reduction_is_possible(self) -> OuterSpec:
        if self.exchange == "gathered":
            if self.reduced_top_k is not None:
                raise ValueError("reduced_top_k is for exchange 'reduced', and exchange is 'gathered'")
            return self
        if self.weighting == "robust":
            raise ValueError(
                "weighting 'robust' needs exchange 'gathered': the distance of a payload is over its whole "
                "stage, and a reducer sees one part"
            )
        if not self.can_be_reduced:
            raise ValueError(
                "exchange 'reduced' needs layout 'flat' (reducers take runs of elements), selection "
                "'largest' (they send the largest sums), turns 1 (reducers keep sums of every round), and no "
                "dense_every and dense_quantizer"
            )
        # The limits of top_k hold for results, too. model_copy has not checked them.
        OuterSpec.model_validate(dict(self.of_result))
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> OuterSpec:
        if self.optimizer == "sgd" and self.momentum is not None:
            raise ValueError("momentum is for optimizer 'nesterov'; optimizer 'sgd' has none")
        if self.eager and not self.overlap:
            raise ValueError("eager is for steps that overlap, and overlap is 0")
        if self.top_k > self.chunk:
            raise ValueError(f"top_k {self.top_k} exceeds the chunk of {self.chunk}")
        if self.layout == "tiles" and int(self.chunk**0.5) ** 2 != self.chunk:
            raise ValueError(f"layout 'tiles' needs a square chunk, not {self.chunk}")
        return self

    @model_validator(mode="after")
    def _rounds_differ(self) -> OuterSpec:
        if self.dense and self.dense_every:
            raise ValueError("top_k 0 makes every round dense: leave out dense_every, or set top_k")
        if self.dense and self.selection == "random":
            raise ValueError("selection 'random' needs a top_k; 0 sends all values")
        if self.turns > 1 and self.selection == "random":
            raise ValueError(
                "turns leave out rounds of a stage, and with them positions of selection 'random'"
            )
        if self.dense_every and math.gcd(self.turns, self.dense_every) > 1:
            raise ValueError(
                f"with turns {self.turns} some stages have no turn in a dense round: choose a dense_every "
                f"without a common divisor, not {self.dense_every}"
            )
        if self.dense_quantizer and not (self.dense or self.dense_every):
            raise ValueError("dense_quantizer is for dense rounds: set dense_every, or top_k 0")
        return self

    @model_validator(mode="after")
    def _enumeration_table_is_small(self) -> OuterSpec:
        if self.indices == "enumerative" and not self.dense and not self.is_masked:
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


def _bits(outer: OuterSpec) -> float:
    """About the bits for each parameter in a round with this codec."""
    if outer.dense:
        return _BITS[outer.value_quantizer]
    share = outer.top_k / outer.chunk
    positions = 0.0 if outer.is_masked else 2 - math.log2(share)
    return share * (_BITS[outer.value_quantizer] + positions)
