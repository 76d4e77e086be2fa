"""What a donor hands on of its checkpoints: the bytes that a digest covers, read from the files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from node.checkpoint import parts
from protocol.math.digest import CHUNK_BYTES, digest_of, header_of
from protocol.math.outer_step import anchor_digest
from protocol.types import Part

TENSORS = {
    "norm": torch.randn(7),
    "emb": torch.randn(40, 3),
    "layers.10.wq": torch.randn(5, 5),
    "layers.2.wq": torch.randn(5, 5),
}


def write(folder: Path, name: str, tensors: Mapping[str, Tensor], round_number: int = 3) -> Path:
    path = folder / f"round-{round_number:06d}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path)
    return path


def content(part: parts.StoredPart | None) -> bytes:
    assert part is not None
    return b"".join(parts.pieces(part, range(part.nbytes), 100))


def test_a_stage_is_its_tensors_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path, "stage-01.safetensors", TENSORS)
    found = parts.find(tmp_path, 1, Part.STAGE, 3)
    assert content(found) == b"".join(TENSORS[name].numpy().tobytes() for name in sorted(TENSORS))
    assert found is not None
    hashes = parts.chunk_hashes(found)
    chunks = [hashes[start : start + 32] for start in range(0, len(hashes), 32)]
    header = header_of({name: tensor.shape for name, tensor in TENSORS.items()})
    assert digest_of(header, chunks) == anchor_digest(TENSORS)


def test_a_part_of_several_chunks_has_the_digest_of_its_anchor(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(CHUNK_BYTES // 4 - 1), "b": torch.randn(CHUNK_BYTES // 4 + 2)}
    write(tmp_path, "stage-00.safetensors", tensors)
    found = parts.find(tmp_path, 0, Part.STAGE, 3)
    assert found is not None
    hashes = parts.chunk_hashes(found)
    assert len(hashes) == 3 * 32
    header = header_of({name: tensor.shape for name, tensor in tensors.items()})
    assert digest_of(header, [hashes[:32], hashes[32:64], hashes[64:]]) == anchor_digest(tensors)


@pytest.mark.parametrize("host", ["of stage 0", "of another stage"])
def test_the_embedding_comes_from_stage_0_or_from_a_file_of_its_own(tmp_path: Path, host: str) -> None:
    if host == "of stage 0":
        write(tmp_path, "stage-00.safetensors", TENSORS)
    else:
        write(tmp_path, "embedding.safetensors", {"emb": TENSORS["emb"]})
    assert content(parts.find(tmp_path, 0, Part.EMBEDDING, 3)) == TENSORS["emb"].numpy().tobytes()


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    write(tmp_path, "stage-00.safetensors", {"norm": TENSORS["norm"]})
    assert parts.find(tmp_path, 0, Part.STAGE, 4) is None
    assert parts.find(tmp_path, 1, Part.STAGE, 3) is None
    assert parts.find(tmp_path, 0, Part.EMBEDDING, 3) is None
    assert parts.find(tmp_path, 1, Part.EMBEDDING, 3) is None


def test_pieces_are_no_longer_than_asked_for_and_those_of_the_range(tmp_path: Path) -> None:
    write(tmp_path, "stage-01.safetensors", TENSORS)
    found = parts.find(tmp_path, 1, Part.STAGE, 3)
    assert found is not None
    whole = content(found)
    assert list(parts.pieces(found, range(10, 35), 10)) == [whole[10:20], whole[20:30], whole[30:35]]


def test_a_file_that_was_replaced_or_removed_is_not_read_any_more(tmp_path: Path) -> None:
    path = write(tmp_path, "stage-01.safetensors", TENSORS)
    found = parts.find(tmp_path, 1, Part.STAGE, 3)
    assert found is not None
    begun = parts.pieces(found, range(20), 10)
    first = next(begun)
    replacement = write(tmp_path, "stage-01.new", {name: tensor + 1 for name, tensor in TENSORS.items()})
    before = path.read_bytes()[found.offset :]
    os.replace(replacement, path)
    assert first + next(begun) == before[:20]
    with pytest.raises(OSError, match="written again"):
        content(found)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        content(found)


def raw(header: object, data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "file",
    {
        "empty": b"",
        "a header of gigabytes": raw({"a": GOOD}, bytes(8), length=1 << 40),
        "no JSON": b"\2\0\0\0\0\0\0\0{x" + bytes(8),
        "no object": raw([1], b""),
        "too little data": raw({"a": GOOD}, bytes(7)),
        "too much data": raw({"a": GOOD}, bytes(9)),
        "another dtype": raw({"a": {**GOOD, "dtype": "F64", "shape": [1]}}, bytes(8)),
        "another shape": raw({"a": {**GOOD, "shape": [3]}}, bytes(8)),
        "a gap": raw({"a": GOOD, "b": {**GOOD, "data_offsets": [9, 17]}}, bytes(17)),
        "another order": raw({"b": GOOD, "a": {**GOOD, "data_offsets": [8, 16]}}, bytes(16)),
        "no offsets": raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_file_of_another_form_is_not_handed_on(tmp_path: Path, file: tuple[str, bytes]) -> None:
    path = tmp_path / "round-000003" / "stage-00.safetensors"
    path.parent.mkdir()
    path.write_bytes(raw({"emb": GOOD}, bytes(8)))
    assert parts.find(tmp_path, 0, Part.STAGE, 3) is not None
    path.write_bytes(file[1])
    assert parts.find(tmp_path, 0, Part.STAGE, 3) is None
    assert parts.find(tmp_path, 0, Part.EMBEDDING, 3) is None


@given(
    header=st.recursive(
        st.none() | st.integers() | st.text(max_size=9),
        lambda inner: st.dictionaries(
            st.sampled_from(["a", "emb", "__metadata__", "dtype", "shape", "data_offsets"]),
            inner | st.lists(inner),
        ),
        max_leaves=20,
    ),
    data=st.binary(max_size=20),
)
def test_no_header_raises(tmp_path_factory: pytest.TempPathFactory, header: object, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "headers"
    path = folder / "round-000003" / "stage-00.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw(header, data))
    for part in Part:
        found = parts.find(folder, 0, part, 3)
        if found is not None:
            assert parts.chunk_hashes(found) == (
                hashlib.sha256(content(found)).digest() if found.nbytes else b""
            )
