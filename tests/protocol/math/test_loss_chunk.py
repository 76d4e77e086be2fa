"""The size of a chunk of the loss."""

from __future__ import annotations

import pytest

from protocol.math.loss_chunk import chunk_rows


@pytest.mark.parametrize(("on_cpu", "rows"), [(True, 524), (False, 4194)])
def test_a_chunk_is_chosen_by_bytes_and_never_smaller_than_the_head(on_cpu: bool, rows: int) -> None:
    assert chunk_rows(32_000, 256, on_cpu) == rows
    assert chunk_rows(128_000, 8192, on_cpu) == 8192
