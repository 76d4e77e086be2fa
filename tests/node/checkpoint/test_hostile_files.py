"""Files of checkpoints that somebody made up: no byte of theirs decides how much memory a reader takes."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.checkpoint import parts
from node.checkpoint.files import FileEntry, read_part, read_snapshot, verify_tensors
from node.checkpoint.layout import round_folder, stage_file
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Part

SHAPES = {"a": (4,), "b": (2, 2)}
DATA = bytes(32)


def entry(start: int = 0, stop: int = 16, dtype: str = "F32", shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def written(header: object, length: int | None = None, data: bytes = DATA) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def many() -> bytes:
    """As many tensors without elements as a file of some megabytes names."""
    return written({f"{index:x}": entry(0, 0, shape=[0]) for index in range(100_000)}, data=b"")


FILES: dict[str, Callable[[], bytes]] = {
    "a header of 2^60 bytes": lambda: written({}, 2**60),
    "a header of 2^64 - 1 bytes": lambda: written({}, 2**64 - 1),
    "overlapping tensors": lambda: written({"a": entry(0, 16), "b": entry(8, 24)}),
    "a gap between tensors": lambda: written({"a": entry(0, 8), "b": entry(16, 32)}),
    "more data than there is": lambda: written({"a": entry(0, 2**40, shape=[2**38]), "b": entry(16, 32)}),
    "a negative shape": lambda: written({"a": entry(0, 16, shape=[-2, -2]), "b": entry(16, 32)}),
    "a product that overflows": lambda: written({"a": entry(0, 0, shape=[2**32, 2**32]), "b": entry()}),
    "another dtype": lambda: written({"a": entry(0, 16, "F64", [2]), "b": entry(16, 32)}),
    "other names": lambda: written({"b": entry(), "c": entry(16, 32)}),
    "other shapes": lambda: written({"a": entry(0, 16, shape=[2, 2]), "b": entry(16, 32)}),
    "a shape that is no list": lambda: written({"a": entry(shape="4"), "b": entry(16, 32)}),
    "no object": lambda: written([1, 2]),
    "a deep nest": lambda: struct.pack("<Q", 10**5) + b"[" * 10**5 + DATA,
    "very many tensors": many,
    "nothing": bytes,
}
HONEST_ENOUGH = ("other names", "other shapes")
"""They are in a valid form, and a donor serves its own files; who asks for them compares the digest."""


@pytest.mark.parametrize("kind", FILES)
def test_a_hostile_header_is_refused_within_bounded_memory(kind: str, tmp_path: Path) -> None:
    content = FILES[kind]()
    file = tmp_path / round_folder(3) / stage_file(1)
    file.parent.mkdir()
    file.write_bytes(content)
    told = FileEntry(file.name, len(content), hashlib.sha256(content).hexdigest())
    before = psutil.Process().memory_info().vms
    tracemalloc.start()
    try:
        with pytest.raises(HetnodeError) as refused:
            verify_tensors(file, told, SHAPES)
        served = parts.find(tmp_path, 1, Part.STAGE, 3)
        assert tracemalloc.get_traced_memory()[1] < 2**27
    finally:
        tracemalloc.stop()
    assert refused.value.code is ErrorCode.CHECKPOINT_CORRUPT
    assert (served is not None) == (kind in HONEST_ENOUGH)
    assert psutil.Process().memory_info().vms - before < 2**30


@pytest.mark.parametrize("nbytes", [0, 31, 33, 2**40])
def test_a_part_has_exactly_the_bytes_of_the_specification(nbytes: int, tmp_path: Path) -> None:
    with (tmp_path / "part").open("wb") as file:
        file.truncate(nbytes)
    for read in (
        lambda: read_part(tmp_path / "part", SHAPES),
        lambda: read_snapshot(tmp_path / "part", "0" * 64, (4, 4)),
    ):
        with pytest.raises(HetnodeError) as refused:
            read()
        assert refused.value.code is ErrorCode.CHECKPOINT_CORRUPT
