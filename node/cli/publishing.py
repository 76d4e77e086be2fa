"""Exports of a run's model, once or while it learns, and to the Hugging Face Hub."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from node.cli.following import FollowedRun, follow
from node.cli.output import say
from node.folder import make_usable
from node.views import run_history

if TYPE_CHECKING:
    from node.hugging_face.card import Measured
    from node.hugging_face.weights import Dtype


@dataclass(frozen=True)
class ExportTarget:
    """Where an export goes: a folder, and a repository of the hub unless that is None."""

    folder: Path
    dtype: Dtype
    shard_bytes: int
    repository: str | None


def publish(run: Path, parts: Sequence[Path], target: ExportTarget) -> None:
    """Write the model in the checkpoints `parts` of `run` to `target`.

    Raises HetnodeError as :func:`node.hugging_face.export.export`; OUTPUT_UNWRITABLE for the hub.
    """
    from node.checkpoint import global_model  # noqa: PLC0415
    from node.data.tokenizer import find_tokenizer  # noqa: PLC0415
    from node.hugging_face import export, hub  # noqa: PLC0415

    if target.repository:
        hub.check_name(target.repository)
    with _put_together(parts, target.folder) as whole:
        stored = global_model.verify(whole)
        measured = _measured(run, stored.round_number)
        path = find_tokenizer(stored.spec.data, run)
        export.export(stored, target.folder, target.dtype, target.shard_bytes, path, measured)
    after = f"after round {stored.round_number}"
    say(f"the model of run {stored.spec.name} {after} is in {target.folder}")
    if target.repository:
        say(f"and at {hub.upload(target.folder, target.repository, after)}")


def publish_every(run: FollowedRun, every: int, target: ExportTarget) -> None:
    """Write each `every`-th model to `target`, until the run is over. A failed upload waits for the next."""
    if target.repository:
        from node.hugging_face import hub  # noqa: PLC0415

        hub.check_name(target.repository)
    follow(run, every, lambda number, parts: publish(run.place, parts, target))


@contextmanager
def _put_together(parts: Sequence[Path], target: Path) -> Iterator[Path]:
    """The complete checkpoint of `parts`: the only one of them, or one that is removed afterwards."""
    from node.checkpoint import global_model  # noqa: PLC0415

    if len(parts) == 1:
        yield parts[0]
        return
    near = make_usable(target.absolute().parent, "The folder of DIR")
    with TemporaryDirectory(prefix="hetnode-export-", dir=near) as place:
        global_model.assemble(parts, Path(place) / "checkpoint")
        yield Path(place) / "checkpoint"


def _measured(run: Path, round_number: int) -> Measured:
    """What ``metrics.jsonl`` in the run folder says up to this round, if it is there."""
    from node.hugging_face.card import Measured  # noqa: PLC0415

    events = run_history.read_events(run / "metrics.jsonl")
    history = run_history.history_of(event for event in events if event.get("round", 0) <= round_number)
    losses = {
        replica.index: loss
        for replica in history.replicas
        for at, loss in replica.losses
        if at == round_number
    }
    return Measured({index: loss for index, loss in losses.items() if math.isfinite(loss)}, history.tokens)
