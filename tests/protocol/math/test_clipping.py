"""What a payload of one peer can do to the others: nothing, whatever is in it."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.core.model.init import initial_parameters
from node.core.model.shapes import parameter_shapes
from node.core.optimizer.embedding_follower import EmbeddingFollower
from node.core.optimizer.outer_stage import OuterStage
from protocol.codec.payload import decode, encode
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.clipping import (
    FEW_FACTOR,
    LEAST_PAYLOADS,
    REFUSE_FACTOR,
    clipping_scales,
    median_norm,
    outliers,
    payload_norm,
)
from protocol.math.indices import EliasFano
from protocol.math.outer_step import anchor_digest, apply_update
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import SparseTensor
from protocol.spec.fixed import PLAIN_CLIP
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import INDEX_CODES
from protocol.spec.run import RunSpec
from protocol.trust.envelope import misfit
from protocol.types import PayloadDescriptor, PeerId
from tests.support.reference import small_spec

SPEC = small_spec(outer={"clip": PLAIN_CLIP})
PLAIN = small_spec(outer={"quantizer": "none"})
DENSE = small_spec(outer={"top_k": 0})
SHORTEST = small_spec(outer={"quantizer": "1bit", "indices": list(INDEX_CODES)[-1]})
norms = st.lists(st.floats(0, 1e40), min_size=1, max_size=9)


def trained(spec: RunSpec, seed: int, size: float = 0.01, stage: int = 0) -> tuple[OuterStage, bytes]:
    """A replica's outer stage and its payload after an inner phase that moves each value by about `size`."""
    start = initial_parameters(spec, stage)
    generator = torch.Generator().manual_seed(seed)
    local = {name: v + size * torch.randn(v.shape, generator=generator) for name, v in start.items()}
    outer = OuterStage(spec, stage, start)
    payload = outer.propose(local)
    assert payload is not None
    return outer, payload


class TestNorm:
    @given(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    )
    def test_the_norm_of_values_is_that_of_exact_arithmetic_but_for_rounding(
        self, values: list[float]
    ) -> None:
        payload = {"a": SparseTensor(None, torch.tensor(values))}
        exact = math.sqrt(math.fsum(value * value for value in values))
        assert payload_norm(payload) == pytest.approx(exact, rel=1e-12)

    @pytest.mark.parametrize("n", [1, 2, 3, 7, 1000, 4097])
    def test_the_order_of_the_sum_is_fixed(self, n: int) -> None:
        """The halves are added element by element, which leaves a processor no choice."""
        values = np.sin(np.arange(n, dtype=np.float64)).astype(np.float32)
        squares = [float(value) ** 2 for value in values]
        while len(squares) > 1:
            half = (len(squares) + 1) // 2
            squares = [
                a + (squares[half + i] if half + i < len(squares) else 0)
                for i, a in enumerate(squares[:half])
            ]
        assert payload_norm({"a": SparseTensor(None, torch.from_numpy(values))}) == math.sqrt(squares[0])

    def test_codes_are_counted(self) -> None:
        codes_s = torch.tensor([0, 1, 2, 3, 3], dtype=torch.uint8)
        sparse = SparseTensor(torch.arange(5), codes_s, torch.tensor([3.0, 4.0]))
        assert payload_norm({"a": sparse, "b": sparse}) == math.sqrt(2 * (2 * 9 + 3 * 16))

    @pytest.mark.parametrize("quantizer", ["2bit", "1bit"])
    def test_the_norm_of_codes_is_that_of_the_values_that_they_stand_for(self, quantizer: str) -> None:
        spec = small_spec(outer={"quantizer": quantizer})
        outer, payload = trained(spec, 0)
        sent = decode(outer.layout, payload)
        exact = math.fsum(value * value for sparse in sent.values() for value in sparse.values_s.tolist())
        assert payload_norm(sent) == pytest.approx(math.sqrt(exact), rel=1e-12)

    def test_the_largest_float32_values_have_a_finite_norm(self) -> None:
        top = torch.finfo(torch.float32).max
        assert math.isfinite(payload_norm({"a": SparseTensor(None, torch.full((10_000,), top))}))


