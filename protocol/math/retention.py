"""Which anchors a node keeps on its disk beyond its newest checkpoints, so that a run can be rolled back.

They are spaced geometrically: the further back, the fewer. The rule needs the newest round alone, so the
coordinator knows which anchors to expect.
"""

from __future__ import annotations

LEVELS = 5
"""The oldest anchor that is kept is between 2**LEVELS and 2 * 2**LEVELS checkpoints old."""


def is_kept(round_number: int, newest: int, every: int) -> bool:
    """Whether the anchor after `round_number` is kept where the newest checkpoint is that of `newest`.

    Of all checkpoints, written every `every` rounds, those are kept whose index is among the two newest
    multiples of some power of two up to 2**LEVELS: at most LEVELS + 2. An anchor that is not kept now is not
    kept later either. Round 0 needs no file.
    """
    if round_number % every or not 0 < round_number <= newest:
        return False
    index, last = round_number // every, newest // every
    return any(
        index % step == 0 and index > (last // step - 2) * step
        for step in (1 << level for level in range(LEVELS + 1))
    )
