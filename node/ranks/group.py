"""The ranks of one peer, and what they tell each other, over torch.distributed.

All ranks call the same methods in the same order. Numbers that decide something come from here, so that all
ranks decide the same. Small messages and the outer state travel over gloo, gradients and parameters of GPUs
over NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from protocol.errors import ErrorCode, HetnodeError

Result = TypeVar("Result")
_PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another one that lives. One that has died ends the peer at once."""
_BUCKET = 1 << 23
"""Elements of one sum over the ranks: small tensors travel together."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of this peer, of which this process is `rank`. One process alone has nothing to tell.

    Every method raises HetnodeError RANK_FAILED where another rank cannot be reached.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0: it answers for the peer and reads and writes the files."""
        return self.rank == 0

    def totals(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the ranks: exact, so that no order of the ranks changes it."""
        if self.size == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        with self.guarded():
            dist.all_gather(gathered, mine)
        columns = torch.stack(gathered).T.tolist()
        # fsum refuses infinities of both signs; a plain sum gives NaN.
        return [math.fsum(each) if all(map(math.isfinite, each)) else sum(each) for each in columns]

    def any(self, is_so: bool) -> bool:
        """Whether it is so on any rank."""
        return self.totals([float(is_so)])[0] > 0

    def exchange(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, by rank."""
        if self.size == 1:
            return [data]
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        with self.guarded():
            dist.all_gather(lengths, torch.tensor([len(data)]))
            found = []
            for rank, length in enumerate(map(int, lengths)):
                mine = rank == self.rank
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if mine and length else None
                buffer = torch.empty(length, dtype=torch.uint8) if buffer is None else buffer
                if length:
                    dist.broadcast(buffer, rank)
                found.append(data if mine else buffer.numpy().tobytes())
        return found

    def agree(self, error: HetnodeError | None) -> None:
        """Raise the error of the first rank that has one, on every rank."""
        text = "" if error is None else "\0".join((error.code.label, error.cause, error.remedy))
        for told in self.exchange(text.encode()):
            if told:
                label, cause, remedy = told.decode().split("\0")
                raise HetnodeError(ErrorCode.from_label(label), cause, remedy)

    def agreed(self, work: Callable[[], Result]) -> Result:
        """What `work` returns on this rank. Raises the HetnodeError of the first rank that has one."""
        found, failure = None, None
        try:
            found = work()
        except HetnodeError as error:
            failure = error
        self.agree(failure)
        return cast(Result, found)

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over the ranks, with equal bits on all of them."""
        if self.size == 1:
            return
        with self.guarded():
            for bucket in _buckets(tensors):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    dist.all_reduce(bucket[0])
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                parts = torch.split(flat, [tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """`tensor`, which becomes that of rank `source` in place. It must be contiguous."""
        if self.size > 1:
            with self.guarded():
                dist.broadcast(tensor, source)
        return tensor

    def collect(self, part: Tensor, target: int) -> list[Tensor] | None:
        """On rank `target` the parts of all ranks, which have one shape and are on the CPU; else None."""
        found = [torch.empty_like(part) for _ in range(self.size)] if self.rank == target else None
        with self.guarded():
            dist.gather(part, found, target)
        return found

    def hand_out(self, parts: Sequence[Tensor] | None, mine: Tensor, source: int) -> Tensor:
        """`mine`, which becomes this rank's entry of the `parts` that rank `source` has."""
        with self.guarded():
            dist.scatter(mine, None if parts is None else list(parts), source)
        return mine

    def send(self, tensor: Tensor, source: int, target: int) -> Tensor:
        """On rank `target`, `tensor` becomes that of rank `source`, in place. Others do nothing."""
        if source != target:
            with self.guarded():
                if self.rank == source:
                    dist.send(tensor, target)
                elif self.rank == target:
                    dist.recv(tensor, source)
        return tensor

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raise RANK_FAILED for what torch.distributed raises where a rank is gone or does something else."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1:
                raise
            reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
            raise rank_failed(f"Rank {self.rank} of this peer cannot go on: {reason}.") from error


def rank_failed(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RANK_FAILED,
        cause,
        "See the log of all ranks. Start the node again: it continues from its checkpoint.",
    )


def form_group(
    rank: int,
    size: int,
    store: tuple[str, int],
    listener: int | None,
    device: torch.device,
    prefix: str = "hetnode",
) -> RankGroup:
    """Meet the other ranks at the `store`, a host and port. To be called once in a process.

    `listener` is on rank 0 the descriptor of a socket that listens at the store's address: the store then
    serves there and at no other address. None: a store runs there already. Groups that meet at one store
    need different prefixes.

    Raises HetnodeError RANK_FAILED if a rank does not come.
    """
    group = RankGroup(rank, size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with group.guarded():
        shared = TCPStore(
            store[0],
            store[1],
            size,
            is_master=listener is not None,
            timeout=timedelta(minutes=5),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        dist.init_process_group(
            backend,
            store=PrefixStore(prefix, shared),
            rank=rank,
            world_size=size,
            timeout=_PATIENCE,
        )
    return group


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in runs of at most _BUCKET elements; a larger one by itself."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
