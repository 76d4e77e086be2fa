"""Snapshots of the token embedding, from which links may derive T_perp instead of TE of the last round.

Every n-th round has a snapshot: TE after that round, as bfloat16. It becomes active :data:`LAG` rounds later,
so that members without stage 0 can fetch it during a whole inner phase. Rounds count from 1; the snapshot of
round 0 is that of the initial TE, which every member makes itself.

Which snapshot is active depends on the round's number alone. An aborted round is one like any other: TE after
it is TE before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAG = 1
"""Whole inner phases between the commit of a snapshot's round and the first one that uses the snapshot."""

BYTES_PER_VALUE = 2


def active_snapshot(round_number: int, every: int) -> int:
    """The round whose snapshot all links use in the inner phase of `round_number`; `every` is n."""
    return max(0, round_number - 1 - LAG) // every * every


def snapshot(table_vd: Tensor) -> Tensor:
    """TE as a snapshot carries it, bfloat16 [V, d]: the same bits from the same committed TE everywhere."""
    return table_vd.detach().to(torch.bfloat16)
