"""The snapshots of the embedding from which links may derive T_perp, as training uses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from node.core.train.anchor_files import AnchorFiles
from node.core.train.services import Services
from protocol.types import StageRange


class LinkSnapshots(Protocol):
    """Keeps the snapshots that links need, in a run with ``link.embedding_every``."""

    async def write(self, round_number: int) -> None:
        """Write the snapshot of a round that stage 0 has just applied, where links need it; attest it soon.

        Called before stage 0 applies another round. Raises HetnodeError DISK_FULL, ...
        """

    async def tell_held(self, position: int) -> None:
        """Attest again what this node has; `position` is the round of its anchor."""

    def note_rollback(self, round_number: int) -> None:
        """Anchors were restored in this round, of which the coordinator may tell all nodes later."""

    async def use(self, round_number: int) -> None:
        """Derive T_perp from the snapshot that is active in a round, before its inner phase begins."""

    def fetch_for(self, round_number: int) -> None:
        """Fetch in the background what links need in `round_number` or soon after it."""

    async def close(self) -> None:
        """End what goes on in the background."""


MakeSnapshots = Callable[[Services, StageRange, AnchorFiles, Path], LinkSnapshots]
"""From the stages that this member hosts, and the folder of its checkpoints."""
