"""Weights in the layout of transformers: safetensors, in one file or in shards with an index.

They are written and read one tensor at a time, so the largest tensor determines the memory, not the model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from node.checkpoint.files import Shapes, read_bytes
from node.hugging_face.architecture import unsupported
from protocol.errors import ErrorCode, HetnodeError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_JSON_LIMIT = 64 << 20
_READABLE = {"F32", "BF16", "F16"}


@dataclass(frozen=True)
class Dtype:
    """An element type: its name in safetensors, its torch type, and its bytes."""

    stored: str
    torch: torch.dtype
    nbytes: int

    @property
    def name(self) -> str:
        return str(self.torch).removeprefix("torch.")


DTYPES: Mapping[str, Dtype] = {
    "fp32": Dtype("F32", torch.float32, 4),
    "bf16": Dtype("BF16", torch.bfloat16, 2),
    "fp16": Dtype("F16", torch.float16, 2),
}


def write_weights(
    folder: Path, shapes: Shapes, tensors: Iterable[tuple[str, Tensor]], dtype: Dtype, most_bytes: int
) -> list[str]:
    """Write all `tensors`, in the order of `shapes`, to files of at most `most_bytes`.

    A larger tensor has its own file. Returns the names of the files.

    Raises:
        HetnodeError: BAD_OPTION if a value is too large for `dtype`.
        OSError: the disk is full or broken.
    """
    shards = _shards(shapes, dtype, most_bytes)
    single = len(shards) == 1
    count = len(shards)
    names = [SINGLE if single else f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    remaining = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, {each: shapes[each] for each in shard}, remaining, dtype)
    if single:
        return names
    index = {
        "metadata": {"total_size": dtype.nbytes * sum(map(math.prod, shapes.values()))},
        "weight_map": {each: name for name, shard in zip(names, shards, strict=True) for each in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [*names, INDEX]


def _shards(shapes: Shapes, dtype: Dtype, most_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        nbytes = dtype.nbytes * math.prod(shape)
        if shards[-1] and size + nbytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _write_file(path: Path, shapes: Shapes, tensors: Iterator[tuple[str, Tensor]], dtype: Dtype) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + dtype.nbytes * math.prod(shape)
        header[name] = {"dtype": dtype.stored, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            found, tensor = next(tensors)
            assert (found, tuple(tensor.shape)) == (name, shapes[name]), "the tensors have another order"
            file.write(_bytes(name, tensor, dtype))
        file.flush()
        os.fsync(file.fileno())


def _bytes(name: str, tensor: Tensor, dtype: Dtype) -> memoryview:
    cast = tensor.to(dtype.torch)
    if not cast.isfinite().all():
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"'{name}' has values that are not finite in {dtype.name}.",
            "Export with --dtype fp32 or bf16.",
        )
    bits = cast.contiguous().view(torch.int32 if dtype.nbytes == 4 else torch.int16).numpy()
    return bits.astype(bits.dtype.newbyteorder("<"), copy=False).reshape(-1).view("u1").data


class Weights:
    """The tensors of a Hugging Face folder. Names, dtypes and shapes are checked before one is read.

    Args:
        folder: untrusted.
        shapes: of the required tensors. Others are refused.
        ignored: tensors that may exist and are not used. The tables of RoPE of old versions always are.

    Raises:
        HetnodeError: UNSUPPORTED_MODEL.
    """

    def __init__(self, folder: Path, shapes: Shapes, ignored: Collection[str] = ()) -> None:
        self._folder, self._ignored = folder, ignored
        self._file_of = dict[str, str]()
        with ExitStack() as stack:
            try:
                for file in _files(folder):
                    opened = stack.enter_context(safe_open(folder / file, framework="pt"))
                    for name in opened.keys():  # noqa: SIM118
                        self._take(name, file, opened.get_slice(name), shapes)
            except (OSError, SafetensorError) as error:
                raise unsupported(folder, str(error)) from None
        if missing := sorted(set(shapes) - set(self._file_of)):
            raise unsupported(folder, f"it lacks {len(missing)} tensors, such as {missing[0]}")

    def read(self, name: str) -> Tensor:
        """A tensor as float32 on the CPU, finite in every element. Raises HetnodeError UNSUPPORTED_MODEL."""
        try:
            with safe_open(self._folder / self._file_of[name], framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name).float().clone()
        except (OSError, SafetensorError) as error:
            raise unsupported(self._folder, str(error)) from None
        if not tensor.isfinite().all():
            raise unsupported(self._folder, f"{name} has values that are not finite")
        return tensor

    def _take(self, name: str, file: str, part: Any, shapes: Shapes) -> None:
        if name.endswith("rotary_emb.inv_freq") or name in self._ignored:
            return
        dtype, shape = part.get_dtype(), tuple(part.get_shape())
        if name not in shapes:
            raise unsupported(self._folder, f"it has a tensor {name!r:.80}, which is not part of this model")
        if name in self._file_of:
            raise unsupported(self._folder, f"it has {name} twice")
        if dtype not in _READABLE or shape != shapes[name]:
            raise unsupported(
                self._folder, f"{name} is {dtype} {list(shape)}, not a float of shape {list(shapes[name])}"
            )
        self._file_of[name] = file


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of an untrusted folder. Raises HetnodeError UNSUPPORTED_MODEL."""
    try:
        tree = json.loads(read_bytes(path, _JSON_LIMIT))
    except (OSError, ValueError, RecursionError) as error:
        raise unsupported(path, str(error).rstrip(".")) from None
    if not isinstance(tree, dict):
        raise unsupported(path, "it is not a JSON object")
    return tree


def _files(folder: Path) -> Sequence[str]:
    """The safetensors files of a folder. Pickled weights are never read."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise unsupported(folder, f"it has neither {SINGLE} nor {INDEX}; pickled weights (.bin) are not read")
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise unsupported(folder / INDEX, "it has no weight_map of file names")
    files = sorted(set(listed.values()))
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise unsupported(folder / INDEX, f"it names {file!r:.80}, which is not a file of the folder")
    return files
