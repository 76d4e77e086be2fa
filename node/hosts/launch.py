"""Which rank of a peer on several hosts this process is, as torchrun and similar launchers tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.errors import ErrorCode, HetnodeError

_MARKS = ("RANK", "WORLD_SIZE")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
MOST_RANKS = 1024


@dataclass(frozen=True)
class Launch:
    """One of the `size` processes that a launcher has started on one or more hosts, which form one peer.

    Attributes:
        local_rank, local_size: among the processes of this host.
        host, port: of the store of torch.distributed.
        serves_store: whether rank 0 has to run the store: the launcher does not.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    serves_store: bool

    @property
    def leads(self) -> bool:
        """Whether this process is the peer's node, and not a follower."""
        return self.rank == 0


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """What the variables of a launcher say; None if no launcher has set them, or for one process alone.

    Raises HetnodeError BAD_OPTION if they are incomplete, or contradict each other.
    """
    if not any(name in environment for name in _MARKS):
        return None
    if missing := [name for name in (*_NUMBERS, "MASTER_ADDR") if not environment.get(name)]:
        given = " and ".join(name for name in _MARKS if name in environment)
        raise _refusal(f"The environment has {given}, but not {', '.join(missing)}.")
    for name in _NUMBERS:
        text = environment[name]
        if not (text.isascii() and text.isdigit() and len(text) < 9):
            raise _refusal(f"{name} in the environment is '{text}', which is no number from 0 on.")
    rank, size, local_rank, local_size, port = (int(environment[name]) for name in _NUMBERS)
    if not (rank < size <= MOST_RANKS and local_rank < local_size <= size and 0 < port < 2**16):
        text = ", ".join(f"{name}={environment[name]}" for name in _NUMBERS)
        raise _refusal(f"The environment contradicts itself or has more than {MOST_RANKS} ranks: {text}.")
    serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if size == 1:
        return None
    return Launch(rank, size, local_rank, local_size, environment["MASTER_ADDR"], port, serves)


def _refusal(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_OPTION,
        cause,
        "Start all processes with torchrun, or set all its variables; for one node of its own, unset RANK "
        "and WORLD_SIZE.",
    )
