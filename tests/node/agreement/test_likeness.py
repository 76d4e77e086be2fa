"""The likeness of a payload equals its definition in float64, and copies are found by it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from node.agreement import likeness
from node.agreement.likeness import LikenessMemory, LikenessMeter, within
from protocol.math.payload_layout import TensorLayout
from protocol.math.topk import SparseTensor, sparsify
from protocol.spec.outer import OuterSpec
from tests.support.payload_vectors import CODECS, SHAPES, SPARSE, cosine, flat, payload

OUTER = OuterSpec(**SPARSE)
Content = dict[str, SparseTensor]


def altered(outer: OuterSpec, *copied: Content, noise: float, seed: int = 5) -> Content:
    """The sum of some payloads with noise, encoded anew."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, shape in SHAPES.items():
        dense = torch.zeros(shape)
        for content in copied:
            content[name].add_to(dense.view(-1), 1.0)
        other = torch.randn(shape, generator=generator)
        found[name] = sparsify(
            dense + noise * dense.norm() / other.norm() * other, TensorLayout(shape, outer)
        )
    return found


def total_of(contents: Sequence[Content], name: str) -> Tensor:
    total = torch.zeros(torch.Size(SHAPES[name]).numel())
    for content in contents:
        content[name].add_to(total, 1.0)
    return total


def play(
    memory: LikenessMemory, counted: Sequence[Content], *others: Content, names: Sequence[str] = tuple(SHAPES)
) -> list[float | None]:
    """The likeness of all payloads of a round."""
    payloads = [*counted, *others]
    meter = LikenessMeter(memory, 0, range(len(payloads)), payloads, [1.0] * len(counted))
    for name in names:
        meter.add(name, total_of(counted, name))
    return meter.results(meter.sums())


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_it_is_the_greatest_cosine_with_what_counts_now_or_counted_before(codec: dict[str, object]) -> None:
    outer, memory = OuterSpec(**codec), LikenessMemory(Random(1).randint)
    last, now = ([payload(outer, 10 * number + seed) for seed in range(3)] for number in range(2))
    free = payload(outer, 50)
    first, found = play(memory, last), play(memory, now, free)
    vectors, earlier = [flat(each) for each in (*now, free)], [flat(each) for each in last]
    earlier.append(torch.stack(earlier).sum(dim=0))
    for position, vector in enumerate(vectors):
        same = [each for other, each in enumerate(vectors[:3]) if other != position]
        expected = max(cosine(vector, each) for each in (*same, *earlier))
        assert found[position] == pytest.approx(expected, abs=1e-5)
    one, *others = earlier[:-1]
    assert first[0] == pytest.approx(max(cosine(one, each) for each in others), abs=1e-5)


@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("values", [100, 1 << 20], ids=["some elements", "all elements"])
def test_altered_copies_are_like_what_they_copy(
    monkeypatch: pytest.MonkeyPatch, noise: float, values: int
) -> None:
    monkeypatch.setattr(likeness, "VALUES", values)
    memory = LikenessMemory(Random(1).randint)
    last, now = ([payload(OUTER, 10 * number + seed, 0.5) for seed in range(4)] for number in range(2))
    play(memory, last)
    copies = [
        altered(OUTER, last[1], noise=noise),
        altered(OUTER, now[1], noise=noise),
        altered(OUTER, *last, noise=0.3 * noise),
        altered(OUTER, last[0], last[2], noise=0.3 * noise),
    ]
    found = play(memory, now, *copies)
    told = [each for each in found if each is not None]
    assert len(told) == 8
    assert max(told[:4]) < 0.55 < min(told[4:])


def test_what_did_not_count_is_no_original() -> None:
    """Of a payload and its copy without weight only the copy is like the other, in this round and later."""
    memory = LikenessMemory(Random(1).randint)
    honest, free = [payload(OUTER, seed, 0.5) for seed in range(3)], payload(OUTER, 9, 0.5)
    *others, of_copy, _ = play(memory, honest, altered(OUTER, honest[0], noise=0.1), free)
    assert max(each or 0.0 for each in others) < 0.55 < (of_copy or 0.0)
    *_, of_copy, of_free = play(memory, [payload(OUTER, 20, 0.5)], honest[0], free)
    assert (of_free or 0.0) < 0.55 < (of_copy or 0.0)


def test_zeros_and_a_payload_alone_are_like_nothing() -> None:
    nothing = payload(OUTER, 1, 0.0, scale=0.0)
    assert play(LikenessMemory(Random(1).randint), [payload(OUTER, 0)], nothing) == [None, None]


def test_parts_of_several_ranks_sum_to_the_figures_of_one() -> None:
    payloads = [payload(OUTER, seed) for seed in range(3)]
    whole, *ranks = (
        LikenessMeter(LikenessMemory(Random(1).randint), 0, (0, 1), payloads, [1.0] * 3) for _ in range(4)
    )
    for index, name in enumerate(SHAPES):
        total = total_of(payloads, name)
        whole.add(name, total)
        ranks[index % 2].add(name, total)  # the last rank has no tensor of this stage
    torch.testing.assert_close(whole.sums(), torch.stack([each.sums() for each in ranks]).sum(dim=0))


def test_each_worker_draws_its_own_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "VALUES", 20)
    one, other, same = (LikenessMemory(Random(seed).randint) for seed in (1, 2, 1))
    runs = [[memory.run(0, name, 10_000, 0.01) for name in "abc"] for memory in (one, other, same)]
    assert runs[0] != runs[1]
    assert runs[0] == runs[2] == [one.run(0, name, 10_000, 0.01) for name in "abc"]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(st.integers(0, 699), st.integers(1, 700))
def test_a_run_of_elements_has_what_is_sent_of_it(codec: dict[str, object], start: int, length: int) -> None:
    sparse = payload(OuterSpec(**codec), 3)["b"]
    run = slice(start, min(700, start + length))
    whole, part = torch.zeros(700), torch.zeros(run.stop - run.start)
    sparse.add_to(whole, 1.0)
    columns, values = within(sparse, run)
    part[columns] = values
    assert torch.equal(part, whole[run])
