"""The section of a run specification about links: how wide they are, and what they send."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from protocol.spec.quantizers import LINK_QUANTIZERS
from protocol.spec.sections import Section, one_of

UNCOMPRESSED = 0
"""k of a link that sends all d values of each token, without a projection."""


class LinkSpec(Section):
    """The link between two members of a pipeline replica."""

    optional = frozenset({"uncompressed", "gradient_dtype", "embedding_every", "table", "table_rows"})

    k: int = Field(16, ge=0, description="subspace width at first; 0 sends activations uncompressed")
    least_k: int = Field(0, ge=0, description="smallest k of a slow link; 0: k is fixed")
    most_k: int = Field(0, ge=0, description="largest k of a fast link; 0: k is fixed")
    uncompressed: bool = Field(
        False, description="a link that carries more than most_k may send activations uncompressed"
    )
    dtype: Annotated[str, one_of(LINK_QUANTIZERS)] = Field("bf16", description="number format of activations")
    gradient_dtype: Annotated[str, one_of(LINK_QUANTIZERS, or_empty=True)] = Field(
        "", description="number format of gradients; empty: that of activations"
    )
    embedding_every: int = Field(
        0, ge=0, description="rounds between snapshots of the embedding for links; 0: that of the last round"
    )
    table: bool = Field(
        False,
        description="the receiving end of a link that compresses adds a token table, which it trains for its "
        "replica alone",
    )
    table_rows: int = Field(0, ge=0, description="of this table, which tokens share; 0: one for each token")

    @property
    def adapts(self) -> bool:
        """Whether k follows the measured bandwidth, as far as `possible_ks` go."""
        return self.least_k > 0

    @property
    def possible_ks(self) -> tuple[int, ...]:
        """Every k that a plan may choose, from the narrowest to the widest link; `k` alone if it is fixed.

        They are `least_k`, twice that, and so on up to `most_k`, and then UNCOMPRESSED if that is allowed.
        """
        if not self.adapts:
            return (self.k,)
        ks = [self.least_k]
        while 2 * ks[-1] <= self.most_k:
            ks.append(2 * ks[-1])
        if ks[-1] != self.most_k:
            ks.append(self.most_k)
        return (*ks, UNCOMPRESSED) if self.uncompressed else tuple(ks)

    @property
    def may_compress(self) -> bool:
        """Whether a plan may have a link that projects activations."""
        return self.possible_ks != (UNCOMPRESSED,)

    @property
    def dtype_of_gradients(self) -> str:
        """The number format in which gradients travel, never empty."""
        return self.gradient_dtype or self.dtype

    def token_bytes(self, width: int) -> tuple[int, int]:
        """Bytes of `width` values of one token, as an activation and as a gradient.

        With their scale, without the token id.
        """
        forward, backward = (LINK_QUANTIZERS[each] for each in (self.dtype, self.dtype_of_gradients))
        return forward.token_bytes(width), backward.token_bytes(width)

    @model_validator(mode="after")
    def _tables_are_of_use(self) -> LinkSpec:
        if self.table_rows and not self.table:
            raise ValueError("link.table_rows is for link.table, and there is none")
        if self.table and not self.may_compress:
            raise ValueError("link.table gives back what links lose, and with link.k 0 they lose nothing")
        return self

    @model_validator(mode="after")
    def _bounds_hold_k(self) -> LinkSpec:
        if (self.least_k == 0) != (self.most_k == 0):
            raise ValueError("give both link.least_k and link.most_k, or neither")
        if self.uncompressed and not self.adapts:
            raise ValueError(
                "link.uncompressed is the widest choice where k adapts, so it needs link.least_k and "
                "link.most_k; link.k = 0 alone makes every link uncompressed"
            )
        if self.least_k > self.most_k:
            raise ValueError(f"link.least_k {self.least_k} exceeds link.most_k {self.most_k}")
        if self.adapts and self.k == UNCOMPRESSED and not self.uncompressed:
            raise ValueError("link.k 0 is an uncompressed link: where k adapts, it needs link.uncompressed")
        if self.adapts and self.k != UNCOMPRESSED and not self.least_k <= self.k <= self.most_k:
            raise ValueError(
                f"link.k {self.k} is not within link.least_k {self.least_k} .. link.most_k {self.most_k}"
            )
        return self


def width_order(k: int) -> float:
    """A number that is larger the more of an activation a link carries: UNCOMPRESSED has the largest."""
    return k or float("inf")