class TestMedian:
    def test_of_two_the_smaller_measures_the_larger(self) -> None:
        assert median_norm([1e6, 1.0]) == 1.0
        assert clipping_scales([1e6, 1.0], FEW_FACTOR) == [FEW_FACTOR / 1e6, 1.0]

    def test_of_zeros_nothing_follows(self) -> None:
        assert median_norm([0.0, 0.0, 3.0]) == 3.0
        assert clipping_scales([0.0, 0.0, 3.0], FEW_FACTOR) == [1.0, 1.0, 1.0]
        assert outliers([0.0, 0.0]) == ["", ""]

    def test_from_three_payloads_on_none_counts_for_more_than_the_median(self) -> None:
        assert clipping_scales([1.0, 2.0, 4.0], 1.0) == [1.0, 1.0, 0.5]
        assert clipping_scales([0.0, 2.0, 4.0], 1.0) == [1.0, 1.0, 1.0]  # two are no majority
        assert clipping_scales([1.0, 2.0, 4.0], 1.5) == [1.0, 1.0, 0.75]

    def test_one_alone_is_never_clipped(self) -> None:
        assert clipping_scales([1e30], FEW_FACTOR) == [1.0]

    def test_a_scale_that_could_make_values_denormal_is_none(self) -> None:
        assert clipping_scales([1e30, 1.0, 1.0], FEW_FACTOR) == [0.0, 1.0, 1.0]

    @given(norms, st.floats(1.0, FEW_FACTOR))
    def test_what_is_left_is_at_most_the_bound(self, norms: list[float], clip: float) -> None:
        few = sum(norm > 0 for norm in norms) < LEAST_PAYLOADS
        bound = (FEW_FACTOR if few else clip) * median_norm(norms)
        for norm, scale in zip(norms, clipping_scales(norms, clip), strict=True):
            assert 0 <= scale <= 1
            assert norm * scale <= bound * (1 + 1e-15) or scale == 1.0
            assert scale == 1.0 or norm > bound

    @given(norms)
    def test_most_are_never_outliers(self, norms: list[float]) -> None:
        refused = outliers(norms)
        assert sum(map(bool, refused)) <= len(norms) // 2
        assert all("median" in reason for reason in refused if reason)

    @given(st.lists(st.floats(1.0, FEW_FACTOR), min_size=1, max_size=9))
    def test_norms_within_the_factor_of_each_other_are_all_let_through(self, norms: list[float]) -> None:
        assert clipping_scales(norms, FEW_FACTOR) == [1.0] * len(norms)


