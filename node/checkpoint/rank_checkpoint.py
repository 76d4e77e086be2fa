"""The checkpoint of a peer with several ranks: rank 0 reads and writes it.

The files are those of a peer with one process, so another number of devices may continue from them. All ranks
call each function together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from node.checkpoint.files import Shapes
from node.checkpoint.node_checkpoint import Restored
from node.checkpoint.private_state import StageState, second_moments
from node.core.optimizer.inner import Moments
from node.core.optimizer.outer_state import OuterState
from node.ranks.group import RankGroup
from node.ranks.parameters import is_sharded
from node.ranks.remote_tensors import SharedTensor
from node.ranks.sharding import rows_of, whole
from protocol.spec.run import RunSpec

_MOMENTS = "exp_avg", "exp_avg_sq"
Key = tuple[int, str, str]
"""Stage, kind (committed, error, local, exp_avg, exp_avg_sq) and name."""


def shared_state(outer: OuterState, moments: Mapping[int, Moments | None]) -> dict[Key, SharedTensor]:
    """All that a checkpoint holds, for rank 0 to read; local parameters that have moved only."""
    found: dict[Key, SharedTensor] = {}
    for stage, each in outer.items():
        found |= {
            (stage, "committed", name): shared for name, shared in outer.shared_committed(stage).items()
        }
        found |= {
            (stage, "error", name): shared
            for name, shared in each.ownership.shared(each.layout.shapes, each.error).items()
        }
        found |= {(stage, "local", name): shared for name, shared in outer.shared_moved(stage).items()}
        if (held := moments[stage]) is not None:
            named = {"exp_avg": held["exp_avg"], "exp_avg_sq": held["exp_avg_sq"]}
            found |= {
                (stage, kind, name): SharedTensor(
                    tuple(tensor.shape), None if is_sharded(tensor) else 0, partial(whole, tensor)
                )
                for kind, tensors in named.items()
                for name, tensor in tensors.items()
            }
    return found


def named(tensors: Mapping[Key, Tensor], stage: int, kind: str) -> dict[str, Tensor]:
    """The tensors of one stage and kind, by name."""
    return {key[2]: tensor for key, tensor in tensors.items() if key[:2] == (stage, kind)}


def private_of(tensors: Mapping[Key, Tensor], stage: int, moments: Moments | None) -> StageState:
    """The private state of a stage, with all `tensors`; of `moments` only the counters are used."""
    if moments is not None:
        first, second = (named(tensors, stage, kind) for kind in _MOMENTS)
        moments = {**moments, "exp_avg": first, "exp_avg_sq": second}
    return StageState(named(tensors, stage, "error"), named(tensors, stage, "local"), moments)


def handed_out(
    group: RankGroup, spec: RunSpec, found: Restored | None, outer: OuterState, is_sharded: bool
) -> Restored | None:
    """What each rank needs of the checkpoint that rank 0 has `found`.

    That is the committed state, error feedback and local parameters of the tensors that the rank owns, and
    the moments: its part of them if parameters are sharded, else all.
    """
    if group.size == 1:
        return found
    told = _told(group, found)
    if told is None:
        return None
    stages, private = {}, {}
    for stage, names in told.committed.items():
        owned = outer[stage].ownership
        given = found.stages[stage] if found else {}
        stages[stage] = owned.hand_out(given, {name: outer[stage].committed_shapes[name] for name in names})
        if told.private is None:
            continue
        state = found.private[stage] if found and found.private else None
        counters, moved = told.private[stage]
        shapes = outer[stage].layout.shapes
        error = owned.hand_out(state.error if state else {}, shapes)
        local = owned.hand_out(state.local if state else {}, {name: shapes[name] for name in moved})
        moments = None
        if counters is not None:
            held = state.moments if state else None
            each = shapes, second_moments(spec, shapes)
            moments = _moments(group, counters, held, each, is_sharded)
        private[stage] = StageState(error, local, moments)
    return Restored(told.round_number, stages, None, None if told.private is None else private)


@dataclass(frozen=True)
class _Told:
    """What rank 0 has found: names by stage; and by stage the optimizer's counters and what has moved."""

    round_number: int
    committed: Mapping[int, list[str]]
    private: Mapping[int, tuple[tuple[int, int | None] | None, list[str]]] | None


def _told(group: RankGroup, found: Restored | None) -> _Told | None:
    private = None
    if found is not None and found.private is not None:
        private = [
            (stage, state.moments and (state.moments["steps"], state.moments["cold_steps"]), [*state.local])
            for stage, state in found.private.items()
        ]
    mine = None
    if found is not None:
        names = [(stage, [*tensors]) for stage, tensors in found.stages.items()]
        mine = (found.round_number, names, private)
    told = json.loads(group.exchange(json.dumps(mine).encode() if group.is_first else b"")[0])
    if told is None:
        return None
    round_number, names, private = told
    return _Told(
        round_number,
        dict(names),
        None if private is None else {stage: (counters, moved) for stage, counters, moved in private},
    )


def _moments(
    group: RankGroup,
    counters: tuple[int, int | None],
    held: Moments | None,
    shapes: tuple[Shapes, Shapes],
    is_sharded: bool,
) -> Moments:
    def received(given: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
        kept = {}
        for name, shape in shapes.items():
            tensor = given[name].detach().contiguous() if given else torch.empty(shape)
            group.broadcast(tensor, 0)
            kept[name] = rows_of(tensor, group.rank, group.size).clone() if is_sharded else tensor
        return kept

    steps, cold_steps = counters
    first = received(held["exp_avg"] if held else {}, shapes[0])
    second = received(held["exp_avg_sq"] if held else {}, shapes[1])
    return {"steps": steps, "cold_steps": cold_steps, "exp_avg": first, "exp_avg_sq": second}
