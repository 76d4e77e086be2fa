"""What a router does for a node: it forwards ports of its public address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class RouterError(OSError):
    """The router refuses, or does not answer, or answers nonsense. The message is the end of a sentence."""


@dataclass(frozen=True)
class Forwarding:
    """The router sends what arrives at its port `external` on to `internal` of this machine, for `seconds`.

    `seconds` 0: until it is asked to stop.
    """

    internal: int
    external: int
    seconds: float


class Router(Protocol):
    """A router that was found in this network. The methods raise RouterError.

    Attributes:
        protocol: by which it is asked, for people.
        external: its address on the internet, as it told when it was found.
    """

    protocol: str
    external: str

    async def external_address(self) -> str:
        """Its address on the internet now."""

    async def forward(self, internal: int, external: int, seconds: int) -> Forwarding:
        """Forward the TCP port `internal`, or renew that; `external` and `seconds` are wishes."""

    async def stop(self, forwarding: Forwarding) -> None:
        """Do not forward any more."""
