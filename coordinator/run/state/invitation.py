"""Invites of a run, as the coordinator keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.types import PeerId, Role


@dataclass(frozen=True)
class Invitation:
    """An invite. `role` None permits any role; `peers` have used it, each once."""

    invite: str
    secret_sha256: str
    uses: int
    expires_at: float
    role: Role | None
    peers: tuple[PeerId, ...] = ()
    revoked: bool = False
