"""Snapshots of the token embedding, from which links may derive T_perp instead of TE of the last round.

Every n-th round has a snapshot: TE after that round, as bfloat16. It becomes active :data:`LAG` rounds later,
so that members without stage 0 can fetch it during a whole inner phase. Rounds count from 1; the snapshot of
round 0 is that of the initial TE, which every member makes itself.

Which snapshot is active depends on the round's number and on the rollbacks before it alone. An aborted round
is one like any other: TE after it is TE before it. A rollback makes its own round a snapshot round, active at
once: earlier snapshots may be of a TE that the rollback discards. Members restore their anchors before they
train on, so that a fetch fits there.
"""

from __future__ import annotations

from collections.abc import Collection

LAG = 1
"""Whole inner phases between the commit of a snapshot's round and the first one that uses the snapshot."""

BYTES_PER_VALUE = 2


def is_snapshot_round(round_number: int, every: int, rollbacks: Collection[int] = ()) -> bool:
    """Whether peers have to fetch the snapshot of this round from each other, if any round needs it."""
    return round_number > 0 and (round_number % every == 0 or round_number in rollbacks)


def active_snapshot(round_number: int, every: int, rollbacks: Collection[int] = ()) -> int:
    """The round whose snapshot all links use in the inner phase of `round_number`.

    Args:
        round_number: from 1.
        every: n, at least 1.
        rollbacks: the rounds that were aborted to restore a former round; those from `round_number` on have
            no effect.
    """
    regular = max(0, round_number - 1 - LAG) // every * every
    return max((each for each in rollbacks if regular < each < round_number), default=regular)


def needed_snapshots(round_number: int, every: int, rollbacks: Collection[int] = ()) -> tuple[int, ...]:
    """The rounds whose snapshots `round_number` or a later round uses, of those before it; in order.

    The first is the active one. A checkpoint after round `round_number` - 1 has to hold all of them.
    """
    active = active_snapshot(round_number, every, rollbacks)
    following = (active // every + 1) * every
    return (active, *range(following, round_number, every))
