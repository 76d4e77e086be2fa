"""More replicas than the memory of the device holds: those that do not compute are kept elsewhere.

A parked replica stays the object that it is. Only the tensors of its state dict and of its links are put
away, and brought back in every bit; so nothing that it computes depends on how many replicas are ready at a
time. What is committed stays: all replicas share it.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.experiment.in_process_replica import LocalReplica
from node.optimizer.outer_stage import CommittedState
from protocol.errors import ErrorCode, HetnodeError

Action = Callable[[int, LocalReplica], None]


class ReplicaOffload(Sequence[LocalReplica]):
    """Replicas in the order of the plan, of which at most `resident` are ready to compute at a time.

    Indexing makes a replica ready, and may park another one for it: use one after the other, and keep none
    while another one is taken.

    Args:
        count: of replicas.
        build: makes one, with all its tensors. Called in their order, once for each.
        resident: at least 1.
        folder: parked tensors are in a nameless file there, which ends with this process; None keeps them in
            main memory, which helps a device that has a memory of its own.

    Raises:
        HetnodeError: where a replica is taken: DISK_FULL.
    """

    def __init__(
        self, count: int, build: Callable[[int], LocalReplica], resident: int, folder: Path | None = None
    ) -> None:
        self._count, self._build, self._resident, self._folder = count, build, resident, folder
        self._all: dict[int, LocalReplica] = {}
        self._ready: list[int] = []
        self._stores: dict[int, _Store] = {}
        self._postponed: defaultdict[int, list[Action]] = defaultdict(list)
        for index in range(min(count, resident)):
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
            if self._resident < self._count:
                raise TypeError("where not all replicas are ready, they are taken one at a time")
            return [self[each] for each in range(self._count)[index]]
        index = range(self._count)[index]
        if index not in self._ready:
            # They are used in their order, again and again: what was used last is needed last.
            while len(self._ready) >= self._resident:
                self._park(self._ready.pop())
            self._bring(index)
        self._ready.remove(index)
        self._ready.append(index)
        return self._all[index]

    def _park(self, index: int) -> None:
        store = self._stores[index] = _InMemory() if self._folder is None else _OnDisk(self._folder)
        for key, tensor in large_tensors(self._all[index]):
            store.put(key, tensor)
            tensor.data = tensor.new_empty(0)  # all that refer to this tensor see it shrink

    def _bring(self, index: int) -> None:
        if index not in self._all:
            self._all[index] = self._build(index)
        else:
            store = self._stores.pop(index)
            for key, tensor in large_tensors(self._all[index]):
                tensor.data = store.take(key).to(tensor.device)
        self._ready.append(index)
        for action in self._postponed.pop(index, ()):
            action(index, self._all[index])


def large_tensors(replica: LocalReplica) -> Iterator[tuple[str, Tensor]]:
    """The tensors that no other replica has as well, between two inner steps; keys are equal at every call.

    Those of its state dict and of its links, without what is committed. Gradients are dropped.
    """
    for position, member in enumerate(replica.members):
        member.abandon()
        for end in ("upstream", "downstream"):
            yield from _tensors_in(f"{position}/{end}", vars(getattr(member.hosted, end) or _NO_LINK))
    yield from _tensors_in("", replica.state_dict())


_NO_LINK = SimpleNamespace()
_SHARED = CommittedState.__annotations__.keys()


def _tensors_in(key: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name not in _SHARED:
                yield from _tensors_in(f"{key}/{name}", each)
    elif isinstance(value, list):
        for position, each in enumerate(value):
            yield from _tensors_in(f"{key}/{position}", each)


class _Store(Protocol):
    """Where the tensors of one replica are kept. Each is put once, and taken once."""

    def put(self, key: str, tensor: Tensor) -> None: ...
    def take(self, key: str) -> Tensor: ...


class _InMemory:
    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def put(self, key: str, tensor: Tensor) -> None:
        # Another tensor object over the same memory: the parked one shrinks.
        self._tensors[key] = tensor.detach().cpu()

    def take(self, key: str) -> Tensor:
        return self._tensors.pop(key)


class _OnDisk:
    """In a file without a name. Raises DISK_FULL."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
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
    array: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array.data
