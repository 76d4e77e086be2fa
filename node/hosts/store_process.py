"""The process that speaks to the store of torch.distributed for :mod:`node.hosts.store`."""

from __future__ import annotations

import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from node.hosts.store import AnnounceLeader, FindLeader
from node.ipc.channel import serve
from node.ranks.group import rank_failed
from protocol.wire.typed_calls import handlers

_KEY = "hetnode/leader"
_START = timedelta(minutes=5)


class _Store:
    """Answers the calls of the main process. A store that serves here ends with this process."""

    def announce(self, call: AnnounceLeader) -> None:
        self._store = _connected(call.host, call.port, _START, serves=call.serves)
        self._store.set(_KEY, call.note)

    def find(self, call: FindLeader) -> str:
        store = _connected(call.host, call.port, timedelta(seconds=call.seconds), serves=False)
        try:
            return store.get(_KEY).decode()
        except RuntimeError as error:
            raise _unreachable(call.host, call.port, error) from error


def _connected(host: str, port: int, patience: timedelta, serves: bool) -> TCPStore:
    try:
        return TCPStore(host, port, is_master=serves, timeout=patience, wait_for_workers=False)
    except RuntimeError as error:
        raise _unreachable(host, port, error) from error


def _unreachable(host: str, port: int, error: Exception) -> Exception:
    reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    return rank_failed(f"The store at MASTER_ADDR:MASTER_PORT, {host}:{port}, does not help: {reason}.")


def main() -> None:
    serve(int(sys.argv[1]), handlers(_Store()))


if __name__ == "__main__":
    main()
