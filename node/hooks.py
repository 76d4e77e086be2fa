"""The places at which a test can watch or disturb a node. Production has :class:`Hooks`, which does nothing.

There are three of them: calls to the worker, calls to the coordinator, and the bytes of payloads. Two more
hooks are for the clock and the reachability of other peers.

A hook can wait, which delays its caller; raise, which its caller sees as a failure of the call itself; or
end the process.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from protocol.types import PeerId


class Hooks:
    """The hooks of one node. A test overrides those that it needs."""

    async def before_worker_call(self, request: object) -> None:
        """Runs before a request of :mod:`node.ipc.worker_calls` is queued at the worker."""

    async def after_worker_call(self, request: object) -> None:
        """Runs after the worker has answered without an error, before the caller gets the answer."""

    async def before_coordinator_call(self, method: str, request: Any) -> None:
        """Runs before each unary call, with its gRPC method and request, and before a stream is opened.

        Raises HetnodeError COORDINATOR_UNREACHABLE to play a coordinator that cannot be reached.
        """

    async def after_coordinator_call(self, method: str, request: Any) -> None:
        """Runs after the coordinator has answered without an error, and at each message of a stream.

        Raises HetnodeError COORDINATOR_UNREACHABLE to play an answer that was lost.
        """

    def outgoing(self, round_number: int, stage: int, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces of a payload that are sent to another peer in place of `pieces`."""
        return pieces

    def before_contact(self, peer: PeerId | str) -> None:
        """Runs before a call to or from `peer`.

        Raises HetnodeError NEIGHBOUR_UNREACHABLE to play a peer that cannot be reached.
        """

    def time(self) -> float:
        """Unix time by this machine's clock."""
        return time.time()


_of_process = Hooks()
_of_context: ContextVar[Hooks | None] = ContextVar("hooks", default=None)


def current() -> Hooks:
    """The hooks of the node in whose context this is called."""
    return _of_context.get() or _of_process


def install(hooks: Hooks) -> None:
    """Use `hooks` in this context and in tasks that it starts: a test plays many nodes in one process."""
    _of_context.set(hooks)


def install_in_process(hooks: Hooks) -> None:
    """Use `hooks` in all threads of this process, and in processes that are forked from it."""
    global _of_process  # noqa: PLW0603  a process of a real node has one set of hooks
    _of_process = hooks