class TestClipping:
    @pytest.mark.parametrize(
        "spec", [SPEC, PLAIN, SHORTEST, DENSE], ids=["2bit", "values", "shortest", "dense"]
    )
    @pytest.mark.parametrize("others", [1, 2])
    def test_a_million_times_the_norm_moves_all_replicas_alike_and_little(
        self, spec: RunSpec, others: int
    ) -> None:
        replicas = [trained(spec, seed) for seed in range(others)]
        attacker, poison = trained(spec, 9, size=1e4)
        payloads = [(payload, 1.0) for _, payload in replicas] + [(poison, 1.0)]
        follower = EmbeddingFollower(spec, initial_parameters(spec, 0)["emb"])
        follower.commit(payloads)
        usual = payload_norm(decode(attacker.layout, replicas[0][1]))
        digests = set()
        for outer, _ in [*replicas, (attacker, poison)]:
            before = outer.anchor
            outer.commit(payloads, True, {name: value.clone() for name, value in before.items()})
            digests.add(outer.digest())
            moved = math.sqrt(sum(float((outer.anchor[n] - v).square().sum()) for n, v in before.items()))
            assert moved < (FEW_FACTOR + 1) * 1.1 * usual
            assert torch.equal(outer.anchor["emb"], follower.table_vd)
        assert len(digests) == 1

    def test_what_is_clipped_stays_in_the_error_feedback_of_its_owner(self) -> None:
        """What counted and the error feedback are everything learned: an honest giant loses nothing."""
        outer, payload = trained(SPEC, 0, size=1.0)
        _, usual = trained(SPEC, 1, size=0.01)
        start = {name: value.clone() for name, value in outer.anchor.items()}
        sent = decode(outer.layout, payload)
        scale = clipping_scales([payload_norm(sent), payload_norm(decode(outer.layout, usual))], FEW_FACTOR)[
            0
        ]
        assert 0 < scale < 1
        generator = torch.Generator().manual_seed(0)
        learned = {n: -torch.randn(v.shape, generator=generator) for n, v in start.items()}
        outer.commit([(payload, 1.0), (usual, 1.0)], True, {n: v.clone() for n, v in start.items()})
        for name, sparse in sent.items():
            counted = torch.zeros(start[name].numel())
            sparse.add_to(counted, scale)
            total = counted.view_as(start[name]) + outer.error[name]
            torch.testing.assert_close(total, learned[name], rtol=0, atol=1e-5)

    def test_an_honest_group_gets_the_bits_of_the_plain_mean(self) -> None:
        anchor = initial_parameters(SPEC, 0)
        layout = PayloadLayout(parameter_shapes(SPEC, 0), SPEC.outer)
        payloads = [
            decode(layout, trained(SPEC, seed, size)[1]) for seed, size in ((0, 0.01), (1, 0.05), (2, 0.02))
        ]
        plain = {}
        for name, value in anchor.items():
            total = torch.zeros(value.numel())
            for payload in payloads:
                payload[name].add_to(total, 1.0)
            plain[name] = value - (total / 3).view_as(value)
        assert anchor_digest(
            apply_update(anchor, payloads, [1.0] * 3, OuterSpec(clip=PLAIN_CLIP))
        ) == anchor_digest(plain)

    def test_the_bits_of_a_clipped_round_are_these(self) -> None:
        """A value from one machine, for all others: a replica with other bits would leave the run."""
        ramp = torch.arange(1, 9, dtype=torch.float32) / 7
        payloads = [{"a": SparseTensor(None, ramp * factor)} for factor in (1.0, 1.5, 1e6)]
        moved = apply_update(
            {"a": torch.ones(8)}, payloads, [1.0, 0.3, 1.7], OuterSpec(learning_rate=0.7, clip=PLAIN_CLIP)
        )
        assert [struct.pack("<f", value).hex() for value in moved["a"].tolist()] == CLIPPED_ROUND


CLIPPED_ROUND = [
    "e4178b3e",
    "38d0e9be",
    "14ae97bf",
    "1ce8f4bf",
    "101129c0",
    "14ae57c0",
    "8c2583c0",
    "0e749ac0",
]


