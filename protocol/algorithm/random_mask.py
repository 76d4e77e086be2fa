"""Random masks: the positions whose values all replicas send in a round, which no payload has to tell.

Random-mask sparsification with error feedback, beside the largest values of protocol.algorithm.topk. Every
member derives the positions from the seed of the run, the round, and the name of the tensor, so a payload has
values only, and the values of all replicas meet at the same positions.

**In cycles, not independently.** Rounds are counted in cycles of ceil(n / k), each with a random order P of
the n positions of a chunk. A round takes the next k of P, the last one of a cycle also the first of P again.
So every position is sent at least once in a cycle: error feedback waits for two cycles at most, while with
independent draws one position in seven would wait longer than that.

**One order for all chunks.** Chunk c takes the positions (P + r_c) mod n with a random rotation r_c, so that
few bytes are hashed however large the model is. The mask is unbiased all the same: P is a uniform order, so
each position of each chunk has the probability k / n in each round. Only the masks of two chunks depend on
each other, which matters nowhere, because no arithmetic joins their elements at equal positions; the rotation
keeps one order from hitting the same columns of a matrix in all of its rows.

The numbers are those of SHAKE-128, which are the same on every machine and in every version of a library.

Shapes: n elements of a chunk, k of them sent, c chunks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray


@dataclass(frozen=True)
class RoundMask:
    """The mask of all tensors in `round_number`, which counts from 1, of a run with this seed."""

    seed: int
    round_number: int

    def of_tensor(self, name: str) -> TensorMask:
        return TensorMask(self, name)


@dataclass(frozen=True)
class TensorMask:
    """The mask of the tensor `name` in one round."""

    of_round: RoundMask
    name: str

    def rotations(self, count: int) -> NDArray[np.int64]:
        """[c]: the rotation of each of the `count` chunks of the tensor, below 2^32; of the whole run."""
        return _numbers(f"rotation {self.of_round.seed} {self.name}", count, 4).astype(np.int64)

    def positions(self, size: int, k: int, rotations_c: NDArray[np.int64]) -> NDArray[np.int64]:
        """[c, k]: the positions, ascending, in chunks of `size` elements with these rotations."""
        cycle, turn = divmod(self.of_round.round_number - 1, -(-size // k))
        order = _order(self.of_round.seed, size, cycle)
        sorted_k = np.sort(order[(turn * k + np.arange(k)) % size])
        # Rotated, k consecutive ones of these are those from 0 on, in their order.
        twice = np.concatenate((sorted_k - size, sorted_k))
        rotations_c = rotations_c % size
        positions_ck: NDArray[np.int64] = sliding_window_view(twice, k)[np.searchsorted(twice, -rotations_c)]
        positions_ck += rotations_c[:, None]
        return positions_ck


@lru_cache(maxsize=16)
def _order(seed: int, size: int, cycle: int) -> NDArray[np.int64]:
    """The order [n] of one cycle: the positions, sorted by a random number of each."""
    return np.argsort(_numbers(f"order {seed} {size} {cycle}", size, 8), kind="stable")


def _numbers(purpose: str, count: int, width: int) -> NDArray[np.unsignedinteger]:
    """`count` random integers of `width` bytes."""
    raw = hashlib.shake_128(f"hetnode mask {purpose}".encode()).digest(count * width)
    return np.frombuffer(raw, f"<u{width}")
