"""Rows of strictly increasing indices, for tests of index codes."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def rows(draw: st.DrawFn, most: int = 300) -> tuple[int, int, list[list[int]]]:
    """A size, a k, and up to 12 rows of k indices, often at the borders."""
    size = draw(st.integers(1, most))
    k = draw(st.integers(1, size))
    row = st.one_of(
        st.permutations(range(size)).map(lambda order: sorted(order[:k])),
        st.integers(0, size - k).map(lambda first: list(range(first, first + k))),
        st.just([*range(k - 1), size - 1]),
    )
    return size, k, draw(st.lists(row, min_size=1, max_size=12))
