"""More replicas than fit into the memory of the device: idle replicas are parked in main memory.

A parked replica keeps its object. Only the tensors of its members and links are stored elsewhere
and restored later with the same bits, so results do not depend on the number of ready replicas. The committed
state stays in memory, because all replicas share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

from torch import Tensor

from node.experiment.in_process_replica import LocalReplica
from protocol.math.subspace import ReceivingEnd, SendingEnd

Action = Callable[[int, LocalReplica], None]


class ReplicaOffload(Sequence[LocalReplica]):
    """Replicas in the order of the plan. At most `resident` of them are ready to compute at the same time.

    Indexing makes a replica ready and may park another one. So use the replicas one after the other, and do
    not use a replica any more after another one was indexed.

    Args:
        count: number of replicas.
        build: creates a replica with all its tensors. Called once for each, in their order.
        resident: at least 1.
    """

    def __init__(self, count: int, build: Callable[[int], LocalReplica], resident: int) -> None:
        self._count, self._build, self._resident = count, build, resident
        self.built: dict[int, LocalReplica] = {}  # those that were needed so far, parked ones as well
        self._ready: list[int] = []
        self._stores: dict[int, dict[str, Tensor]] = {}
        self._postponed: defaultdict[int, list[Action]] = defaultdict(list)
        for index in range(min(count, resident)):
            self._bring(index)

    def each(self, action: Action) -> None:
        """Apply `action` to all replicas: now to the ready ones, to a parked one before its next use.

        Actions keep their order. Objects that `action` refers to must not change until then.
        """
        for index in range(self._count):
            if index in self._ready:
                action(index, self.built[index])
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
                raise TypeError("slices need all replicas to be resident")
            return [self[each] for each in range(self._count)[index]]
        index = range(self._count)[index]
        if index not in self._ready:
            # Replicas are used in a cycle, so the one that was used last is needed last.
            while len(self._ready) >= self._resident:
                self._park(self._ready.pop())
            self._bring(index)
        self._ready.remove(index)
        self._ready.append(index)
        return self.built[index]

    def _park(self, index: int) -> None:
        store = self._stores[index] = {}
        for key, tensor in large_tensors(self.built[index]):
            # detach() makes another tensor object over the same memory, because this one becomes empty.
            store[key] = tensor.detach().cpu()
            tensor.data = tensor.new_empty(0)  # frees the memory for all references to this tensor

    def _bring(self, index: int) -> None:
        if index not in self.built:
            self.built[index] = self._build(index)
        else:
            store = self._stores.pop(index)
            for key, tensor in large_tensors(self.built[index]):
                tensor.data = store.pop(key).to(tensor.device)
        self._ready.append(index)
        for action in self._postponed.pop(index, ()):
            action(index, self.built[index])


def large_tensors(replica: LocalReplica) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the members and links that this replica does not share with others.

    Call it between two inner steps; gradients are dropped. Every call yields the same keys.
    """
    for position, member in enumerate(replica.members):
        member.abandon()
        for end in ("upstream", "downstream"):
            yield from _tensors_in(f"{position}/{end}", getattr(member.hosted, end))
    yield from _tensors_in("", [member.own_tensors() for member in replica.members])


def _tensors_in(key: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _tensors_in(f"{key}/{name}", each)
    elif isinstance(value, SendingEnd | ReceivingEnd):
        yield from _tensors_in(key, vars(value))
    elif isinstance(value, list):
        for position, each in enumerate(value):
            yield from _tensors_in(f"{key}/{position}", each)
