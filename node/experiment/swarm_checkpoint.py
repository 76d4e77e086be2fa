"""The state of an in-process swarm on disk, from which another process can continue with the same bits.

The folder of the swarm has only the newest round::

    round-NNNNNN/swarm.pt           run and variation, counters, anchors, the state of a variation
    round-NNNNNN/replica-MMMMM.pt   counters and private state of a replica
    round-NNNNNN/digests.json       sha-256 of each file

A round appears complete or not at all. The digests are verified before use, and no code is unpickled.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.checkpoint.files import Parameters, corrupt, publish, write_bytes
from node.checkpoint.layout import ANY_ROUND, round_folder, rounds_below
from node.checkpoint.private_state import StageState, TableState
from protocol.errors import HetnodeError

log = logging.getLogger(__name__)

_SWARM, _DIGESTS = "swarm.pt", "digests.json"


@dataclass(frozen=True)
class SavedReplica:
    """A replica between two rounds: `bytes_sent` of LocalReplica, phases of members, private states."""

    bytes_sent: int
    phases: list[dict[str, Any]]
    private: Mapping[int, StageState]


@dataclass(frozen=True)
class SavedSwarm:
    """A verified swarm after `position` rounds. Replicas are read on demand, by position in the plan."""

    folder: Path
    position: int
    link_bytes: int
    anchors: Mapping[int, Parameters]
    steering: Mapping[str, Tensor]

    def replica(self, index: int) -> SavedReplica:
        tree = _load(self.folder / _file_of(index))
        private = {
            stage: StageState(**each, table=None if table is None else TableState(*table))
            for stage, (each, table) in tree["private"].items()
        }
        return SavedReplica(tree["bytes_sent"], tree["phases"], private)


def write(
    root: Path,
    terms: str,
    position: int,
    link_bytes: int,
    steering: Mapping[str, Tensor],
    anchors: Mapping[int, Parameters],
    replicas: Iterable[SavedReplica],
) -> None:
    """Write the swarm after `position` rounds below `root`, then remove other rounds there.

    Args:
        terms: digest (hex) of the run and all other conditions that must be equal when it is restored.
        replicas: in the order of the plan. They are taken one at a time.

    Raises:
        HetnodeError: DISK_FULL; the files below `root` are unchanged.
    """
    folder = root / round_folder(position)

    def fill(partial: Path) -> None:
        digests = {}

        def keep(name: str, tree: Mapping[str, Any]) -> None:
            buffer = io.BytesIO()
            torch.save(tree, buffer)
            digests[name] = sha256(buffer.getbuffer()).hexdigest()
            write_bytes(partial / name, buffer.getbuffer())

        for index, each in enumerate(replicas):
            private = {stage: _tree_of(state) for stage, state in each.private.items()}
            keep(_file_of(index), {"bytes_sent": each.bytes_sent, "phases": each.phases, "private": private})
        held = {stage: dict(anchor) for stage, anchor in anchors.items()}
        counters = {"terms": terms, "position": position, "link_bytes": link_bytes}
        keep(_SWARM, {**counters, "anchors": held, "steering": dict(steering)})
        write_bytes(partial / _DIGESTS, json.dumps(digests, separators=(",", ":")).encode())

    publish(folder, fill, series=ANY_ROUND)
    for other in rounds_below(root).values():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def newest(root: Path, terms: str) -> SavedSwarm | None:
    """The newest valid swarm below `root` with the same `terms`, or None. The log has the reason."""
    for folder in rounds_below(root).values():
        try:
            return _read(folder, terms)
        except (HetnodeError, OSError, ValueError) as error:
            log.warning("the swarm saved in %s is not used: %s", folder, error)
    return None


def _read(folder: Path, terms: str) -> SavedSwarm:
    # All replicas are verified now: a restore must not fail after it has changed some of them.
    for name, digest in json.loads((folder / _DIGESTS).read_bytes()).items():
        with (folder / name).open("rb") as file:
            if file_digest(file, "sha256").hexdigest() != digest:
                raise corrupt(folder / name, "it has another digest")
    tree = _load(folder / _SWARM)
    if tree.pop("terms") != terms:
        raise corrupt(folder, "its run, variation or plan is different")
    return SavedSwarm(folder, **tree)


def _tree_of(state: StageState) -> tuple[dict[str, Any], tuple[Parameters, Any] | None]:
    own = {"error": dict(state.error), "local": dict(state.local), "moments": state.moments}
    return own, None if state.table is None else (dict(state.table.values), state.table.moments)


def _load(file: Path) -> dict[str, Any]:
    tree: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return tree


def _file_of(index: int) -> str:
    return f"replica-{index:05d}.pt"
