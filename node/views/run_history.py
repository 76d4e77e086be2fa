"""The history of a run from the measurements in ``metrics.jsonl``: losses, traffic, a plot."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.extras import pyplot


@dataclass(frozen=True)
class ReplicaHistory:
    """Validation loss of one replica by round, in its own forward mode (nats per token)."""

    index: int
    losses: tuple[tuple[int, float], ...]

    @property
    def first(self) -> float:
        return self.losses[0][1]

    @property
    def last(self) -> float:
        return self.losses[-1][1]


@dataclass(frozen=True)
class BytesSent:
    """Bytes that all members sent together, and what dense float32 exchange would have taken."""

    link: int
    link_dense: int
    payload: int
    payload_dense: int


@dataclass(frozen=True)
class History:
    """The data of the summary and of the plot."""

    replicas: tuple[ReplicaHistory, ...]
    traffic: BytesSent
    tokens: int
    committed: int
    aborted: int
    diverged: int


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a metrics file. An incomplete last line is left out: it is still being written."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def history_of(events: Iterable[Mapping[str, Any]]) -> History:
    """Sum up the events of one run."""
    losses: dict[int, dict[int, float]] = defaultdict(dict)
    sums: dict[str, int] = defaultdict(int)
    for event in events:
        match event["event"]:
            case "measurement":
                for field in ("link_bytes_sent", "link_bytes_dense", "payload_bytes", "payload_bytes_dense"):
                    sums[field] += int(event[field])
                if event["complete"]:
                    loss = event["validation_loss"]  # null where it is not a finite number
                    losses[event["replica"]][event["round"]] = math.nan if loss is None else loss
                    sums["tokens"] += int(event["tokens"])
            case "decision":
                sums["committed" if event["committed"] else "aborted"] += 1
            case "diverged":
                sums["diverged"] += 1
    replicas = tuple(
        ReplicaHistory(index, tuple(sorted(by_round.items()))) for index, by_round in sorted(losses.items())
    )
    traffic = BytesSent(
        sums["link_bytes_sent"], sums["link_bytes_dense"], sums["payload_bytes"], sums["payload_bytes_dense"]
    )
    return History(replicas, traffic, sums["tokens"], sums["committed"], sums["aborted"], sums["diverged"])


def plot_losses(history: History, title: str, path: Path) -> None:
    """Write a PNG of every replica's validation loss by round. Raises HetnodeError MISSING_EXTRA."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(8, 5), layout="constrained")
    for replica in history.replicas:
        rounds, losses = zip(*replica.losses, strict=True)
        axes.plot(rounds, losses, marker=".", label=f"replica {replica.index}")
    axes.set(title=title, xlabel="round", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plots.close(figure)


def ratio(dense: int, sent: int) -> str:
    """Dense bytes / sent bytes, such as "57x less"; "" if nothing was sent."""
    return f"{dense / sent:.0f}x less" if sent else ""


def size(nbytes: float) -> str:
    """Bytes for people, in decimal units as on a network."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
