"""Samples of several sources in turns: which source, and which of its samples, an ordinal of the run is.

With weights w of the sources and W their sum, every W samples that follow each other have w of each source,
spread as evenly as turns of shards (node/data/streamed.py). Each source counts its own samples, also where
the mixture changes: none of its samples is left out, or comes twice in a pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from node.data.streamed import Ordinals, Samples, Split, order_of
from protocol.spec.data import DataSource, DataSpec, listed


class Mixture:
    """The samples of `splits`, with `weights`, from sample `first` of the run on.

    Args:
        begins: of each split, how many of its samples came before.
    """

    def __init__(
        self, splits: Sequence[Split], weights: Sequence[int], seed: int, first: int, begins: Sequence[int]
    ) -> None:
        self._splits, self._weights, self._seed = splits, tuple(weights), seed
        self._first, self._begins = first, begins

    def read(self, ordinals: Ordinals) -> Samples:
        places = [place_of(each - self._first, self._weights, self._seed) for each in ordinals]
        found: list[tuple[list[int], Samples]] = []
        for index, split in enumerate(self._splits):
            rows = [row for row, (source, _) in enumerate(places) if source == index]
            if rows:
                begin = self._begins[index]
                found.append((rows, split.read([begin + places[row][1] for row in rows])))
        if not found:
            return self._splits[0].read(ordinals)
        samples = np.empty((len(places), found[0][1].shape[1]), dtype=np.int32)
        for rows, read in found:
            samples[rows] = read
        return samples


def mixed(splits: Sequence[Split], sources: Sequence[DataSource], seed: int, data: DataSpec | None) -> Split:
    """The training samples of a run, or with `data` None those of a mixture that never changes."""
    first, begins = begun(sources, data, seed) if data else (0, [0] * len(sources))
    if len(splits) == 1 and begins == [first]:
        return splits[0]
    return Mixture(splits, [each.weight for each in sources], seed, first, begins)


def begun(sources: Sequence[DataSource], data: DataSpec, seed: int) -> tuple[int, list[int]]:
    """The first sample of the run with this data, and how many samples each of `sources` gave before."""
    first, before = 0, dict.fromkeys((each.source for each in sources), 0)
    for phase in data.past or ():
        parts = listed(phase.source)
        counts = counts_until(phase.samples, tuple(each.weight for each in parts), seed)
        for part, count in zip(parts, counts, strict=True):
            if part.source in before:
                before[part.source] += count
        first += phase.samples
    return first, [before[each.source] for each in sources]


def place_of(position: int, weights: tuple[int, ...], seed: int) -> tuple[int, int]:
    """The source of a sample, and the ordinal of the sample in it; both count from the begin of a mixture."""
    number, at = divmod(position, sum(weights))
    source, rank = _block(weights, seed, number)[at]
    return source, number * weights[source] + rank


def counts_until(position: int, weights: tuple[int, ...], seed: int) -> list[int]:
    """The samples of each source among the first `position` of a mixture."""
    number, at = divmod(position, sum(weights))
    block = [source for source, _ in _block(weights, seed, number)[:at]]
    return [number * weight + block.count(source) for source, weight in enumerate(weights)]


@lru_cache(maxsize=16)
def _block(weights: tuple[int, ...], seed: int, number: int) -> Sequence[tuple[int, int]]:
    return order_of(weights, seed, number)
