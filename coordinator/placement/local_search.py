"""Local search: all placements use this search, with the moves and the objective as parameters.

The solution is a set of chains, each with the seconds of its inner step. A move replaces some of the chains.
The search takes the slowest chain, tries the moves that change it, and makes one that lowers the objective of
the chains in the move. It ends when no move helps.

Three searches use it: for the cuts of the stages of one chain (coordinator.placement.chain_search), for the
chains of a run that starts (coordinator.placement.initial_chains), and for exchanges of members between
rounds (coordinator.placement.member_exchange). Each bounds its own effort: it offers no more moves when its
budget is spent.
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


@dataclass(frozen=True)
class Objective:
    """What a search minimises.

    Attributes:
        cost: of chains that take these seconds.
        only_slowest: whether to end as soon as the slowest chain cannot be improved.
    """

    cost: Callable[[Sequence[float]], float]
    only_slowest: bool


def _harmonic_mean(seconds: Sequence[float]) -> float:
    return len(seconds) / sum(1 / each for each in seconds)


SLOWEST_CHAIN = Objective(max, only_slowest=True)
"""All chains do the same work, so the slowest one determines the step."""
SHARED_WORK = Objective(_harmonic_mean, only_slowest=False)
"""Chains share the work by speed, so all of them need the harmonic mean of what they would need alone."""


def improve(
    chains: dict[int, ChainT],
    moves: Callable[[int], Iterable[Move[ChainT]]],
    objective: Objective = SLOWEST_CHAIN,
    margin: float = 0.0,
    compared: int | None = 1,
) -> list[Move[ChainT]]:
    """Change `chains` in place by moves until none helps. Returns the moves that were made, in order.

    Args:
        chains: by index.
        moves: offers the moves that change the chain of an index, given the present `chains`.
        margin: a move must lower the objective of the chains that it touches by this share.
        compared: the best of this many helpful moves is made; None compares all.
    """
    made = list[Move[ChainT]]()
    waiting = set(chains)  # chains whose moves were not tried since they changed
    while waiting:
        # The slowest first; the index decides ties, so that the result does not depend on an order.
        index = min(waiting, key=lambda each: (-chains[each].seconds, each))
        waiting.remove(index)
        best = _best_move(chains, moves(index), objective, margin, compared)
        if best is not None:
            chains.update(best.chains)
            waiting.update(best.chains)
            made.append(best)
        elif objective.only_slowest:
            break  # a faster other chain would not shorten the step
    return made


def _best_move(
    chains: Mapping[int, ChainT],
    moves: Iterable[Move[ChainT]],
    objective: Objective,
    margin: float,
    compared: int | None,
) -> Move[ChainT] | None:
    best, best_ratio, helpful = None, 1 - margin, 0
    for move in moves:
        # By ratio, so that moves of chains with unlike seconds can be compared.
        before = objective.cost([chains[index].seconds for index in move.chains])
        after = objective.cost([chain.seconds for chain in move.chains.values()])
        if after < before * best_ratio:
            best, best_ratio, helpful = move, after / before, helpful + 1
            if helpful == compared:
                break
    return best
