"""A card that is not there: counts the bytes of tensors that would be on it, and bounds them.

Tensors that are made within :meth:`CardMemory.host` are in main memory; others count until they are freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from node.core.optimizer.inner import OPTIMIZERS, MakeOptimizer
from node.core.optimizer.outer_state import OuterState
from node.moments.host_moments import HostMoments


class CardMemory(TorchDispatchMode):
    """While it is entered. `live` and `peak` are bytes; above `bound` it raises OutOfMemoryError."""

    def __init__(self, bound: float = float("inf")) -> None:
        super().__init__()
        self.bound, self.live, self.peak = bound, 0, 0
        self._known: set[int] = set()
        self._is_host = False

    @contextmanager
    def host(self, is_host: bool = True) -> Iterator[None]:
        """What is made here is in main memory; or on the card, within such a block, if not `is_host`."""
        before, self._is_host = self._is_host, is_host
        try:
            yield
        finally:
            self._is_host = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                self._note(each.untyped_storage())
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key in self._known or not key:
            return
        self._known.add(key)
        nbytes = 0 if self._is_host else storage.nbytes()
        weakref.finalize(storage, self._freed, key, nbytes)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        if self.live > self.bound:
            raise torch.OutOfMemoryError(f"{self.live} bytes are more than {self.bound}")

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes

    def optimizers(self, are_host: bool, piece: int) -> Mapping[str, MakeOptimizer]:
        """As :data:`OPTIMIZERS`, with moments that are noted where they are."""
        if not are_host:
            return {name: self._noting(kind, False) for name, kind in OPTIMIZERS.items()}
        hosted = self._noting(HostMoments, True)
        return {name: partial(hosted, kind=kind, piece=piece) for name, kind in OPTIMIZERS.items()}

    def _noting(self, kind: Any, is_host: bool) -> MakeOptimizer:
        class Noting(kind):  # type: ignore[misc]
            def new_moment(_, parameter: Tensor) -> Tensor:
                with self.host(is_host):
                    found: Tensor = super().new_moment(parameter)
                    return found

        made: MakeOptimizer = Noting
        return made


class HostOuterState(OuterState):
    """The outer state, which is always in main memory."""

    def __init__(self, memory: CardMemory, *args: Any, **kwargs: Any) -> None:
        self._memory = memory
        with memory.host():
            super().__init__(*args, **kwargs)

    def propose(self, *args: Any, **kwargs: Any) -> bytes | None:
        with self._memory.host():
            return super().propose(*args, **kwargs)

    def commit(self, *args: Any, **kwargs: Any) -> str:
        with self._memory.host():
            return super().commit(*args, **kwargs)
