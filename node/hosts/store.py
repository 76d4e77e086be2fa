"""How the processes of a peer on several hosts find their leader: a note at the store of torch.distributed.

torchrun runs the store, or the leader does, as torch.distributed has it: at MASTER_ADDR and MASTER_PORT. A
process of its own speaks to it, because a main process imports no torch.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from node.ipc.channel import start_child
from node.ipc.worker_client import WorkerClient
from protocol.errors import ErrorCode
from protocol.wire.typed_calls import Request

_CLOSE_SECONDS = 3.0


@dataclass(frozen=True)
class AnnounceLeader(Request[None]):
    """Keep `note` at the store for :class:`FindLeader`. `serves`: the store is to run in this process.

    Raises HetnodeError RANK_FAILED if the store cannot be reached, or its port cannot be used.
    """

    host: str
    port: int
    serves: bool
    note: str


@dataclass(frozen=True)
class FindLeader(Request[str]):
    """Answers the newest note of the leader. Waits up to `seconds` for the store, and for a first note.

    Raises HetnodeError RANK_FAILED.
    """

    host: str
    port: int
    seconds: float


async def start_store(processes: AsyncExitStack) -> WorkerClient:
    """A process that answers the calls of this module, and which `processes` ends."""
    child = await start_child(
        f"{__package__}.store_process", name="store of the ranks", died=ErrorCode.WORKER_DIED, environment={}
    )
    processes.push_async_callback(child.close, _CLOSE_SECONDS)
    return WorkerClient(child)
