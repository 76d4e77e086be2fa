"""Every name of the specification's tables is a quantizer, with the sizes that the specification says."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from protocol.errors import ErrorCode, HetnodeError
from protocol.math.quantizers.loading import link_quantizer, payload_quantizer
from protocol.run_files.resolve import resolve
from protocol.spec.link import LinkSpec
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import PAYLOAD_QUANTIZERS
from tests.support.paths import ROOT

SENT = 11
LINK_BYTES = {
    "bf16": "ae2ffa19b206f0ca",
    "dither5": "d116aacfde2636cb",
    "dither3": "38440403c31a1055",
}
"""sha-256 of what each quantizer packs: a member that packs other bytes belongs to another version."""


@pytest.mark.parametrize("name", LINK_BYTES)
def test_the_bytes_of_a_link_are_these_and_as_many_as_the_spec_says(name: str) -> None:
    quantizer, shape = link_quantizer(name), (2, 12, 5)
    x_blk = torch.arange(-60, 60).float().view(shape) / 8
    x_blk[0, 0] = 0
    arrays = quantizer.pack(x_blk, shape)
    for array, part in zip(arrays, quantizer.parts(shape), strict=True):
        assert array.shape == part.shape
        assert array.nbytes == part.nbytes
    data = b"".join(array.tobytes() for array in arrays)
    assert len(data) == 24 * LinkSpec(dtype=name).token_bytes(5)[0]
    assert hashlib.sha256(data).hexdigest()[:16] == LINK_BYTES[name]


@pytest.mark.parametrize("name", PAYLOAD_QUANTIZERS)
def test_a_packed_payload_comes_back_as_it_was_quantized(name: str) -> None:
    quantizer = payload_quantizer(OuterSpec(quantizer=name))
    values_s = np.random.default_rng(0).standard_normal(SENT).astype(np.float32)
    quantized = quantizer.quantize(values_s)
    arrays = quantizer.pack(quantized, SENT)
    for array, part in zip(arrays, quantizer.parts(SENT), strict=True):
        assert array.nbytes == part.nbytes
    raw = [np.frombuffer(array.tobytes(), np.uint8) for array in arrays]
    for mine, theirs in zip(quantized, quantizer.unpack(raw, SENT), strict=True):
        assert np.array_equal(mine, theirs) if mine is not None else theirs is None


@pytest.mark.parametrize(
    ("field", "known"),
    [("outer.quantizer", "2bit"), ("link.dtype", "dither5"), ("link.gradient_dtype", "dither3")],
)
def test_an_unknown_quantizer_is_refused_with_the_known_ones(field: str, known: str) -> None:
    with pytest.raises(HetnodeError, match=f"not valid: {field}: '3bit' is not one of .*{known}") as caught:
        resolve("nano", overrides={field: "3bit"})
    assert caught.value.code is ErrorCode.BAD_SPEC


def test_a_specification_is_read_without_torch_and_numpy() -> None:
    """The coordinator and the command line start without them."""
    check = "import sys, protocol.run_files.resolve; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, cwd=ROOT).returncode == 0
