"""Local search with the moves and the objective as parameters.

The solution is a set of chains, each with the seconds of its inner step. A move replaces some of the chains.
The search takes the slowest chain, tries the moves that change it, and makes one that lowers the objective of
the chains in the move. It ends when no move helps.

Two searches use it: for the chains of a run that starts (coordinator.placement.initial_chains), and for
exchanges of members between rounds (coordinator.placement.member_exchange). Each bounds its own effort: it
offers no more moves when its budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """A chain of any kind."""

    @property
    def seconds(self) -> float:
        """Of its inner step; infinite where the chain is not possible."""
        ...


ChainT = TypeVar("ChainT", bound=Timed)


@dataclass(frozen=True)
class Move(Generic[ChainT]):
    """The chains that a move replaces, by index, and what it does, for messages."""

    chains: Mapping[int, ChainT]
    description: str = ""


def slowest(seconds: Sequence[float]) -> float:
    """The objective where all chains do the same work: the slowest one determines the step."""
    return max(seconds)


def harmonic_mean(seconds: Sequence[float]) -> float:
    """The objective where chains share the work by speed: all need the mean of what they would need alone."""
    return len(seconds) / sum(1 / each for each in seconds)


def improve(
    chains: dict[int, ChainT],
    moves: Callable[[int], Iterable[Move[ChainT]]],
    objective: Callable[[Sequence[float]], float] = slowest,
    margin: float = 0.0,
    takes_first: bool = True,
) -> list[Move[ChainT]]:
    """Change `chains` in place by moves until none helps. Returns the moves that were made, in order.

    Args:
        chains: by index.
        moves: offers the moves that change the chain of an index, given the present `chains`.
        margin: a move must lower the objective of the chains that it touches by this share.
        takes_first: whether to make the first move that helps, or the best of all.
    """
    made = list[Move[ChainT]]()
    waiting = set(chains)  # chains whose moves were not tried since they changed
    while waiting:
        # The slowest first; the index decides ties, so that the result does not depend on an order.
        index = min(waiting, key=lambda each: (-chains[each].seconds, each))
        waiting.remove(index)
        best, best_ratio = None, 1 - margin
        for move in moves(index):
            # By ratio, so that moves of chains with unlike seconds can be compared.
            before = objective([chains[each].seconds for each in move.chains])
            after = objective([chain.seconds for chain in move.chains.values()])
            if after < before * best_ratio:
                best, best_ratio = move, after / before
                if takes_first:
                    break
        if best is not None:
            chains.update(best.chains)
            waiting.update(best.chains)
            made.append(best)
        elif objective is slowest:
            break  # a faster other chain would not shorten the step
    return made
