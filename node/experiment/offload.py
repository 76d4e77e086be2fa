"""More replicas than the memory of the device holds: those that do not compute are kept elsewhere.

A parked replica stays the object that it is. Only its large tensors are put away, and brought back in every
bit; so nothing that it computes depends on how many replicas are there at a time.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol, overload

import torch
from torch import Tensor

from node.experiment.in_process_replica import LocalReplica
from protocol.errors import ErrorCode, HetnodeError

Action = Callable[[int, LocalReplica], None]


class ReplicaOffload(Sequence[LocalReplica]):
    """Replicas in the order of the plan, of which at most `seats` are ready to compute at a time.

    Whoever takes one out of it gets it ready, and the one before may be parked for it: use one after the
    other, and keep none while another one is taken.

    Args:
        count: of replicas.
        build: makes one, with all its tensors. Called in their order, once for each.
        seats: at least 1.
        folder: parked tensors are in a nameless file there, which ends with this process; None keeps them in
            main memory, which helps a device that has a memory of its own.

    Raises:
        HetnodeError: where a replica is taken: DISK_FULL.
    """

    def __init__(
        self, count: int, build: Callable[[int], LocalReplica], assignments: int, folder: Path | None = None
    ) -> None:
        self._count, self._build, self._seats, self._folder = count, build, assignments, folder
        self._all: dict[int, LocalReplica] = {}
        self._ready: list[int] = []
        self._places: dict[int, _Place] = {}
        self._postponed: defaultdict[int, list[Action]] = defaultdict(list)
        for index in range(min(count, assignments)):
            self._bring(index)

    def each(self, action: Action) -> None:
        """Have `action` done to all: at once to those that are ready, to others before they are used again.

        Actions keep their order. What they refer to must not change meanwhile.
        """
        for index in range(self._count):
            if index in self._ready:
                action(index, self._all[index])
            else:
                self._postponed[index].append(action)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LocalReplica: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LocalReplica]: ...
    def __getitem__(self, index: int | slice) -> LocalReplica | Sequence[LocalReplica]:
        if isinstance(index, slice):
            if self._seats < self._count:
                raise TypeError("where not all replicas are ready, they are taken one at a time")
            return [self[each] for each in range(self._count)[index]]
        index = range(self._count)[index]
        if index not in self._ready:
            # They are used in their order, again and again: what was used last is needed last.
            while len(self._ready) >= self._seats:
                self._park(self._ready.pop())
            self._bring(index)
        self._ready.remove(index)
        self._ready.append(index)
        return self._all[index]

    def _park(self, index: int) -> None:
        place = self._places[index] = _InMemory() if self._folder is None else _OnDisk(self._folder)

        def put(key: str, tensor: Tensor) -> Tensor:
            place.put(key, tensor)
            return tensor.new_empty(0)

        self._all[index].map_tensors(put)

    def _bring(self, index: int) -> None:
        if index not in self._all:
            self._all[index] = self._build(index)
        else:
            place = self._places.pop(index)
            self._all[index].map_tensors(lambda key, empty: place.take(key).to(empty.device))
        self._ready.append(index)
        for action in self._postponed.pop(index, ()):
            action(index, self._all[index])


class _Place(Protocol):
    """Where the tensors of one replica are kept. Each is put once, and taken once."""

    def put(self, key: str, tensor: Tensor) -> None: ...
    def take(self, key: str) -> Tensor: ...


class _InMemory:
    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def put(self, key: str, tensor: Tensor) -> None:
        self._tensors[key] = tensor.cpu()

    def take(self, key: str) -> Tensor:
        return self._tensors.pop(key)


class _OnDisk:
    """In a file without a name. Raises DISK_FULL."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._found: dict[str, tuple[int, torch.Size, torch.dtype]] = {}

    def put(self, key: str, tensor: Tensor) -> None:
        self._found[key] = (self._file.tell(), tensor.shape, tensor.dtype)
        try:
            self._file.write(_bytes_of(tensor.cpu().contiguous()))
        except OSError as error:
            raise HetnodeError(
                ErrorCode.DISK_FULL,
                f"A replica cannot be put aside: {error.strerror or error}.",
                "Free some space, or keep more replicas in memory.",
            ) from None

    def take(self, key: str) -> Tensor:
        start, shape, dtype = self._found.pop(key)
        tensor = torch.empty(shape, dtype=dtype)
        self._file.seek(start)
        wanted = _bytes_of(tensor)
        if self._file.readinto(wanted) != len(wanted):
            raise OSError("a parked replica is no longer on the disk")
        return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    """Those of a contiguous CPU tensor, not copied."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
