"""How the processes of a peer on several hosts find their leader: a note at the store of torch.distributed.

torchrun runs the store, or the leader does, as torch.distributed has it: at MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from node.ranks.group import rank_failed

_KEY = "hetnode/leader"
_START = timedelta(minutes=5)


def announce_leader(store: tuple[str, int], serves: bool, note: str) -> TCPStore:
    """Keep `note` at the store, a host and port. If the store `serves` here, it ends with the one returned.

    Raises HetnodeError RANK_FAILED if the store cannot be reached, or its port cannot be used.
    """
    try:
        found = TCPStore(*store, is_master=serves, timeout=_START, wait_for_workers=False)
        found.set(_KEY, note)
    except RuntimeError as error:
        raise _unreachable(store, error) from error
    return found


def find_leader(store: tuple[str, int], seconds: float) -> str:
    """The newest note. Waits up to `seconds` for the store, and for a first note.

    Raises HetnodeError RANK_FAILED.
    """
    try:
        patience = timedelta(seconds=seconds)
        found = TCPStore(*store, is_master=False, timeout=patience, wait_for_workers=False)
        return found.get(_KEY).decode()
    except RuntimeError as error:
        raise _unreachable(store, error) from error


def _unreachable(store: tuple[str, int], error: Exception) -> Exception:
    reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    return rank_failed(
        f"The store at MASTER_ADDR:MASTER_PORT, {store[0]}:{store[1]}, does not help: {reason}."
    )
