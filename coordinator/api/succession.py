"""Which of two coordinators of a run goes on: the one in the later term. The other one ends.

A coordinator has at most one partner: the standby that follows it, or the coordinator from which it has taken
the run over. It ends when any caller proves a later term, and looks at its partner again and again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from coordinator.authority import Authority, write_operator
from coordinator.run.command_loop import RUN_TOPIC, CommandLoop, Stopped
from coordinator.run.state.state import State
from coordinator.store.log_copy import PARTNER_FILE
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.server.calls import Context
from protocol.trust.envelope import Signer
from protocol.trust.names import TERM_HEADER
from protocol.trust.private_file import write_whole
from protocol.trust.term import Succession, is_proof, proof_of, term_in
from protocol.types import PeerId
from protocol.wire.convert.plans import succession_to_pb

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0

TermAt = Callable[[str, bytes], Awaitable[int | None]]
"""The term of the coordinator of this run that answers at ``host:port``, which is shown the proof of another
term or b""; None if none answers."""


class Partner:
    """The other coordinator of the run in `folder`, if there is one.

    Attributes:
        takes_over: this one was the standby of it until now.
        address: where it is or may be, "" without one; kept in the folder.
    """

    def __init__(self, folder: Path, term_at: TermAt | None = None, takes_over: bool = False) -> None:
        self._folder, self._file, self._term_at = folder, folder / PARTNER_FILE, term_at
        self.takes_over = takes_over
        self.address = self._file.read_text().strip() if self._file.exists() else ""

    def note(self, address: str) -> bool:
        """Keep another address. Returns whether it is news. Raises OSError."""
        if address == self.address:
            return False
        write_whole(self._file, address)
        self.address = address
        return True

    async def check(self, authority: Authority, term: int) -> None:
        """Before a start, where `term` is the stored one. `authority` certifies who asks the partner.

        Raises HetnodeError: COORDINATOR_REPLACED where the partner decides; STORE_CORRUPT.
        """
        write_operator(authority, self._folder)
        if self.takes_over:
            await self.check_silent()
        else:
            await self.look(term)

    async def check_silent(self) -> None:
        """Raises HetnodeError COORDINATOR_REPLACED where this one takes over from one that answers."""
        if self.takes_over and await self._found() is not None:
            raise HetnodeError(
                ErrorCode.COORDINATOR_REPLACED,
                f"The coordinator at {self.address} answers: a standby must not decide beside it.",
                "Stop it there, then take over again.",
            )

    async def look(self, term: int, proof: bytes = b"") -> None:
        """Show the partner the `proof` of `term`, which ends it if its own term is earlier.

        Raises HetnodeError COORDINATOR_REPLACED where the partner decides in a later term.
        """
        found = await self._found(proof)
        if found is not None and found > term:
            raise replaced(f" at {self.address}")

    async def _found(self, proof: bytes = b"") -> int | None:
        return await self._term_at(self.address, proof) if self.address and self._term_at else None


def replaced(where: str = "") -> HetnodeError:
    """The error with which a former coordinator ends."""
    return HetnodeError(
        ErrorCode.COORDINATOR_REPLACED,
        f"Another coordinator has taken this run over{where}.",
        "Leave this one stopped. To make it the standby, begin with a backup of the other one.",
    )


class Fence:
    """Ends this coordinator when another one decides.

    Args:
        coordinator: peer id of the key that signs terms.
        dht_peers: multiaddresses of this coordinator's DHT peer.

    Attributes:
        error: why this coordinator ends; None while it goes on.
    """

    def __init__(
        self,
        command_loop: CommandLoop,
        partner: Partner,
        coordinator: PeerId,
        sign: Signer,
        dht_peers: tuple[str, ...],
    ) -> None:
        self._command_loop, self._partner = command_loop, partner
        self.coordinator, self._sign, self._dht_peers = coordinator, sign, dht_peers
        self._told: tuple[tuple[int, str], pb.Succession] | None = None
        self.error: HetnodeError | None = None

    def check(self, context: Context) -> None:
        """Raises Stopped for a call that shows a later term, and for all calls after it."""
        if self.error is not None:
            raise Stopped
        state = self._command_loop.state
        for name, proof in context.invocation_metadata() or ():
            if name != TERM_HEADER or not isinstance(proof, bytes) or term_in(proof) <= state.term:
                continue
            if is_proof(proof, state.run, self.coordinator):
                self.close(replaced())
                raise Stopped

    def raise_error(self) -> None:
        """Raises why this coordinator ends, if another one decides."""
        if self.error is not None:
            raise self.error

    def close(self, error: HetnodeError) -> None:
        """Decide nothing any more."""
        log.error("%s", error)
        self.error = error
        self._command_loop.stop()

    def note(self, address: str) -> None:
        """Another partner is at `address`: nodes are told."""
        if self._partner.note(address):
            self._command_loop.wake(RUN_TOPIC)

    def told(self, state: State) -> pb.Succession:
        """What nodes are told; the same object until it changes."""
        key = state.term, self._partner.address
        if self._told is None or self._told[0] != key:
            proof = proof_of(state.term, state.run, self._sign)
            others = (self._partner.address,) if self._partner.address else ()
            told = Succession(proof, others, self._dht_peers if state.term else ())
            self._told = key, succession_to_pb(told)
        return self._told[1]

    async def look(self) -> None:
        """Look at the partner. Raises HetnodeError COORDINATOR_REPLACED where another one decides."""
        state = self._command_loop.state
        try:
            await self._partner.look(state.term, proof_of(state.term, state.run, self._sign))
        except HetnodeError as error:
            self.close(error)
        self.raise_error()

    async def keep(self) -> None:
        """Look at the partner until cancelled, or until another one decides."""
        while self.error is None:
            with suppress(HetnodeError):
                await self.look()
            await asyncio.sleep(LOOK_SECONDS)
