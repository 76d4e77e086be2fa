"""The state of an in-process swarm on disk, from which another process can continue with the same bits.

The folder of the swarm has only the newest round::

    round-NNNNNN/swarm.safetensors           run and variation, counters, anchors, the state of a variation
    round-NNNNNN/replica-MMMMM.safetensors   counters and private state of a replica
    round-NNNNNN/digests.json                sha-256 of each file

A round appears complete or not at all. The digests are verified before use. Nothing is unpickled: a file has
its tensors by number, and as metadata the JSON of the tree in which they stand.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from node.checkpoint.files import Parameters, corrupt, publish, write_bytes
from node.checkpoint.layout import ANY_ROUND, round_folder, rounds_below
from node.checkpoint.private_state import StageState, TableState
from protocol.errors import HetnodeError

log = logging.getLogger(__name__)

_SWARM, _DIGESTS = "swarm.safetensors", "digests.json"


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
            tensors = dict[str, Tensor]()
            text = json.dumps(_packed(tree, tensors))
            content = save(tensors, {"tree": text})
            digests[name] = sha256(content).hexdigest()
            write_bytes(partial / name, content)

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
    with safe_open(file, framework="pt") as opened:
        tree: dict[str, Any] = _unpacked(json.loads(opened.metadata()["tree"]), opened)
        return tree


def _packed(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """`tree` as JSON knows it; its tensors are added to `tensors`, and their names stand in their places."""
    match tree:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = (
                tree.detach().cpu().contiguous().clone()
            )  # the format wants memory of its own for each
            return {"tensor": name}
        case Mapping():  # keys may be numbers
            return {"pairs": [[key, _packed(value, tensors)] for key, value in tree.items()]}
        case list() | tuple():
            return [_packed(each, tensors) for each in tree]
    return tree


def _unpacked(packed: Any, opened: Any) -> Any:
    match packed:
        case {"tensor": name}:
            return opened.get_tensor(name).clone()
        case {"pairs": pairs}:
            return {key: _unpacked(value, opened) for key, value in pairs}
        case list():
            return [_unpacked(each, opened) for each in packed]
    return packed


def _file_of(index: int) -> str:
    return f"replica-{index:05d}.safetensors"
