"""Indices as ranks, against oracles in plain integers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.formats.enumerative import Enumerative
from protocol.math.indices import index_code
from protocol.spec.outer import OuterSpec
from tests.support.index_rows import rows


def rank_of(indices: list[int]) -> int:
    return sum(math.comb(x, i + 1) for i, x in enumerate(indices))


def bits_of(ranks: list[int], bits: int) -> bytes:
    """The documented form: one rank after the other, lowest bits first."""
    total = sum(rank << bits * number for number, rank in enumerate(ranks))
    return total.to_bytes((len(ranks) * bits + 7) // 8, "little")


class TestEnumerative:
    @given(rows(most=80))
    def test_it_is_the_rank_among_all_choices(self, chosen: tuple[int, int, list[list[int]]]) -> None:
        size, k, chunks = chosen
        code = Enumerative(size, k, (size, k))
        assert code.bits == (math.comb(size, k) - 1).bit_length()
        assert code.encode(np.array(chunks)).tobytes() == bits_of([rank_of(c) for c in chunks], code.bits)

    def test_ranks_are_in_order_and_leave_no_gap(self) -> None:
        choices = sorted(map(list, itertools.combinations(range(7), 3)), key=lambda choice: choice[::-1])
        assert [rank_of(choice) for choice in choices] == list(range(35))
        code = Enumerative(7, 3, (7, 3))
        raw = np.frombuffer(bits_of(list(range(35)), code.bits), np.uint8)
        assert code.decode(raw, 35).tolist() == choices

    @pytest.mark.parametrize(("size", "k"), [(7, 3), (4096, 32), (64, 33), (13, 12)])
    def test_ranks_beyond_the_last_choice_are_refused(self, size: int, k: int) -> None:
        code, choices = Enumerative(size, k, (size, k)), math.comb(size, k)
        last = np.frombuffer(bits_of([choices - 1], code.bits), np.uint8)
        assert code.decode(last, 1).tolist() == [list(range(size - k, size))]
        for rank in {choices, (1 << code.bits) - 1}:
            with pytest.raises(ValueError, match="last choice"):
                code.decode(np.frombuffer(bits_of([0, rank], code.bits), np.uint8), 2)

    def test_bits_behind_the_last_chunk_are_refused(self) -> None:
        code = Enumerative(7, 3, (7, 3))
        assert code.bits == 6
        with pytest.raises(ValueError, match="unused bits"):
            code.decode(np.array([0b1000000], np.uint8), 1)

    @given(st.data())
    def test_numbers_that_only_exact_arithmetic_tells_apart_are_told_apart(self, data) -> None:
        """Ranks just below, at and above a binomial, whose difference a float64 does not hold."""
        i = data.draw(st.integers(8, 31))
        x = data.draw(st.integers(200, 4094))
        rank = max(math.comb(x, i + 1) + data.draw(st.integers(-2, 2)), 0)
        rank += sum(math.comb(4096 - 32 + j, j + 1) for j in range(i + 1, 32)) if i < 31 else 0
        code = Enumerative(4096, 32, (4096, 32))
        if rank < math.comb(4096, 32):
            raw = np.frombuffer(bits_of([rank], code.bits), np.uint8)
            assert rank_of(code.decode(raw, 1)[0].tolist()) == rank

    @pytest.mark.parametrize(("size", "k"), [(1808, 14), (60, 1), (8, 8), (1, 1), (4096, 32)])
    def test_shorter_chunks_take_the_same_table(self, size: int, k: int) -> None:
        generator = np.random.default_rng(0)
        chosen = np.array([np.sort(generator.choice(size, k, replace=False)) for _ in range(9)])
        shared, own = Enumerative(size, k, (4096, 32)), Enumerative(size, k, (size, k))
        assert np.array_equal(shared.encode(chosen), own.encode(chosen))
        assert np.array_equal(shared.decode(own.encode(chosen), 9), chosen)

    @pytest.mark.parametrize(("size", "k"), [(4096, 32), (1024, 64), (64, 40)])
    def test_its_table_is_exact(self, size: int, k: int) -> None:
        table = Enumerative(size, k, (size, k)).table
        for i, x in itertools.product((0, 1, k // 2, k - 1), (0, 1, k - 1, k, size // 3, size)):
            exact = int.from_bytes(table.limbs[i, x].astype("<u4").tobytes(), "little")
            assert exact == math.comb(x, i + 1)
            assert math.ldexp(table.nearly[i, x], 960) == pytest.approx(exact, rel=2.0**-48)

    def test_it_is_within_a_bit_of_the_entropy(self) -> None:
        code = Enumerative(4096, 32, (4096, 32))
        assert code.bits == 267
        assert code.bits - math.log2(math.comb(4096, 32)) < 1


def test_the_spec_chooses_the_code() -> None:
    assert index_code(OuterSpec(indices="enumerative"), 60, 1) == Enumerative(60, 1, (4096, 32))


@given(st.integers(1, 65536), st.integers(1, 65536))
def test_every_table_that_a_spec_allows_can_be_made(chunk: int, top_k: int) -> None:
    """In memory, and its numbers in the range of a float64 times 2^-960."""
    try:
        outer = OuterSpec(chunk=chunk, top_k=min(top_k, chunk), indices="enumerative")
    except ValueError:
        return
    largest = math.comb(outer.chunk, min(outer.top_k, outer.chunk // 2))
    assert largest.bit_length() < 960 + 1023


def test_a_table_that_is_too_large_is_refused_with_a_way_out() -> None:
    OuterSpec(chunk=4096, top_k=128, indices="enumerative")
    for chunk, top_k in ((4096, 256), (65536, 32768)):
        with pytest.raises(ValueError, match="use a smaller top_k or chunk, or 'elias-fano'"):
            OuterSpec(chunk=chunk, top_k=top_k, indices="enumerative")
        OuterSpec(chunk=chunk, top_k=top_k)
