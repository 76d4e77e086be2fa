"""Codes of indices, against oracles in plain integers."""

from __future__ import annotations

import math
from pkgutil import resolve_name

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.math import indices as room
from protocol.math.indices import EliasFano, IndexCode, index_code
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import INDEX_CODES
from tests.support.index_rows import rows

CODES = list(INDEX_CODES)


def code_of(kind: str, size: int, k: int) -> IndexCode:
    code: IndexCode = resolve_name(INDEX_CODES[kind]).of_chunks(size, k, (size, k))
    return code


@pytest.mark.parametrize("kind", CODES)
@given(rows(), st.sampled_from([1, 1 << 16]))
def test_any_increasing_indices_come_back(
    kind: str, chosen: tuple[int, int, list[list[int]]], block: int
) -> None:
    size, k, chunks = chosen
    code = code_of(kind, size, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "BLOCK", block)
        coded = code.encode(np.array(chunks))
        assert coded.shape == (code.nbytes(len(chunks)),)
        assert code.decode(coded, len(chunks)).tolist() == chunks


@pytest.mark.parametrize("kind", CODES)
@given(st.integers(1, 24), st.data())
def test_any_bytes_are_refused_or_are_the_one_code_of_what_they_decode_to(kind: str, size: int, data) -> None:
    code, count = code_of(kind, size, data.draw(st.integers(1, size))), data.draw(st.integers(1, 9))
    raw = data.draw(st.binary(min_size=code.nbytes(count), max_size=code.nbytes(count)))
    try:
        indices = code.decode(np.frombuffer(raw, np.uint8), count)
    except ValueError:
        return
    assert (np.diff(indices, axis=1) > 0).all()
    assert indices.min() >= 0
    assert indices.max() < size
    assert code.encode(indices).tobytes() == raw


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(("size", "k"), [(4096, 32), (4096, 128), (65536, 8), (1000, 1), (64, 60)])
def test_real_sizes_come_back(kind: str, size: int, k: int) -> None:
    generator = np.random.default_rng(0)
    chosen = [np.sort(generator.choice(size, k, replace=False)) for _ in range(50)]
    chosen += [np.arange(k), np.arange(size - k, size)]
    code = code_of(kind, size, k)
    assert np.array_equal(code.decode(code.encode(np.array(chosen)), len(chosen)), np.array(chosen))


@pytest.mark.parametrize("kind", CODES)
def test_chunks_are_found_without_their_neighbours(kind: str) -> None:
    """Eight chunks begin at a whole byte in every code."""
    generator = np.random.default_rng(0)
    chosen = np.array([np.sort(generator.choice(500, 7, replace=False)) for _ in range(24)])
    code = code_of(kind, 500, 7)
    part = code.encode(chosen)[code.nbytes(8) : code.nbytes(16)]
    assert np.array_equal(code.decode(part, 8), chosen[8:16])


class TestEliasFano:
    def test_it_has_the_documented_form(self) -> None:
        code = EliasFano(16, 3)
        assert code.low_bits == 2
        # Low bits 01 01 00, lowest first, then ones at high_i + i = 0, 2, 5 of six bits.
        assert code.encode(np.array([[1, 5, 12]])).tolist() == [0b01_000101, 0b1001]

    @pytest.mark.parametrize(
        ("indices", "reason"), [([1, 5, 13], "exceed"), ([1, 5, 5], "increasing"), ([5, 4, 9], "increasing")]
    )
    def test_indices_out_of_range_or_out_of_order_are_refused(self, indices: list[int], reason: str) -> None:
        code = EliasFano(13, 3)
        with pytest.raises(ValueError, match=reason):
            code.decode(code.encode(np.array([[0, 1, 2], indices])), 2)

    @pytest.mark.parametrize(("size", "k"), [(4096, 32), (4096, 128), (4096, 1), (65536, 512)])
    def test_it_stays_near_the_entropy(self, size: int, k: int) -> None:
        assert EliasFano(size, k).nbytes(1) * 8 <= 1.1 * math.log2(math.comb(size, k)) + 8


def test_the_spec_chooses_the_code() -> None:
    assert index_code(OuterSpec(), 4096, 32) == EliasFano(4096, 32)