class TestWhatIsRefusedUnheard:
    """:meth:`OuterStage.screen` for every kind of bad payload, each among three good ones."""

    def problems(self, spec: RunSpec, bad: bytes) -> str:
        outer, first = trained(spec, 0)
        good = [first, trained(spec, 1)[1], trained(spec, 2)[1]]
        *rest, problem = outer.screen([*good, bad])
        assert rest == [""] * 3, "the good ones pass"
        return problem

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda data: data[:-1], "bytes instead of"),
            (lambda data: data + b"\0", "bytes instead of"),
            (lambda data: b"", "bytes instead of"),
            (lambda data: bytes(len(data)), "header"),
            (lambda data: b"\x80\x04" + data[2:], "header"),
        ],
        ids=["truncated", "oversized", "empty", "zeros", "pickle"],
    )
    def test_other_bytes(self, change, why: str) -> None:  # type: ignore[no-untyped-def]
        assert why in self.problems(SPEC, change(trained(SPEC, 3)[1]))

    def test_the_shape_of_another_stage_and_the_type_of_another_codec(self) -> None:
        size = len(trained(SPEC, 3)[1])
        for other in (trained(SPEC, 3, stage=1)[1], trained(PLAIN, 3)[1], trained(DENSE, 3)[1]):
            assert self.problems(SPEC, other)
            assert "header" in self.problems(SPEC, other[:size].ljust(size, b"\0"))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("spec", [SPEC, PLAIN, DENSE], ids=["scale", "value", "dense"])
    def test_values_and_scales_that_are_not_finite(self, spec: RunSpec, value: float) -> None:
        data = bytearray(trained(spec, 3)[1])
        # The first tensor begins with its magnitudes; elsewhere the last four bytes are its last value.
        start = (
            len(PayloadLayout(parameter_shapes(spec, 0), spec.outer).header)
            if spec is SPEC
            else len(data) - 4
        )
        data[start : start + 4] = struct.pack("<f", value)
        assert "not finite" in self.problems(spec, bytes(data))

    @pytest.mark.parametrize("factor", [2 * REFUSE_FACTOR, 1e6, 1e30])
    def test_a_norm_far_from_that_of_the_others(self, factor: float) -> None:
        layout = PayloadLayout(parameter_shapes(SPEC, 0), SPEC.outer)
        sparse = decode(layout, trained(SPEC, 3)[1])
        grown = {n: SparseTensor(s.indices_s, s.codes_s, s.magnitudes * factor) for n, s in sparse.items()}
        assert "times" in self.problems(SPEC, encode(layout, grown))

    @pytest.mark.parametrize(
        ("indices", "why"),
        [
            ([3, 3, 9, 10], "strictly increasing"),
            ([3, 2, 9, 10], "strictly increasing"),
            ([9, 3, 50, 51], "does not hold 4"),
            ([0, 1, 2, 60], "exceed"),
        ],
        ids=["duplicate", "descending", "fewer", "out of range"],
    )
    def test_indices_that_no_chunk_has(self, indices: list[int], why: str) -> None:
        """The one tensor of such a payload is a vector of 60, and sends 4 of them."""
        layout = PayloadLayout({"v": (60,)}, OuterSpec(chunk=60, top_k=4))
        code = EliasFano(60, 4)
        magnitudes, codes = struct.pack("<2f", 1, 2), b"\0"
        good = layout.header + magnitudes + raw_elias_fano(code, [0, 1, 2, 59]) + codes
        decode(layout, good)
        bad = layout.header + magnitudes + raw_elias_fano(code, indices) + codes
        with pytest.raises(HetnodeError, match=why) as refusal:
            decode(layout, bad)
        assert refusal.value.code is ErrorCode.PAYLOAD_CORRUPT

    @pytest.mark.parametrize("spec", [SPEC, SHORTEST], ids=["2bit", "shortest"])
    @settings(max_examples=50)
    @given(data=st.data())
    def test_one_flipped_bit_never_raises_through_the_screen(
        self, spec: RunSpec, data: st.DataObject
    ) -> None:
        outer, payload = trained(spec, 0)
        bit = data.draw(st.integers(0, 8 * len(payload) - 1))
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        good, other, problem = outer.screen([payload, trained(spec, 1)[1], bytes(flipped)])
        assert (good, other) == ("", "")
        if not problem:  # it is another payload then, which its hash and signature tell from the first
            assert math.isfinite(payload_norm(decode(outer.layout, bytes(flipped))))


def raw_elias_fano(code: EliasFano, indices: list[int]) -> bytes:
    """A code written bit by bit, for indices that the encoder would never be given."""
    bits = np.zeros(code.nbytes(1) * 8, np.uint8)
    for i, index in enumerate(indices):
        for low in range(code.low_bits):
            bits[i * code.low_bits + low] = index >> low & 1
    split = code.k * code.low_bits
    for i, index in enumerate(indices):
        bits[split + (index >> code.low_bits) + i] = 1
    return np.packbits(bits, bitorder="little").tobytes()


class TestEnvelope:
    OWN = PayloadDescriptor("run", 1, 7, PeerId("me"), "a" * 64, "codec", 1.0, 100, "0" * 64)

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"run": "other"}, "run"),
            ({"stage": 0}, "stage"),
            ({"round_number": 6}, "round is 6 instead of 7"),
            ({"codec": "dense32-v1"}, "codec"),
            ({"anchor_digest": "b" * 64}, "anchor"),
            ({"nbytes": 101}, "has 101 bytes instead of 100"),
        ],
    )
    def test_what_belongs_elsewhere_does_not_fit(self, changes: dict[str, object], why: str) -> None:
        theirs = replace(self.OWN, owner=PeerId("other"), sha256="1" * 64)
        assert misfit(theirs, self.OWN) == ""
        assert why in misfit(replace(theirs, **changes), self.OWN)
